//! Codecs of cells against the one-value-at-a-time reference and the bounds that arithmetic gives.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use half::f16;
use kernels::backend::RopePairing;
use kernels::codec::{CellShape, Codec, GROUP, pack, unpack};
use kernels::reference;
use proptest::prelude::*;

const CODECS: [Codec; 2] = [Codec::Int8, Codec::Int4];

/// A cell at position 0, where keys are not turned.
fn shape(kv_heads: usize, tokens: usize, head_dim: usize) -> CellShape {
    let (start, rope_base, rope_pairing) = (0, 10_000.0, RopePairing::Halves);
    CellShape { kv_heads, tokens, head_dim, start, rope_base, rope_pairing }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect()
}

fn floats(cell: &[u8]) -> Vec<f32> {
    cell.as_chunks().0.iter().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect()
}

/// Zeros, steps and codes as a packed cell has them.
fn written(groups: &[(f16, f16, Vec<u8>)], codes: &[u8], codec: Codec) -> Vec<u8> {
    let zeros = groups.iter().flat_map(|group| group.0.to_le_bytes());
    let steps = groups.iter().flat_map(|group| group.1.to_le_bytes());
    let codes: Vec<u8> = match codec {
        Codec::Int8 => codes.to_vec(),
        Codec::Int4 => codes.chunks(2).map(|pair| pair[0] + 16 * pair[1]).collect(),
    };
    zeros.chain(steps).chain(codes).collect()
}

/// One head of K or V packed by the reference; `along_tokens` for K.
fn packed(values: &[f32], width: usize, along_tokens: bool, codec: Codec) -> Vec<u8> {
    let tokens = values.len() / width;
    let mut codes = vec![0; values.len()];
    let mut groups = Vec::new();
    let (outer, inner) =
        if along_tokens { (tokens.div_ceil(GROUP), width) } else { (tokens, width.div_ceil(GROUP)) };
    for first in 0..outer {
        for second in 0..inner {
            let places: Vec<usize> = if along_tokens {
                (first * GROUP..(first * GROUP + GROUP).min(tokens))
                    .map(|token| token * width + second)
                    .collect()
            } else {
                (second * GROUP..(second * GROUP + GROUP).min(width))
                    .map(|channel| first * width + channel)
                    .collect()
            };
            let group: Vec<f32> = places.iter().map(|place| values[*place]).collect();
            let quantised = reference::quantise(&group, codec.levels());
            for (place, code) in places.iter().zip(&quantised.2) {
                codes[*place] = *code;
            }
            groups.push(quantised);
        }
    }
    written(&groups, &codes, codec)
}

/// Keys of consecutive tokens from position 0 on, turned back to 0, in plain arithmetic.
fn turned_back(keys: &[f32], shape: &CellShape) -> Vec<f32> {
    let pairs = shape.head_dim / 2;
    let mut turned = keys.to_vec();
    for token in 0..shape.tokens {
        for pair in 0..pairs {
            let frequency = libm::pow(f64::from(shape.rope_base), -2.0 * pair as f64 / shape.head_dim as f64);
            let (sin, cos) = libm::sincos(token as f64 * frequency);
            let (sin, cos) = (sin as f32, cos as f32);
            let (a, b) = (token * shape.head_dim + pair, token * shape.head_dim + pair + pairs);
            turned[a] = keys[a] * cos + keys[b] * sin;
            turned[b] = keys[b] * cos - keys[a] * sin;
        }
    }
    turned
}

#[test]
fn four_bits_hold_sixteen_even_steps_exactly() {
    let shape = shape(1, 1, 32);
    let values: Vec<f32> = (0..64).map(|index| index as f32 % 16.0 * 0.25 - 1.0).collect();
    let packed = pack(Codec::Int4, &shape, &bytes(&values)).unwrap();
    assert_eq!(packed.len(), shape.packed_bytes(Codec::Int4));
    assert_eq!(floats(&unpack(Codec::Int4, &shape, &packed).unwrap()), values);
    // Of V: zero -1, step 0.25, and codes 0 to 15 twice, two a byte.
    let of_values = &packed[packed.len() - 20..];
    assert_eq!(
        of_values[..4],
        [f16::from_f32(-1.0).to_le_bytes(), f16::from_f32(0.25).to_le_bytes()].concat()
    );
    assert_eq!(of_values[4..12], [0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe]);
}

