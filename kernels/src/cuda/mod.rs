//! The backend that runs on an NVIDIA GPU.
//!
//! Kernels are the sources in `kernels/cuda`, compiled at first use by NVRTC where it is installed, and kept on disk. The
//! launch code knows a device only through the [`Driver`] trait: [`GpuDriver`] is the real one, found at run time, and
//! tests have others, which check the order of everything and run the same kernels on the CPU.
//!
//! **State of its proof:** kernels and launch code are tested without a GPU (kernels against the `reference` through a shim,
//! launches against a driver that checks order, sizes and lifetimes; every kernel compiles and assembles for three
//! architectures). They have not been run on a GPU.
//!
//! Work goes to three streams. Compute has everything of a forward pass, in order. Loads bring cells: their bytes cross
//! the bus while compute goes on, and only the kernel that puts them into pages waits for compute; compute waits for that
//! before it next uses the pool. Saves take cells out, after compute and loads. The host waits where it reads something.
//!
//! It knows no session and no file format beyond weight blocks.

mod attention;
mod backend;
mod cache;
mod ceiling;
mod cells;
mod driver;
mod error;
mod gpu;
mod linear;
mod matrix;
mod memory;
mod nvrtc;
mod pool;
mod programs;
mod relocate;
mod sources;
mod staging;
mod survey;

pub use backend::{CudaBackend, CudaOptions, CudaRope, CudaTensor, CudaVector};
pub use cache::Cache;
pub use driver::{
    Arg, DeviceInfo, DeviceMemory, Driver, Event, Function, Launch, Module, PinnedMemory, Span, Stream,
};
pub use error::DeviceError;
pub use gpu::GpuDriver;
pub use matrix::CudaMatrix;
pub use nvrtc::{Compiler, LazyNvrtc, Nvrtc};
pub use pool::CudaPool;
pub use sources::{HEADERS, OPTIONS, SOURCES, Source, source_of};
pub use survey::Survey;
