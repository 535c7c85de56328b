//! The backend that runs on the host's processor.
//!
//! Every kernel is one generic function over `lanes::Lanes`: a lane owns one output row, key or
//! channel and walks its sum in scalar order, so all instruction sets, thread counts and batch shapes give
//! the same bits (invariant I1). Work is cut by data into items for the worker pool. This folder alone knows
//! intrinsics and threads of the kernels; it knows no session and no file format beyond weight blocks.

mod add;
mod attention;
mod backend;
mod buffer;
pub mod ceiling;
mod check;
mod embed;
mod exp;
mod geglu;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod lanes_avx2;
mod lanes_scalar;
mod linear;
mod linear_fine;
mod linear_float;
mod linear_quantised;
mod matrix;
mod norm;
mod packing;
mod pages;
mod quantise;
mod repack;
mod rope;
mod scale;
mod swiglu;
mod workers;

pub use backend::{CpuBackend, CpuTensor};
pub use matrix::{CpuMatrix, CpuVector};
pub use pages::CpuPool;
pub use rope::CpuRope;

/// Instruction sets the kernels are compiled for. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust for any processor; slow.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
}

impl Isa {
    /// Name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "AVX2",
        }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => lanes_avx2::Avx2::detect().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 => false,
        }
    }
}

/// The fastest instruction set of this processor.
pub fn best_isa() -> Isa {
    if Isa::Avx2.is_available() { Isa::Avx2 } else { Isa::Scalar }
}

/// How to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads that share the work, the caller's included; 0 for one per processor.
    pub threads: usize,
    /// Instruction set; `None` for the best one.
    pub isa: Option<Isa>,
}

impl Default for CpuOptions {
    /// One thread per processor, the best instruction set.
    fn default() -> Self {
        Self { threads: 0, isa: None }
    }
}
