//! A device that is the host: memory is the host's, everything happens at once, kernels run through the shim.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use kernels::cuda::{
    Arg, DeviceError, DeviceInfo, DeviceMemory, Driver, Event, Function, Launch, Module, PinnedMemory, Span,
    Stream,
};

use super::Shim;

/// Alignment of memory, and the bytes before and behind it that nobody may change.
const ALIGN: usize = 256;
/// What memory holds at first: NaN as f16 and as f32.
const POISON: u8 = 0xff;

/// The device.
pub(crate) struct ShimDriver {
    info: DeviceInfo,
    order: u32,
    /// Bytes that there are.
    limit: usize,
    memory: Mutex<HashMap<u64, usize>>,
    names: Mutex<Vec<String>>,
    next: AtomicU64,
}

impl ShimDriver {
    /// Threads run in order `order`, see `shim_launch`.
    pub(crate) fn new(order: u32) -> Self {
        Self::with_memory(order, usize::MAX)
    }

    /// As `new`, with `limit` bytes of memory.
    pub(crate) fn with_memory(order: u32, limit: usize) -> Self {
        let info = DeviceInfo { name: "shim".to_string(), capability: (9, 0), memory: limit as u64 };
        let (memory, names) = (Mutex::default(), Mutex::default());
        Self { info, order, limit, memory, names, next: AtomicU64::new(1) }
    }

    fn take(&self, bytes: usize, place: &'static str) -> Result<u64, DeviceError> {
        let mut memory = self.memory.lock().unwrap();
        if bytes > self.limit - memory.values().sum::<usize>() {
            return Err(DeviceError::OutOfMemory { place, bytes });
        }
        // SAFETY: the size is above zero.
        let start = unsafe { alloc(layout(bytes)) };
        assert!(!start.is_null());
        // SAFETY: just allocated.
        unsafe { start.write_bytes(POISON, layout(bytes).size()) };
        let address = start as u64 + ALIGN as u64;
        memory.insert(address, bytes);
        Ok(address)
    }

    fn give_back(&self, address: u64) {
        let bytes = self.memory.lock().unwrap().remove(&address).expect("freed twice, or never allocated");
        let start = (address - ALIGN as u64) as *mut u8;
        // SAFETY: allocated by `take` with this layout.
        let all = unsafe { std::slice::from_raw_parts(start, layout(bytes).size()) };
        let around = all[..ALIGN].iter().chain(&all[ALIGN + bytes..]);
        assert!(
            around.into_iter().all(|byte| *byte == POISON),
            "something was written beside {bytes} bytes of memory"
        );
        // SAFETY: as above.
        unsafe { dealloc(start, layout(bytes)) };
    }

    fn new_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes + 2 * ALIGN, ALIGN).unwrap()
}

/// Copies; the recorder has checked both parts.
fn copy(from: u64, to: u64, bytes: usize) {
    // SAFETY: both parts are inside of memory of ours and do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
}

fn device(span: Span<DeviceMemory>) -> u64 {
    span.memory.0 + span.at as u64
}

fn host(span: Span<PinnedMemory>) -> u64 {
    span.memory.0 + span.at as u64
}

impl Driver for ShimDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn free_memory(&self) -> Result<u64, DeviceError> {
        Ok((self.limit - self.memory.lock().unwrap().values().sum::<usize>()) as u64)
    }
    fn alloc(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        self.take(bytes, "on the device").map(DeviceMemory)
    }
    fn free(&self, memory: DeviceMemory) {
        self.give_back(memory.0);
    }
    fn pin(&self, bytes: usize) -> Result<PinnedMemory, DeviceError> {
        self.take(bytes, "of pinned host memory").map(PinnedMemory)
    }
    fn unpin(&self, memory: PinnedMemory) {
        self.give_back(memory.0);
    }
    fn write_pinned(&self, memory: PinnedMemory, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        copy(bytes.as_ptr() as u64, memory.0 + at as u64, bytes.len());
        Ok(())
    }
    fn read_pinned(&self, memory: PinnedMemory, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        copy(memory.0 + at as u64, out.as_mut_ptr() as u64, out.len());
        Ok(())
    }
    fn stream(&self) -> Result<Stream, DeviceError> {
        Ok(Stream(self.new_id()))
    }
    fn end_stream(&self, _: Stream) {}
    fn event(&self) -> Result<Event, DeviceError> {
        Ok(Event(self.new_id()))
    }
    fn end_event(&self, _: Event) {}
    fn record(&self, _: Event, _: Stream) -> Result<(), DeviceError> {
        Ok(())
    }
    fn wait(&self, _: Stream, _: Event) -> Result<(), DeviceError> {
        Ok(())
    }
    fn finish_event(&self, _: Event) -> Result<(), DeviceError> {
        Ok(())
    }
    fn finish(&self, _: Stream) -> Result<(), DeviceError> {
        Ok(())
    }
    fn upload(&self, _: Stream, from: Span<PinnedMemory>, to: Span<DeviceMemory>) -> Result<(), DeviceError> {
        copy(host(from), device(to), to.bytes);
        Ok(())
    }
    fn download(
        &self,
        _: Stream,
        from: Span<DeviceMemory>,
        to: Span<PinnedMemory>,
    ) -> Result<(), DeviceError> {
        copy(device(from), host(to), to.bytes);
        Ok(())
    }
    fn copy(&self, _: Stream, from: Span<DeviceMemory>, to: Span<DeviceMemory>) -> Result<(), DeviceError> {
        copy(device(from), device(to), to.bytes);
        Ok(())
    }
    fn zero(&self, _: Stream, to: Span<DeviceMemory>) -> Result<(), DeviceError> {
        // SAFETY: the recorder has checked the part.
        unsafe { (device(to) as *mut u8).write_bytes(0, to.bytes) };
        Ok(())
    }
    fn load(&self, _: &str) -> Result<Module, DeviceError> {
        Ok(Module(self.new_id()))
    }
    fn function(&self, _: Module, name: &str) -> Result<Function, DeviceError> {
        let mut names = self.names.lock().unwrap();
        names.push(name.to_string());
        Ok(Function(names.len() as u64 - 1))
    }

    fn launch(&self, _: Stream, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let name = self.names.lock().unwrap()[launch.function.0 as usize].clone();
        let of = |arg: &Arg| match *arg {
            Arg::Read(span) | Arg::Write(span) | Arg::Change(span) => (device(span), 'p'),
            Arg::Null => (0, 'p'),
            Arg::U32(value) => (u64::from(value), 'u'),
            Arg::U64(value) => (value, 'l'),
            Arg::F32(value) => (u64::from(value.to_bits()), 'f'),
        };
        let (mut args, kinds): (Vec<u64>, String) = launch.args.iter().map(of).unzip();
        // SAFETY: the recorder has checked that all parts are inside of memory of ours; how far kernels reach is what the
        // tests find out, with poison around.
        let done =
            unsafe { Shim::get().launch(&name, launch.grid, launch.threads, &mut args, &kinds, self.order) };
        done.map_err(|problem| DeviceError::Call { call: "shim_launch", problem })
    }
}
