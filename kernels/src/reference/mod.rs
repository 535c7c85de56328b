//! Slow, obvious twins of the kernels, under the same names: plain loops over plain slices, f64 where
//! it helps. The oracle of the tests, written from the formats' definitions and never from the kernels.

mod append;
mod attention;
mod codec;
mod dequantise;
mod geglu;
mod linear;
mod norm;
mod rope;
mod scale;
mod swiglu;

pub use append::{KvRows, round_int8};
pub use attention::{attention, window};
pub use codec::quantise;
pub use dequantise::dequantise;
pub use geglu::geglu;
pub use linear::linear;
pub use norm::{head_norm, rms_norm};
pub use rope::rope;
pub use scale::{scale, scale_channels};
pub use swiglu::swiglu;
