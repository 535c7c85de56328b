//! The way between ordinary memory and the device: through pinned memory, which the device copies by itself.

use std::sync::Arc;

use super::driver::{DeviceMemory, Span, Stream};
use super::memory::{Buffer, Device, Mark, Pinned};
use crate::error::KernelError;

/// Bytes of a slot at least, and of a piece of something large.
const SLOT_BYTES: usize = 64 << 10;
const PIECE_BYTES: usize = 4 << 20;
/// Parts begin at multiples of this.
const ALIGN: usize = 16;

/// Pinned memory, and memory of the device of the same size.
struct Room {
    pinned: Pinned,
    device: Buffer,
}

/// Room for one call.
struct Slot {
    room: Option<Room>,
    mark: Mark,
    state: State,
}

/// Whether a slot may be written again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    /// Handed out; its mark is not recorded, because the call is not over or failed.
    Open,
    /// Free once its mark is reached.
    Marked,
}

/// Small things on their way to kernels of one stream: each call takes a slot and gives it back when its kernels are
/// queued.
pub(super) struct Staging {
    device: Arc<Device>,
    stream: Stream,
    slots: Vec<Slot>,
    next: usize,
}

/// Parts on the device, and the slot they are in.
pub(super) struct Staged<const N: usize> {
    pub(super) parts: [Span<DeviceMemory>; N],
    slot: usize,
}

impl Staging {
    /// `slots` calls may be under way at once before the host waits for the oldest.
    pub(super) fn new(device: &Arc<Device>, stream: Stream, slots: usize) -> Result<Self, KernelError> {
        let slot = || Ok(Slot { room: None, mark: Mark::new(device)?, state: State::Free });
        let slots = (0..slots).map(|_| slot()).collect::<Result<_, KernelError>>()?;
        Ok(Self { device: device.clone(), stream, slots, next: 0 })
    }

    /// The next slot, with room for `bytes`, once nothing uses it any more.
    fn take(&mut self, bytes: usize) -> Result<usize, KernelError> {
        let index = self.next;
        self.next = (self.next + 1) % self.slots.len();
        let slot = &mut self.slots[index];
        match slot.state {
            State::Free => {}
            State::Open => self.device.driver.finish(self.stream)?,
            State::Marked => self.device.driver.finish_event(slot.mark.event)?,
        }
        slot.state = State::Open;
        if slot.room.as_ref().is_none_or(|room| room.pinned.bytes() < bytes) {
            slot.room = None;
            let size = bytes.next_power_of_two().max(SLOT_BYTES);
            let pinned = Pinned::new(&self.device, "staging", size)?;
            slot.room = Some(Room { pinned, device: Buffer::new(&self.device, "staging", size)? });
        }
        Ok(index)
    }

    /// Copies parts to the device, in the order of the stream.
    pub(super) fn stage<const N: usize>(&mut self, parts: [&[u8]; N]) -> Result<Staged<N>, KernelError> {
        let bytes: usize = parts.iter().map(|part| part.len().next_multiple_of(ALIGN)).sum();
        let index = self.take(bytes.max(ALIGN))?;
        let room = self.room(index)?;
        let mut at = 0;
        let mut spans = [room.device.part(0, 0); N];
        for (span, part) in spans.iter_mut().zip(parts) {
            room.pinned.write(at, part)?;
            *span = room.device.part(at, part.len());
            at += part.len().next_multiple_of(ALIGN);
        }
        if at > 0 {
            self.device.driver.upload(self.stream, room.pinned.part(0, at), room.device.part(0, at))?;
        }
        Ok(Staged { parts: spans, slot: index })
    }

    /// The kernels that use what was staged are queued.
    pub(super) fn done<const N: usize>(&mut self, staged: &Staged<N>) -> Result<(), KernelError> {
        self.mark(staged.slot)
    }

    /// Copies `bytes` to `to`, in the order of the stream.
    pub(super) fn send(&mut self, bytes: &[u8], to: Span<DeviceMemory>) -> Result<(), KernelError> {
        for (piece, at) in bytes.chunks(PIECE_BYTES).zip((to.at..).step_by(PIECE_BYTES)) {
            let index = self.take(piece.len())?;
            let room = self.room(index)?;
            room.pinned.write(0, piece)?;
            let to = Span { at, bytes: piece.len(), ..to };
            self.device.driver.upload(self.stream, room.pinned.part(0, piece.len()), to)?;
            self.mark(index)?;
        }
        Ok(())
    }

    fn mark(&mut self, index: usize) -> Result<(), KernelError> {
        let slot = &mut self.slots[index];
        self.device.driver.record(slot.mark.event, self.stream)?;
        slot.state = State::Marked;
        Ok(())
    }

    fn room(&self, index: usize) -> Result<&Room, KernelError> {
        let missing = || KernelError::OutOfMemory { what: "staging".to_string(), bytes: SLOT_BYTES };
        self.slots[index].room.as_ref().ok_or_else(missing)
    }
}

/// Where results land on the host.
pub(super) struct Landing {
    device: Arc<Device>,
    stream: Stream,
    pinned: Option<Pinned>,
}

impl Landing {
    pub(super) fn new(device: &Arc<Device>, stream: Stream) -> Self {
        Self { device: device.clone(), stream, pinned: None }
    }

    /// Waits for the stream and copies `from` to `out`, of the same length.
    pub(super) fn fetch(&mut self, from: Span<DeviceMemory>, out: &mut [u8]) -> Result<(), KernelError> {
        let size = out.len().clamp(SLOT_BYTES, PIECE_BYTES).next_power_of_two();
        let pinned = match self.pinned.take() {
            Some(pinned) if pinned.bytes() >= size => pinned,
            // The old one goes before the new one comes.
            old => {
                drop(old);
                Pinned::new(&self.device, "results", size)?
            }
        };
        let pinned = self.pinned.insert(pinned);
        let size = pinned.bytes();
        for (out, at) in out.chunks_mut(size).zip((from.at..).step_by(size)) {
            let from = Span { at, bytes: out.len(), ..from };
            self.device.driver.download(self.stream, from, pinned.part(0, out.len()))?;
            self.device.driver.finish(self.stream)?;
            pinned.read(0, out)?;
        }
        Ok(())
    }
}

/// Memory of the device that is kept from call to call and grows.
pub(super) struct Scratch {
    device: Arc<Device>,
    what: &'static str,
    buffer: Option<Buffer>,
}

impl Scratch {
    pub(super) fn new(device: &Arc<Device>, what: &'static str) -> Self {
        Self { device: device.clone(), what, buffer: None }
    }

    /// At least `bytes` bytes, with undefined contents.
    pub(super) fn of(&mut self, bytes: usize) -> Result<Span<DeviceMemory>, KernelError> {
        let buffer = match self.buffer.take() {
            Some(buffer) if buffer.bytes() >= bytes => buffer,
            old => {
                drop(old);
                Buffer::new(&self.device, self.what, bytes.next_power_of_two())?
            }
        };
        Ok(self.buffer.insert(buffer).part(0, bytes))
    }
}
