//! The seam between the launch code and a GPU's driver: memory, streams, events, modules, launches.
//!
//! Everything on a stream happens later, in the order of the stream; streams know of each other only through events. So
//! whoever calls has to order what touches the same memory. A launch says which memory it reads and writes, which a GPU
//! does not need to know; an implementation for tests checks with it that nothing is read or written too early, that
//! places lie inside of what was allocated, and that nothing is used after it was freed.

use super::error::DeviceError;

/// Memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceMemory(pub u64);

/// Memory of the host that the device reads and writes by itself. Only the driver touches it, see
/// [`Driver::write_pinned`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinnedMemory(pub u64);

/// A queue of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stream(pub u64);

/// A mark in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Event(pub u64);

/// Loaded code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Module(pub u64);

/// A kernel of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Function(pub u64);

/// A part of memory `M`: `bytes` bytes from byte `at` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span<M> {
    /// The whole.
    pub memory: M,
    /// First byte.
    pub at: usize,
    /// Length in bytes.
    pub bytes: usize,
}

/// An argument of a kernel, in its place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// A pointer to what the kernel reads.
    Read(Span<DeviceMemory>),
    /// A pointer to what the kernel writes.
    Write(Span<DeviceMemory>),
    /// A pointer to what it does both to.
    Change(Span<DeviceMemory>),
    /// A null pointer.
    Null,
    /// A number of four bytes.
    U32(u32),
    /// A number of eight bytes.
    U64(u64),
    /// A number of four bytes.
    F32(f32),
}

/// One start of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub function: Function,
    /// Blocks in x, y and z; none is zero.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Its arguments in order.
    pub args: &'a [Arg],
}

/// What is known about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, for people.
    pub name: String,
    /// Compute capability, such as `(9, 0)`.
    pub capability: (u32, u32),
    /// Memory in bytes.
    pub memory: u64,
}

/// One device of a driver. Every call may fail with [`DeviceError::Lost`], and then all later ones do.
#[allow(clippy::missing_errors_doc, reason = "said above for all, and by the variants of the error")]
pub trait Driver: Send + Sync + 'static {
    /// The device.
    fn info(&self) -> &DeviceInfo;

    /// Bytes of the device that may still be taken, by anyone.
    fn free_memory(&self) -> Result<u64, DeviceError>;
    /// Takes `bytes` (above zero) bytes of the device, with undefined contents, aligned to 256.
    fn alloc(&self, bytes: usize) -> Result<DeviceMemory, DeviceError>;
    /// Gives them back. Nothing may be under way that uses them.
    fn free(&self, memory: DeviceMemory);
    /// Takes pinned memory of the host.
    fn pin(&self, bytes: usize) -> Result<PinnedMemory, DeviceError>;
    /// Gives it back. Nothing may be under way that uses it.
    fn unpin(&self, memory: PinnedMemory);
    /// Copies to pinned memory, at once. Refuses what is outside of it.
    fn write_pinned(&self, memory: PinnedMemory, at: usize, bytes: &[u8]) -> Result<(), DeviceError>;
    /// Copies from pinned memory, at once. Refuses what is outside of it.
    fn read_pinned(&self, memory: PinnedMemory, at: usize, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Makes a stream.
    fn stream(&self) -> Result<Stream, DeviceError>;
    /// Ends a stream on which nothing is under way.
    fn end_stream(&self, stream: Stream);
    /// Makes an event.
    fn event(&self) -> Result<Event, DeviceError>;
    /// Ends an event that nobody waits for.
    fn end_event(&self, event: Event);
    /// Moves the event to the present end of the stream.
    fn record(&self, event: Event, stream: Stream) -> Result<(), DeviceError>;
    /// What comes on the stream from now on comes after the event's present place.
    fn wait(&self, stream: Stream, event: Event) -> Result<(), DeviceError>;
    /// Blocks the caller until the event's present place is reached.
    fn finish_event(&self, event: Event) -> Result<(), DeviceError>;
    /// Blocks the caller until the stream is empty.
    fn finish(&self, stream: Stream) -> Result<(), DeviceError>;

    /// Copies from the host to the device; both have the same length.
    fn upload(
        &self,
        stream: Stream,
        from: Span<PinnedMemory>,
        to: Span<DeviceMemory>,
    ) -> Result<(), DeviceError>;
    /// Copies from the device to the host; both have the same length.
    fn download(
        &self,
        stream: Stream,
        from: Span<DeviceMemory>,
        to: Span<PinnedMemory>,
    ) -> Result<(), DeviceError>;
    /// Copies on the device; both have the same length and do not overlap.
    fn copy(
        &self,
        stream: Stream,
        from: Span<DeviceMemory>,
        to: Span<DeviceMemory>,
    ) -> Result<(), DeviceError>;
    /// Fills with zero bytes.
    fn zero(&self, stream: Stream, to: Span<DeviceMemory>) -> Result<(), DeviceError>;

    /// Loads code: PTX, as text.
    fn load(&self, code: &str) -> Result<Module, DeviceError>;
    /// Finds a kernel.
    fn function(&self, module: Module, name: &str) -> Result<Function, DeviceError>;
    /// Starts a kernel.
    fn launch(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), DeviceError>;
}