#[test]
fn a_sealed_chunk_takes_the_bits_of_its_codes_and_one_more() {
    let shape = shape(2, 64, 64);
    for (codec, bits) in [(Codec::Int8, 9), (Codec::Int4, 5)] {
        assert_eq!(shape.packed_bytes(codec) * 16, shape.bytes() * bits, "{codec:?}");
    }
}

#[test]
fn wrong_lengths_are_refused_by_name() {
    let even = shape(1, 3, 8);
    for length in [0, even.bytes() - 1, even.bytes() + 1] {
        let error = pack(Codec::Int4, &even, &vec![0; length]).unwrap_err().to_string();
        assert!(error.contains("bytes of the cell"), "{error}");
        let error = unpack(Codec::Int4, &even, &vec![0; length]).unwrap_err().to_string();
        assert!(error.contains("bytes of the packed cell"), "{error}");
    }
    let odd = shape(1, 3, 7);
    let error = pack(Codec::Int8, &odd, &vec![0; odd.bytes()]).unwrap_err().to_string();
    assert!(error.contains("channels of a head is 7"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn packing_is_the_references(
        tokens in 1usize..100,
        half_dim in 1usize..40,
        seed in any::<u32>(),
        exponent in -12i32..12,
    ) {
        let shape = shape(2, tokens, 2 * half_dim);
        let count = tokens * shape.head_dim;
        let mut state = seed;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let values: Vec<f32> = (0..4 * count).map(|_| f16::from_f32(draw() * 2f32.powi(exponent)).to_f32()).collect();
        for codec in CODECS {
            let cell = pack(codec, &shape, &bytes(&values)).unwrap();
            let parts = values.chunks(count).zip([true, false, true, false]);
            let wanted: Vec<u8> = parts
                .flat_map(|(part, keys)| {
                    let turned = if keys { turned_back(part, &shape) } else { part.to_vec() };
                    packed(&turned, shape.head_dim, keys, codec)
                })
                .collect();
            prop_assert_eq!(&cell, &wanted);
        }
    }

    /// What comes back is at most half a step away, beside the roundings to f16 and of the turns.
    #[test]
    fn turned_keys_come_back_within_half_a_step(
        start in 0usize..5000,
        tokens in 1usize..80,
        halves in any::<bool>(),
        bias in -100f32..100.0,
    ) {
        let rope_pairing = if halves { RopePairing::Halves } else { RopePairing::Adjacent };
        let shape = CellShape { start, rope_pairing, ..shape(1, tokens, 16) };
        // A bias in every channel, turned to each token's position by the reference, and a little of each token's own.
        let own = |place: usize| (place * 37 % 101) as f32 / 101.0;
        let keys: Vec<f32> = (0..tokens)
            .flat_map(|token| {
                let row: Vec<f32> = (0..16).map(|channel| bias + own(token * 16 + channel)).collect();
                let position = (start + token) as u32;
                reference::rope(&row, 16, f64::from(shape.rope_base), rope_pairing, position)
            })
            .map(|value| value as f32)
            .collect();
        let cell = bytes(&[keys.clone(), vec![0.0; keys.len()]].concat());
        for codec in CODECS {
            let back = floats(&unpack(codec, &shape, &pack(codec, &shape, &cell).unwrap()).unwrap());
            // Half a step in both channels of a pair, and what f16 cannot tell apart of values as large as these.
            let step = 1.0 / f32::from(codec.levels());
            let rounding = (bias.abs() + 1.0) * 2f32.powi(-10);
            let bound = 1.5 * (0.5 * step + 4.0 * rounding);
            for (before, after) in keys.iter().zip(&back) {
                prop_assert!((before - after).abs() <= bound, "{codec:?}: {before} became {after}, not within {bound}");
            }
        }
    }

    #[test]
    fn any_bytes_unpack_to_something(packed in prop::collection::vec(any::<u8>(), 200)) {
        let shape = shape(1, 4, 32);
        let length = shape.packed_bytes(Codec::Int4);
        let cell = unpack(Codec::Int4, &shape, &packed[..length.min(200)]);
        prop_assert_eq!(cell.is_ok(), length <= 200);
    }
}
