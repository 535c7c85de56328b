//! The slow, obvious twin of every kernel, under the same name: plain loops over plain slices, f64 where
//! it helps. The oracle of the tests, written from the formats' definitions and never from the kernels.

mod append;
mod attention;
mod dequantise;
mod linear;
mod norm;
mod rope;
mod swiglu;

pub use append::KvRows;
pub use attention::attention;
pub use dequantise::dequantise;
pub use linear::linear;
pub use norm::rms_norm;
pub use rope::rope;
pub use swiglu::swiglu;
