//! What a device's memory can do: the ceiling that kernels bound by memory are measured against.

use std::time::Instant;

use super::backend::CudaBackend;
use super::memory::Buffer;
use crate::error::KernelError;

/// Bytes copied at once: several times what caches hold.
const BYTES: usize = 256 << 20;
/// Copies that are timed together.
const COPIES: usize = 16;

impl CudaBackend {
    /// Bytes a second that copies on the device read and write, both counted.
    ///
    /// # Errors
    /// No room for two times 256 MiB, or a device that is lost.
    pub fn memory_bandwidth(&self) -> Result<f64, KernelError> {
        let device = self.device();
        let [from, to] = ["copied from", "copied to"].map(|what| Buffer::zeroed(device, what, BYTES));
        let (from, to) = (from?, to?);
        // The first one is not timed: it may wait for the clock of the memory to rise.
        device.driver.copy(device.compute, from.all(), to.all())?;
        device.driver.finish(device.compute)?;
        let begun = Instant::now();
        for _ in 0..COPIES {
            device.driver.copy(device.compute, from.all(), to.all())?;
        }
        device.driver.finish(device.compute)?;
        Ok((2 * COPIES * BYTES) as f64 / begun.elapsed().as_secs_f64())
    }
}
