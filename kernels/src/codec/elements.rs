//! Elements of cells as numbers: keys turned back to earlier positions, and another type of element.
//!
//! Both change what a cell stands for: its keys and values are near those that would be computed, not the same.

use half::f16;

use super::{CellShape, Rotation, floats, put};
use crate::backend::KvType;
use crate::error::KernelError;

/// Turns the keys of a cell back by `back` positions, in place, for tokens that move that far towards the beginning. A key's
/// rotary embedding at position `p` is a rotation by `p` times the frequency of each pair of channels (Su et al. 2021, "RoFormer",
/// section 3.2.2), so the difference of positions is a rotation too. Values have no position.
///
/// # Errors
/// Elements of int8, a cell of another length than the shape's, or a head with an odd number of channels.
pub fn turn_back(
    kv_type: KvType,
    shape: &CellShape,
    cell: &mut [u8],
    back: usize,
) -> Result<(), KernelError> {
    let bytes = check(kv_type, shape, cell.len())?;
    // The same angles for every token: those of one token at position `back`.
    let rotation = Rotation::new(&CellShape { start: back, tokens: 1, ..*shape });
    for head in cell.chunks_exact_mut((2 * bytes).max(1)) {
        let keys = &mut head[..bytes];
        let mut numbers = numbers(kv_type, keys);
        rotation.back(&mut numbers);
        keys.copy_from_slice(&elements(kv_type, &numbers));
    }
    Ok(())
}

/// The cell with elements of another type, rounded where that has fewer bits.
///
/// # Errors
/// As [`turn_back`], for either type.
pub fn convert(from: KvType, to: KvType, shape: &CellShape, cell: &[u8]) -> Result<Vec<u8>, KernelError> {
    check(from, shape, cell.len())?;
    check(to, shape, shape.values() * 2 * shape.kv_heads * to.head_bytes(1))?;
    Ok(if from == to { cell.to_vec() } else { elements(to, &numbers(from, cell)) })
}

/// Bytes of K, or of V, of one head.
fn check(kv_type: KvType, shape: &CellShape, got: usize) -> Result<usize, KernelError> {
    if kv_type == KvType::Int8 {
        let what = "bits of an element that stands alone";
        return Err(KernelError::Shape { kernel: "codec", what, expected: 16, got: 8 });
    }
    let bytes = shape.tokens * kv_type.head_bytes(shape.head_dim);
    shape.check("bytes of the cell", got, 2 * shape.kv_heads * bytes)?;
    Ok(bytes)
}

fn numbers(kv_type: KvType, bytes: &[u8]) -> Vec<f32> {
    match kv_type {
        KvType::F32 => bytes.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        KvType::F16 | KvType::Int8 => floats(bytes),
    }
}

fn elements(kv_type: KvType, numbers: &[f32]) -> Vec<u8> {
    match kv_type {
        KvType::F32 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        KvType::F16 | KvType::Int8 => {
            let mut bytes = Vec::with_capacity(numbers.len() * size_of::<f16>());
            put(numbers, &mut bytes);
            bytes
        }
    }
}
