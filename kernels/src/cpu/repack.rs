//! From the blocks of a model file to packed groups, once at load; and one row back for embeddings.
//!
//! Nothing is rounded: codes are moved, scales are kept as the file has them.

use half::f16;

use super::packing::{BLOCK, GROUP_ROWS, Layout, STEP_BYTES, STEPS};
use crate::formats::TensorType;

/// One block of one row as the file means it: codes widened to bytes, scales as stored.
struct FileBlock {
    codes: [u8; 256],
    /// f16 bits of the scale (or its unit).
    scale: u16,
    /// f16 bits of the minimum (or its unit, sign flipped so that it is added).
    min: u16,
    /// Multiples of the scale unit, per part of 32 or 16.
    scales: [u8; 16],
    /// Multiples of the minimum unit, per part of 32.
    mins: [u8; 8],
}

const SIGN: u16 = 0x8000;

fn half_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((&byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low |= byte & 15;
        *high |= byte >> 4;
    }
}

/// Scales and minima of a `Q4_K` or `Q5_K` block: eight pairs of 6-bit numbers in 12 bytes.
fn six_bit_pairs(raw: &[u8], out: &mut FileBlock) {
    for j in 0..4 {
        out.scales[j] = raw[j] & 63;
        out.mins[j] = raw[j + 4] & 63;
        out.scales[j + 4] = (raw[j + 8] & 15) | ((raw[j] >> 6) << 4);
        out.mins[j + 4] = (raw[j + 8] >> 4) | ((raw[j + 4] >> 6) << 4);
    }
}

/// Takes one file block apart. `bytes` has the block size of `format`, which is quantised.
fn unpack(format: TensorType, bytes: &[u8], out: &mut FileBlock) {
    (out.scale, out.min) = (half_at(bytes, 0), 0);
    out.codes[..format.block_size()].fill(0);
    match format {
        TensorType::Q4_0 => nibbles(&bytes[2..18], &mut out.codes[..32]),
        TensorType::Q4_1 => {
            out.min = half_at(bytes, 2);
            nibbles(&bytes[4..20], &mut out.codes[..32]);
        }
        TensorType::Q5_0 | TensorType::Q5_1 => {
            let at = if format == TensorType::Q5_1 { 4 } else { 2 };
            if at == 4 {
                out.min = half_at(bytes, 2);
            }
            let high = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            for (i, code) in out.codes[..32].iter_mut().enumerate() {
                *code = (((high >> i) & 1) << 4) as u8;
            }
            nibbles(&bytes[at + 4..at + 20], &mut out.codes[..32]);
        }
        TensorType::Q8_0 => out.codes[..32].copy_from_slice(&bytes[2..34]),
        TensorType::Q4_K | TensorType::Q5_K => {
            out.min = half_at(bytes, 2) ^ SIGN;
            six_bit_pairs(&bytes[4..16], out);
            let five = format == TensorType::Q5_K;
            let (high, low) =
                if five { (&bytes[16..48], &bytes[48..176]) } else { (&bytes[..0], &bytes[16..144]) };
            for part in 0..8 {
                for (code, byte) in out.codes[part * 32..].iter_mut().zip(high) {
                    *code = ((byte >> part) & 1) << 4;
                }
            }
            for quarter in 0..4 {
                nibbles(&low[quarter * 32..][..32], &mut out.codes[quarter * 64..][..64]);
            }
        }
        TensorType::Q6_K => {
            for half in 0..2 {
                let codes = &mut out.codes[half * 128..][..128];
                let high = &bytes[128 + half * 32..][..32];
                for (i, code) in codes.iter_mut().enumerate() {
                    *code = ((high[i % 32] >> (2 * (i / 32))) & 3) << 4;
                }
                nibbles(&bytes[half * 64..][..64], codes);
            }
            out.scales.copy_from_slice(&bytes[192..208]);
            out.scale = half_at(bytes, 208);
        }
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => {}
    }
}

/// Where code `k` of `lane` lies in a block: its step, and its byte in the step.
fn place(lane: usize, k: usize) -> (usize, usize) {
    (k / 4, lane * 4 + k % 4)
}

/// Writes the 32 codes of one lane to a zeroed block, four codes (a step of a lane) at a time.
fn put_codes(layout: &Layout, block: &mut [u8], lane: usize, codes: &[u8]) {
    const NIBBLES: u32 = 0x0f0f_0f0f;
    let (words, at) = (codes.as_chunks::<4>().0, lane * 4);
    if layout.signed {
        for (step, word) in block.chunks_exact_mut(STEP_BYTES).zip(words) {
            step[at..at + 4].copy_from_slice(word);
        }
        return;
    }
    let (nibbles, planes) = block.split_at_mut(4 * STEP_BYTES);
    let (first, second) = words.split_at(4);
    let mut high = [0u32; 2];
    for (j, step) in nibbles.chunks_exact_mut(STEP_BYTES).enumerate() {
        let (low, up) = (u32::from_le_bytes(first[j]), u32::from_le_bytes(second[j]));
        let word = (low & NIBBLES) | ((up & NIBBLES) << 4);
        step[at..at + 4].copy_from_slice(&word.to_le_bytes());
        let (low, up) = ((low >> 4) & NIBBLES, (up >> 4) & NIBBLES);
        if layout.planes == 1 {
            high[0] |= (low << j) | (up << (j + 4));
        } else {
            high[0] |= low << (2 * j);
            high[1] |= up << (2 * j);
        }
    }
    for (plane, high) in planes.chunks_exact_mut(STEP_BYTES).zip(high) {
        plane[at..at + 4].copy_from_slice(&high.to_le_bytes());
    }
}

