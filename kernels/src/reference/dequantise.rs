//! Weights of a model file as f32, value by value, as the GGUF format defines them.

use half::{bf16, f16};

use crate::error::KernelError;
use crate::formats::TensorType;

/// The values of `bytes`, a whole number of blocks of `format`, in file order.
///
/// # Errors
/// A byte count that is not a whole number of blocks; `tensor` names it.
pub fn dequantise(tensor: &str, format: TensorType, bytes: &[u8]) -> Result<Vec<f32>, KernelError> {
    let size = format.block_bytes();
    if !bytes.len().is_multiple_of(size) {
        let expected = bytes.len().next_multiple_of(size);
        return Err(KernelError::ByteCount { tensor: tensor.to_string(), expected, got: bytes.len() });
    }
    let per_block = format.block_size();
    let blocks = bytes.chunks_exact(size);
    Ok(blocks.flat_map(|block| (0..per_block).map(move |i| value(format, block, i))).collect())
}

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Code `i` of 32 four-bit codes in 16 bytes: the low halves come first.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 }
}

/// Value `i` of one block.
fn value(format: TensorType, block: &[u8], i: usize) -> f32 {
    match format {
        TensorType::F32 => f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
        TensorType::F16 => half(block, 0),
        TensorType::BF16 => bf16::from_le_bytes([block[0], block[1]]).to_f32(),
        TensorType::Q4_0 => half(block, 0) * (f32::from(nibble(&block[2..], i)) - 8.0),
        TensorType::Q4_1 => half(block, 0) * f32::from(nibble(&block[4..], i)) + half(block, 2),
        TensorType::Q5_0 => half(block, 0) * (f32::from(five_bits(&block[2..], i)) - 16.0),
        TensorType::Q5_1 => half(block, 0) * f32::from(five_bits(&block[4..], i)) + half(block, 2),
        TensorType::Q8_0 => half(block, 0) * f32::from(block[2 + i] as i8),
        TensorType::Q4_K => {
            let (scale, min) = scale_and_min(block, i / 32);
            scale * f32::from(k_nibble(&block[16..], i)) - min
        }
        TensorType::Q5_K => {
            let (scale, min) = scale_and_min(block, i / 32);
            let high = (block[16 + i % 32] >> (i / 32)) & 1;
            scale * f32::from(k_nibble(&block[48..], i) + 16 * high) - min
        }
        TensorType::Q6_K => six_bit_value(block, i),
    }
}

/// Code `i` of 32 five-bit codes: four bytes of high bits, 16 of nibbles.
fn five_bits(bytes: &[u8], i: usize) -> u8 {
    let high = (bytes[i / 8] >> (i % 8)) & 1;
    nibble(&bytes[4..], i) + 16 * high
}

/// Code `i` of 256 four-bit codes: 32 bytes hold two runs of 32, low halves first.
fn k_nibble(bytes: &[u8], i: usize) -> u8 {
    let byte = bytes[i / 64 * 32 + i % 32];
    if i % 64 < 32 { byte & 15 } else { byte >> 4 }
}

/// Scale and minimum of part `part` of a `Q4_K` or `Q5_K` block: 6-bit multiples of two f16 units. The
/// first four pairs are the low bits of bytes 0..4 and 4..8; the others have their low four bits in bytes
/// 8..12 and their high two at the top of the first eight.
fn scale_and_min(block: &[u8], part: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, min) = if part < 4 {
        (packed[part] & 63, packed[part + 4] & 63)
    } else {
        let low = packed[part + 4];
        ((low & 15) + ((packed[part - 4] >> 6) << 4), (low >> 4) + ((packed[part] >> 6) << 4))
    };
    (half(block, 0) * f32::from(scale), half(block, 2) * f32::from(min))
}

/// `Q6_K`: 128 bytes of nibbles, 64 of high bit pairs, 16 signed scales, an f16 unit. Each half of the block
/// has 64 bytes of nibbles (low halves hold its first 64 codes) and 32 bytes of pairs.
fn six_bit_value(block: &[u8], i: usize) -> f32 {
    let (part, within) = (i / 128, i % 128);
    let byte = block[part * 64 + within % 64];
    let low = if within < 64 { byte & 15 } else { byte >> 4 };
    let high = (block[128 + part * 32 + within % 32] >> (2 * (within / 32))) & 3;
    let scale = half(block, 208) * f32::from(block[192 + i / 16] as i8);
    scale * (f32::from(low + 16 * high) - 32.0)
}
