//! What is owned on a device, and gives itself back: streams, events, memory.

use std::sync::Arc;

use super::driver::{DeviceMemory, Driver, Event, PinnedMemory, Span, Stream};
use super::error::DeviceError;
use crate::cpu::buffer::Plain;
use crate::error::KernelError;

/// The bytes of numbers.
pub(super) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: numbers without padding are bytes, and a byte needs no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of numbers, to be written.
pub(super) fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; every pattern of bytes is a number.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// A device with its three streams.
pub(super) struct Device {
    pub(super) driver: Arc<dyn Driver>,
    /// The forward pass.
    pub(super) compute: Stream,
    /// Cells that come.
    pub(super) load: Stream,
    /// Cells that go.
    pub(super) save: Stream,
}

impl Device {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Result<Arc<Self>, DeviceError> {
        let (compute, load, save) = (driver.stream()?, driver.stream()?, driver.stream()?);
        Ok(Arc::new(Self { driver, compute, load, save }))
    }

    /// Waits until nothing is under way. A lost device has nothing under way, so a failure says the same.
    fn settle(&self) {
        for stream in [self.compute, self.load, self.save] {
            let _ = self.driver.finish(stream);
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.settle();
        for stream in [self.compute, self.load, self.save] {
            self.driver.end_stream(stream);
        }
    }
}

/// An event.
pub(super) struct Mark {
    device: Arc<Device>,
    pub(super) event: Event,
}

impl Mark {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        Ok(Self { device: device.clone(), event: device.driver.event()? })
    }

    /// Lets what comes on stream `after` wait for what is on stream `before` now.
    pub(super) fn order(&self, before: Stream, after: Stream) -> Result<(), DeviceError> {
        self.device.driver.record(self.event, before)?;
        self.device.driver.wait(after, self.event)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.device.settle();
        self.device.driver.end_event(self.event);
    }
}

/// Memory of the device.
pub(super) struct Buffer {
    device: Arc<Device>,
    memory: DeviceMemory,
    bytes: usize,
}

impl Buffer {
    /// Takes `bytes` bytes for `what`, with undefined contents.
    pub(super) fn new(device: &Arc<Device>, what: &str, bytes: usize) -> Result<Self, KernelError> {
        // Nothing has a size of zero, but a driver refuses it.
        let bytes = bytes.max(1);
        let memory = device.driver.alloc(bytes).map_err(|error| refused(what, error))?;
        Ok(Self { device: device.clone(), memory, bytes })
    }

    /// As `new`, filled with zeros by the compute stream.
    pub(super) fn zeroed(device: &Arc<Device>, what: &str, bytes: usize) -> Result<Self, KernelError> {
        let buffer = Self::new(device, what, bytes)?;
        device.driver.zero(device.compute, buffer.all())?;
        Ok(buffer)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn all(&self) -> Span<DeviceMemory> {
        self.part(0, self.bytes)
    }

    pub(super) fn part(&self, at: usize, bytes: usize) -> Span<DeviceMemory> {
        Span { memory: self.memory, at, bytes }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.settle();
        self.device.driver.free(self.memory);
    }
}

/// Pinned memory of the host.
pub(super) struct Pinned {
    device: Arc<Device>,
    memory: PinnedMemory,
    bytes: usize,
}

impl Pinned {
    pub(super) fn new(device: &Arc<Device>, what: &str, bytes: usize) -> Result<Self, KernelError> {
        let memory = device.driver.pin(bytes).map_err(|error| refused(what, error))?;
        Ok(Self { device: device.clone(), memory, bytes })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn part(&self, at: usize, bytes: usize) -> Span<PinnedMemory> {
        Span { memory: self.memory, at, bytes }
    }

    pub(super) fn write(&self, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.device.driver.write_pinned(self.memory, at, bytes)
    }

    pub(super) fn read(&self, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        self.device.driver.read_pinned(self.memory, at, out)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.device.settle();
        self.device.driver.unpin(self.memory);
    }
}

/// Says what there was no memory for.
fn refused(what: &str, error: DeviceError) -> KernelError {
    match error {
        DeviceError::OutOfMemory { place, bytes } => {
            KernelError::OutOfMemory { what: format!("{what} {place}"), bytes }
        }
        other => other.into(),
    }
}
