//! The backend that runs on the host's processor.
//!
//! Every kernel is one generic function over `lanes::Lanes`: a lane owns one output row, key or
//! channel and walks its sum in scalar order, so all instruction sets, thread counts and batch shapes give
//! the same bits (invariant I1). Work is cut by data into items for the worker pool. This folder alone knows
//! intrinsics and threads of the kernels; it knows no session and no file format beyond weight blocks.

mod add;
mod attention;
mod backend;
pub(crate) mod buffer;
pub mod ceiling;
mod embed;
mod exp;
mod gate;
mod geglu;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod lanes_avx2;
#[cfg(target_arch = "x86_64")]
mod lanes_avx512;
mod lanes_scalar;
mod linear;
mod linear_float;
mod linear_quantised;
mod matrix;
mod norm;
mod packing;
mod pages;
mod quantise;
mod repack;
mod rope;
pub mod sampling;
mod scale;
mod swiglu;
mod sync;
#[cfg(test)]
mod tests;
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
    /// x86-64 with AVX-512 F, BW, VL and VNNI besides.
    Avx512,
}

impl Isa {
    /// All of them, the fastest last.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// Those of this processor, the fastest last.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512 VNNI",
        }
    }

    /// Whether its kernels sum products in i32, see `lanes::Lanes::WHOLE`.
    pub(crate) fn sums_are_whole(self) -> bool {
        match self {
            Self::Scalar => <lanes_scalar::Scalar as lanes::Lanes>::WHOLE,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => <lanes_avx2::Avx2 as lanes::Lanes>::WHOLE,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => <lanes_avx512::Avx512 as lanes::Lanes>::WHOLE,
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => <lanes_scalar::Scalar as lanes::Lanes>::WHOLE,
        }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => lanes_avx2::Avx2::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => lanes_avx512::Avx512::detect().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

/// The fastest instruction set of this processor.
pub fn best_isa() -> Isa {
    Isa::available().last().unwrap_or(Isa::Scalar)
}

/// How exactly activations are rounded before they meet quantised weights. Each is a numerics class of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// To 8 bits in blocks of 32; blocks that stand out of their row to 16.
    #[default]
    Fast,
    /// To 16 bits, with twice the multiplications; logits come nearer to those of float activations.
    Fine,
}

impl std::str::FromStr for Rounding {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "fast" => Ok(Self::Fast),
            "fine" => Ok(Self::Fine),
            other => Err(format!("'{other}' is not a rounding: use fast or fine")),
        }
    }
}

/// How to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads that share the work, the caller's included; 0 for one per processor.
    pub threads: usize,
    /// Instruction set; `None` for the best one.
    pub isa: Option<Isa>,
    /// Rounding of activations.
    pub rounding: Rounding,
}

impl Default for CpuOptions {
    /// One thread per processor, the best instruction set, fast.
    fn default() -> Self {
        Self { threads: 0, isa: None, rounding: Rounding::Fast }
    }
}