fn code(layout: &Layout, block: &[u8], lane: usize, k: usize) -> i32 {
    let (step, byte) = place(lane, k);
    if layout.signed {
        return i32::from(block[step * STEP_BYTES + byte] as i8);
    }
    let low = (block[(step % 4) * STEP_BYTES + byte] >> (4 * (step / 4))) & 15;
    let high = match layout.planes {
        1 => (block[4 * STEP_BYTES + byte] >> step) & 1,
        2 => (block[(4 + step / 4) * STEP_BYTES + byte] >> (2 * (step % 4))) & 3,
        _ => 0,
    };
    i32::from(low | (high << 4))
}

fn put_half(bytes: &mut [u8], at: usize, bits: u16) {
    bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
}

fn put_scales(layout: &Layout, span: &mut [u8], block: usize, lane: usize, file: &FileBlock) {
    let at = layout.header + block * layout.block_bytes() + layout.code_bytes;
    if layout.header == 0 {
        put_half(span, at + 2 * lane, file.scale);
        if layout.affine {
            put_half(span, at + 16 + 2 * lane, file.min);
        }
        return;
    }
    put_half(span, 2 * lane, file.scale);
    if layout.affine {
        put_half(span, 16 + 2 * lane, file.min);
        span[at + lane] = file.scales[block];
        span[at + 8 + lane] = file.mins[block];
    } else {
        span[at + lane] = file.scales[2 * block];
        span[at + 8 + lane] = file.scales[2 * block + 1];
    }
}

/// Packs one group. `rows` are the bytes of up to eight rows; missing ones stay zero. `out` is the
/// zeroed group. Returns the first row of the group with a scale that is not finite.
pub(crate) fn pack_group(
    format: TensorType,
    layout: &Layout,
    rows: &[&[u8]],
    out: &mut [u8],
) -> Option<usize> {
    let mut file = FileBlock { codes: [0; 256], scale: 0, min: 0, scales: [0; 16], mins: [0; 8] };
    let mut bad = None;
    for (lane, row) in rows.iter().enumerate().take(GROUP_ROWS) {
        let blocks = row.chunks_exact(format.block_bytes());
        for (bytes, span) in blocks.zip(out.chunks_exact_mut(layout.span_bytes())) {
            unpack(format, bytes, &mut file);
            if !(f16::from_bits(file.scale).is_finite() && f16::from_bits(file.min).is_finite()) {
                bad = bad.or(Some(lane));
            }
            for block in 0..layout.span {
                let at = layout.header + block * layout.block_bytes();
                let codes = &file.codes[block * BLOCK..][..BLOCK];
                put_codes(layout, &mut span[at..at + layout.code_bytes], lane, codes);
                put_scales(layout, span, block, lane, &file);
            }
        }
    }
    bad
}

/// Scale of part `sub` and minimum of `lane` in a block.
fn scale_and_min(layout: &Layout, span: &[u8], block: usize, lane: usize, sub: usize) -> (f32, f32) {
    let at = layout.header + block * layout.block_bytes() + layout.code_bytes;
    let half = |at: usize| f16::from_bits(half_at(span, at)).to_f32();
    if layout.header == 0 {
        let min = if layout.affine { half(at + 16 + 2 * lane) } else { 0.0 };
        return (half(at + 2 * lane), min);
    }
    let unit = half(2 * lane);
    if layout.affine {
        let min = half(16 + 2 * lane) * f32::from(span[at + 8 + lane]);
        return (unit * f32::from(span[at + lane]), min);
    }
    (unit * f32::from(span[at + 8 * sub + lane] as i8), 0.0)
}

/// Dequantises row `lane` of a packed group, to the very values of the file format.
pub(crate) fn unpack_row(layout: &Layout, group: &[u8], lane: usize, out: &mut [f32]) {
    let part = BLOCK / layout.subs;
    let spans = group.chunks_exact(layout.span_bytes());
    for (span, values) in spans.zip(out.chunks_exact_mut(layout.span * BLOCK)) {
        for (block, values) in values.chunks_exact_mut(BLOCK).enumerate() {
            let at = layout.header + block * layout.block_bytes();
            let codes = &span[at..at + layout.code_bytes];
            for (sub, values) in values.chunks_exact_mut(part).enumerate() {
                let (scale, min) = scale_and_min(layout, span, block, lane, sub);
                for (i, value) in values.iter_mut().enumerate() {
                    let code = code(layout, codes, lane, sub * part + i) - layout.offset;
                    let product = scale * code as f32;
                    *value = if layout.affine { product + min } else { product };
                }
            }
        }
    }
}

const _: () = assert!(STEPS * 4 == BLOCK, "a block is its steps");
