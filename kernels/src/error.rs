//! What a kernel can refuse, and why.

use crate::codec::lossless::Damage;
use crate::cuda::DeviceError;
use crate::formats::TensorType;

/// A refused kernel call. Nothing was computed or only part of an output was written; inputs are unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The number of inputs of a weight matrix does not fit its storage type.
    #[error("tensor `{tensor}`: {cols} inputs are not a multiple of {block}, the block size of {format}")]
    BlockSize {
        /// Tensor name.
        tensor: String,
        /// Its storage type.
        format: TensorType,
        /// Its inputs.
        cols: usize,
        /// The block size it must be a multiple of.
        block: usize,
    },
    /// The bytes of a tensor do not match its shape.
    #[error("tensor `{tensor}`: {got} bytes given, its shape and type need {expected}")]
    ByteCount {
        /// Tensor name.
        tensor: String,
        /// Bytes the shape needs.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// A weight (or the scale of a weight block) is NaN or infinite.
    #[error("tensor `{tensor}`: row {row} holds NaN or infinity; the file is damaged, fetch it again")]
    NotFinite {
        /// Tensor name.
        tensor: String,
        /// First bad row (index for a vector).
        row: usize,
    },
    /// A shape is empty or too large to address.
    #[error("{what}: {rows} x {cols} is empty or too large")]
    Size {
        /// What was to be made.
        what: String,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// Memory could not be had.
    #[error("{what}: no memory for {bytes} bytes; use a smaller model, pool or context")]
    OutOfMemory {
        /// What was to be made.
        what: String,
        /// Bytes asked for.
        bytes: usize,
    },
    /// Two shapes that must agree do not.
    #[error("{kernel}: {what} is {got}, expected {expected}")]
    Shape {
        /// Kernel name.
        kernel: &'static str,
        /// The argument.
        what: &'static str,
        /// What it must be.
        expected: usize,
        /// What it is.
        got: usize,
    },
    /// An index points outside of what it indexes.
    #[error("{kernel}: {what} {index} is out of range, the limit is {limit}")]
    OutOfRange {
        /// Kernel name.
        kernel: &'static str,
        /// The argument.
        what: &'static str,
        /// The bad index.
        index: usize,
        /// First index that is too large.
        limit: usize,
    },
    /// Two groups of one call claim the same rows.
    #[error("{kernel}: two groups claim row {row}; the rows of a step belong to one group each")]
    Overlap {
        /// Kernel name.
        kernel: &'static str,
        /// The row claimed twice.
        row: usize,
    },
    /// The processor lacks an instruction set that was asked for.
    #[error("this processor has no {isa}; leave the instruction set unset to use the best one it has")]
    MissingIsa {
        /// Instruction set asked for.
        isa: &'static str,
    },
    /// A worker thread could not be started.
    #[error("no worker thread could be started: {problem}; ask for fewer threads")]
    Workers {
        /// What the operating system said.
        problem: String,
    },
    /// Bytes that are no cell packed without loss.
    #[error("a packed cell cannot be used: {0}")]
    Packed(#[from] Damage),
    /// The GPU, or what is needed to use it.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
