//! Floats of a checkpoint as f32, and their quantisation to Q8_0.

use half::{bf16, f16};
use kernels::formats::TensorType;

use crate::models::gguf::TensorView;

/// Values of a Q8_0 block.
const BLOCK: usize = 32;

/// The values of a tensor of floats.
pub(super) fn floats(view: &TensorView<'_>) -> Vec<f32> {
    let mut out = Vec::with_capacity(view.rows.saturating_mul(view.cols));
    decode(view.format, view.bytes, &mut out);
    out
}

fn decode(format: TensorType, bytes: &[u8], out: &mut Vec<f32>) {
    let halves = || bytes.as_chunks::<2>().0.iter();
    match format {
        TensorType::F16 => out.extend(halves().map(|&value| f16::from_le_bytes(value).to_f32())),
        TensorType::BF16 => out.extend(halves().map(|&value| bf16::from_le_bytes(value).to_f32())),
        _ => out.extend(bytes.as_chunks::<4>().0.iter().map(|&value| f32::from_le_bytes(value))),
    }
}

/// Quantises rows of whole blocks as the reference quantiser of the GGUF format does: the scale is the largest
/// magnitude over 127, kept as f16; codes are rounded to the nearest, halves away from zero.
///
/// A row with NaN or infinity, or with a scale that f16 cannot hold, is the error.
pub(super) fn q8_0(view: &TensorView<'_>) -> Result<Vec<u8>, usize> {
    let row_bytes = view.bytes.len() / view.rows.max(1);
    let mut out = Vec::with_capacity(TensorType::Q8_0.tensor_bytes(view.rows, view.cols).unwrap_or(0));
    let mut values = Vec::with_capacity(view.cols);
    for (row, bytes) in view.bytes.chunks_exact(row_bytes.max(1)).enumerate() {
        values.clear();
        decode(view.format, bytes, &mut values);
        for block in values.as_chunks::<BLOCK>().0 {
            // NaN is lost in a maximum, so it is looked for.
            let largest = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let scale = largest / 127.0;
            let stored = f16::from_f32(scale);
            if block.iter().any(|value| value.is_nan()) || !stored.is_finite() {
                return Err(row);
            }
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            out.extend(stored.to_le_bytes());
            // Within -127..=127 by the choice of the scale; `as` saturates where the division overflowed.
            out.extend(block.iter().map(|value| ((value * inverse).round() as i8).to_le_bytes()[0]));
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_nearest_of_the_block_scale() {
        let values: Vec<f32> = (0..64).map(|i| (i as f32 - 20.0) * 0.37).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let view = TensorView { name: "w", format: TensorType::F32, rows: 1, cols: 64, bytes: &bytes };
        let packed = q8_0(&view).unwrap();
        let back = kernels::reference::dequantise("w", TensorType::Q8_0, &packed).unwrap();
        assert_eq!(back.len(), values.len());
        for (block, (back, values)) in back.chunks(32).zip(values.chunks(32)).enumerate() {
            let scale = values.iter().fold(0.0_f32, |m, v| m.max(v.abs())) / 127.0;
            for (back, value) in back.iter().zip(values) {
                // Half a step of rounding and the f16 scale's own error.
                assert!((back - value).abs() <= scale * 0.57, "block {block}: {back} {value}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_refused_by_row() {
        for bad in [f32::NAN, f32::INFINITY, 1e30] {
            let mut values = vec![1.0_f32; 96];
            values[70] = bad;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let view = TensorView { name: "w", format: TensorType::F32, rows: 3, cols: 32, bytes: &bytes };
            assert_eq!(q8_0(&view), Err(2));
        }
    }
}
