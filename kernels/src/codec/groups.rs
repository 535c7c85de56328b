//! Groups of values as codes: `zero` is the smallest value, `step` a part of the way to the largest; both are rounded to f16 first, so
//! that packing and unpacking use the same numbers.

use half::f16;

use super::{Codec, GROUP};

/// Zero and step of a group.
#[derive(Clone, Copy)]
struct Scale {
    zero: f32,
    step: f32,
}

impl Scale {
    /// A zero of either sign is the positive one: which of them is the smallest or the largest would depend on the order of
    /// looking. A step that is no number, as between infinite values, is none.
    fn of(smallest: f32, largest: f32, levels: u8) -> Self {
        let (smallest, largest) = (smallest + 0.0, largest + 0.0);
        let zero = f16::from_f32(smallest).to_f32();
        let step = f16::from_f32((largest - zero) / f32::from(levels)).to_f32();
        Self { zero, step: if step.is_nan() { 0.0 } else { step } }
    }

    /// The nearest code; 0 where values are too near to each other for a step.
    fn code(self, value: f32, levels: u8) -> u8 {
        if self.step == 0.0 {
            return 0;
        }
        let code = ((value - self.zero) / self.step).round_ties_even();
        code.clamp(0.0, f32::from(levels)) as u8
    }

    fn value(self, code: u8) -> f32 {
        f32::from(code) * self.step + self.zero
    }
}

fn put_scales(scales: &[Scale], out: &mut Vec<u8>) {
    for of in [|scale: &Scale| scale.zero, |scale: &Scale| scale.step] {
        out.extend(scales.iter().flat_map(|scale| f16::from_f32(of(scale)).to_le_bytes()));
    }
}

fn scales(numbers: &[f32]) -> Vec<Scale> {
    let (zeros, steps) = numbers.split_at(numbers.len() / 2);
    zeros.iter().zip(steps).map(|(zero, step)| Scale { zero: *zero, step: *step }).collect()
}

fn put_codes(codec: Codec, codes: &[u8], out: &mut Vec<u8>) {
    match codec {
        Codec::Int8 => out.extend(codes),
        Codec::Int4 => out.extend(codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4)),
    }
}

fn codes(codec: Codec, packed: &[u8]) -> Vec<u8> {
    match codec {
        Codec::Int8 => packed.to_vec(),
        Codec::Int4 => packed.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect(),
    }
}

/// Packs `[tokens][width]`, a group being one channel of [`GROUP`] tokens.
pub(super) fn pack_channels(codec: Codec, width: usize, values: &[f32], out: &mut Vec<u8>) {
    let levels = codec.levels();
    let mut all = Vec::new();
    let mut written = Vec::with_capacity(values.len());
    for group in values.chunks(GROUP * width) {
        let (mut smallest, mut largest) = (vec![f32::INFINITY; width], vec![f32::NEG_INFINITY; width]);
        for token in group.chunks_exact(width) {
            for ((value, low), high) in token.iter().zip(&mut smallest).zip(&mut largest) {
                (*low, *high) = (low.min(*value), high.max(*value));
            }
        }
        let scales: Vec<Scale> =
            smallest.iter().zip(&largest).map(|(low, high)| Scale::of(*low, *high, levels)).collect();
        for token in group.chunks_exact(width) {
            written.extend(token.iter().zip(&scales).map(|(value, scale)| scale.code(*value, levels)));
        }
        all.extend(scales);
    }
    put_scales(&all, out);
    put_codes(codec, &written, out);
}

/// The inverse of [`pack_channels`].
pub(super) fn unpack_channels(codec: Codec, width: usize, groups: &[f32], packed: &[u8], out: &mut [f32]) {
    let (scales, codes) = (scales(groups), codes(codec, packed));
    let tokens = out.chunks_exact_mut(width).zip(codes.chunks_exact(width)).enumerate();
    for (token, (values, codes)) in tokens {
        let scales = &scales[token / GROUP * width..];
        for ((value, code), scale) in values.iter_mut().zip(codes).zip(scales) {
            *value = scale.value(*code);
        }
    }
}

/// Packs `[tokens][width]`, a group being [`GROUP`] channels of one token.
pub(super) fn pack_tokens(codec: Codec, width: usize, values: &[f32], out: &mut Vec<u8>) {
    let levels = codec.levels();
    let mut all = Vec::new();
    let mut written = Vec::with_capacity(values.len());
    for group in values.chunks_exact(width).flat_map(|token| token.chunks(GROUP)) {
        let smallest = group.iter().copied().fold(f32::INFINITY, f32::min);
        let largest = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = Scale::of(smallest, largest, levels);
        written.extend(group.iter().map(|value| scale.code(*value, levels)));
        all.push(scale);
    }
    put_scales(&all, out);
    put_codes(codec, &written, out);
}

/// The inverse of [`pack_tokens`].
pub(super) fn unpack_tokens(codec: Codec, width: usize, groups: &[f32], packed: &[u8], out: &mut [f32]) {
    let (scales, codes) = (scales(groups), codes(codec, packed));
    let per_token = width.div_ceil(GROUP);
    let tokens = out.chunks_exact_mut(width).zip(codes.chunks_exact(width));
    for ((values, codes), scales) in tokens.zip(scales.chunks_exact(per_token)) {
        let groups = values.chunks_mut(GROUP).zip(codes.chunks(GROUP)).zip(scales);
        for ((values, codes), scale) in groups {
            for (value, code) in values.iter_mut().zip(codes) {
                *value = scale.value(*code);
            }
        }
    }
}
