//! Why a GPU cannot be used, or stopped.

/// A device that cannot be used, or a call that it refused. A lost device stays lost: what is to go on has to go on
/// elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The driver's library is not on this machine.
    #[error(
        "no CUDA driver: the library libcuda could not be loaded; install the NVIDIA driver, or use the CPU"
    )]
    NoDriver,
    /// The driver does not know what the kernels were compiled to.
    #[error(
        "the CUDA driver is too old ({found}): it has to support {needed}; update the NVIDIA driver, or use the CPU"
    )]
    OldDriver {
        /// What it supports, or what it said.
        found: String,
        /// What it has to support.
        needed: &'static str,
    },
    /// There is no such device.
    #[error("no CUDA device {index}: the driver shows {found}; choose one below that, or use the CPU")]
    NoDevice {
        /// The one asked for.
        index: usize,
        /// How many there are.
        found: usize,
    },
    /// The device is of a generation that the kernels are not compiled for.
    #[error("the device {name} has compute capability {found}; the kernels need 8.0 or later, use the CPU")]
    OldDevice {
        /// Its name.
        name: String,
        /// Its capability.
        found: String,
    },
    /// The attention kernels have no room for heads of this size.
    #[error(
        "the CUDA kernels have no attention for heads of {head_dim} channels: they take multiples of 8 up to {most}; \
         use the CPU"
    )]
    HeadSize {
        /// Channels of a head.
        head_dim: usize,
        /// Most channels.
        most: usize,
    },
    /// The device, or the host for pinned memory, has no room.
    #[error("no memory for {bytes} bytes {place}; use a smaller model, pool or context")]
    OutOfMemory {
        /// `on the device` or `of pinned host memory`.
        place: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },
    /// The run-time compiler is not on this machine, and the kernels are not in the cache.
    #[error(
        "no run-time compiler: {problem}; install NVRTC 12 or 13 (the Python package nvidia-cuda-nvrtc-cu12 has it) or \
         name its library, or use the CPU"
    )]
    NoCompiler {
        /// What was tried.
        problem: String,
    },
    /// A kernel does not compile, or a part of the compiler's interface is missing.
    #[error("compiling {file} failed: {problem}; use another version of NVRTC, or use the CPU")]
    Compile {
        /// Source file.
        file: String,
        /// What the compiler said.
        problem: String,
    },
    /// A module has no kernel of this name.
    #[error("there is no kernel {name}; the launch code and the kernels are of different versions")]
    NoKernel {
        /// Its name.
        name: String,
    },
    /// The device failed and cannot be used by this process any more.
    #[error(
        "the device was lost in {call}: {problem}; its KV is gone, the tokens are not: start again, on the CPU if the \
         device does not come back, and go on from them"
    )]
    Lost {
        /// The driver's call that showed it.
        call: &'static str,
        /// What the driver said.
        problem: String,
    },
    /// Any other refusal.
    #[error("{call} failed: {problem}")]
    Call {
        /// The driver's call.
        call: &'static str,
        /// What the driver said.
        problem: String,
    },
}
