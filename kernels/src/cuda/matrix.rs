//! Weight matrices on the device: rows in planes, as `kernels/cuda/formats.cuh` reads them.

use std::sync::Arc;

use half::f16;

use super::memory::{Buffer, Device};
use super::staging::Staging;
use crate::backend::MatrixSpec;
use crate::error::KernelError;
use crate::formats::TensorType;

/// Values that a lane reads at once; rows of float formats are padded to whole runs.
const RUN: usize = 8;
/// Alignment of a row.
const ALIGN: usize = 16;
/// Bytes repacked at a time.
const PIECE_BYTES: usize = 4 << 20;

/// A matrix on the device.
pub struct CudaMatrix {
    pub(super) format: TensorType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Bytes from a row to the next.
    pub(super) row_bytes: usize,
    pub(super) data: Buffer,
}

/// A part of a block: where it is in the file's block, and its length.
type Field = (usize, usize);

/// The fields of a block in the order of their planes.
fn planes(format: TensorType) -> &'static [Field] {
    match format {
        TensorType::F32 => &[(0, 4)],
        TensorType::F16 | TensorType::BF16 => &[(0, 2)],
        TensorType::Q4_0 => &[(2, 16), (0, 2)],
        TensorType::Q4_1 => &[(4, 16), (0, 4)],
        TensorType::Q5_0 => &[(6, 16), (2, 4), (0, 2)],
        TensorType::Q5_1 => &[(8, 16), (4, 4), (0, 4)],
        TensorType::Q8_0 => &[(2, 32), (0, 2)],
        TensorType::Q4_K => &[(16, 128), (0, 16)],
        TensorType::Q5_K => &[(48, 128), (16, 32), (0, 16)],
        TensorType::Q6_K => &[(0, 128), (128, 64), (192, 16), (208, 2)],
    }
}

/// Whether a block has no NaN and no infinity.
fn is_finite(format: TensorType, block: &[u8]) -> bool {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).is_finite();
    match format {
        TensorType::F32 => f32::from_le_bytes([block[0], block[1], block[2], block[3]]).is_finite(),
        TensorType::F16 | TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 => half(0),
        TensorType::BF16 => half::bf16::from_le_bytes([block[0], block[1]]).is_finite(),
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4_K | TensorType::Q5_K => half(0) && half(2),
        TensorType::Q6_K => half(208),
    }
}

/// End of a kernel's name.
pub(super) fn suffix(format: TensorType) -> &'static str {
    match format {
        TensorType::F32 => "f32",
        TensorType::F16 => "f16",
        TensorType::BF16 => "bf16",
        TensorType::Q4_0 => "q4_0",
        TensorType::Q4_1 => "q4_1",
        TensorType::Q5_0 => "q5_0",
        TensorType::Q5_1 => "q5_1",
        TensorType::Q8_0 => "q8_0",
        TensorType::Q4_K => "q4_k",
        TensorType::Q5_K => "q5_k",
        TensorType::Q6_K => "q6_k",
    }
}

/// Bytes of a row of `cols` values on the device.
pub(super) fn row_bytes(format: TensorType, cols: usize) -> Option<usize> {
    let blocks = cols.checked_next_multiple_of(RUN.max(format.block_size()))? / format.block_size();
    blocks.checked_mul(format.block_bytes())?.checked_next_multiple_of(ALIGN)
}

/// Writes a row of a file in planes; `out` is zero and has the length of [`row_bytes`]. `false` where it is not finite.
pub(super) fn pack_row(format: TensorType, row: &[u8], out: &mut [u8]) -> bool {
    let size = format.block_bytes();
    let blocks = row.len() / size;
    let mut plane = 0;
    for &(at, bytes) in planes(format) {
        for (block, to) in row.chunks_exact(size).zip(out[plane..].chunks_exact_mut(bytes)) {
            to.copy_from_slice(&block[at..at + bytes]);
        }
        plane += blocks * bytes;
    }
    row.chunks_exact(size).all(|block| is_finite(format, block))
}

impl CudaMatrix {
    /// Loads a tensor; refuses what [`crate::backend::Backend::load_matrix`] says.
    pub(super) fn load(
        device: &Arc<Device>,
        staging: &mut Staging,
        spec: &MatrixSpec,
        bytes: &[u8],
    ) -> Result<Self, KernelError> {
        let &MatrixSpec { format, rows, cols, .. } = spec;
        let size = || KernelError::Size { what: format!("tensor `{}`", spec.name), rows, cols };
        if rows == 0 || cols == 0 || u32::try_from(rows).is_err() || u32::try_from(cols).is_err() {
            return Err(size());
        }
        let block = format.block_size();
        if !cols.is_multiple_of(block) {
            return Err(KernelError::BlockSize { tensor: spec.name.clone(), format, cols, block });
        }
        let expected = format.tensor_bytes(rows, cols).ok_or_else(size)?;
        if bytes.len() != expected {
            return Err(KernelError::ByteCount { tensor: spec.name.clone(), expected, got: bytes.len() });
        }
        let row_bytes = row_bytes(format, cols).ok_or_else(size)?;
        let total = rows.checked_mul(row_bytes).ok_or_else(size)?;
        let data = Buffer::new(device, &format!("tensor `{}`", spec.name), total)?;
        let some = (PIECE_BYTES / row_bytes).max(1);
        let file_row = expected / rows;
        let mut packed = Vec::new();
        for (piece, file) in bytes.chunks(some * file_row).enumerate() {
            packed.clear();
            packed.resize(file.len() / file_row * row_bytes, 0);
            for (i, (row, out)) in
                file.chunks_exact(file_row).zip(packed.chunks_exact_mut(row_bytes)).enumerate()
            {
                if !pack_row(format, row, out) {
                    return Err(KernelError::NotFinite { tensor: spec.name.clone(), row: piece * some + i });
                }
            }
            staging.send(&packed, data.part(piece * some * row_bytes, packed.len()))?;
        }
        Ok(Self { format, rows, cols, row_bytes, data })
    }
}
