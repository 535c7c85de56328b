//! Cells packed without loss: the bytes that come back, the bytes that are written, and what is not a packed cell.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use half::f16;
use kernels::backend::KvType;
use kernels::codec::lossless::{CellLayout, Damage, pack, unpack};
use kernels::error::KernelError;
use proptest::prelude::*;

const TYPES: [KvType; 3] = [KvType::F16, KvType::F32, KvType::Int8];

fn layout(kv_type: KvType, kv_heads: usize, tokens: usize, head_dim: usize) -> CellLayout {
    CellLayout { kv_heads, tokens, head_dim, kv_type }
}

/// Planes that are kept as they are.
fn plane(bytes: &[u8]) -> Vec<u8> {
    [&[0][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat()
}

/// A plane of three hundred sevens, as `zstd -19 --no-check` (the program, 1.5.4) wrote it.
fn sevens() -> Vec<u8> {
    let frame = [
        0x28, 0xb5, 0x2f, 0xfd, 0x60, 0x2c, 0x00, 0x45, 0x00, 0x00, 0x08, 0x07, 0x01, 0x00, 0x28, 0x2a, 0x10,
        0x02,
    ];
    [&[1][..], &(frame.len() as u32).to_le_bytes(), &frame].concat()
}

/// Numbers as a model makes them: channels of different size, some of them far from zero.
fn like_keys(layout: &CellLayout, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let channels = layout.head_dim;
    let scales: Vec<(f32, f32)> = (0..channels)
        .map(|channel| (if channel % 5 == 0 { 40.0 } else { 0.0 }, 0.1 + random() * 2.0))
        .collect();
    let mut cell = Vec::new();
    for _ in 0..2 * layout.kv_heads * layout.tokens {
        for (middle, scale) in &scales {
            // The sum of some is near to normal.
            let noise = (0..6).map(|_| random() - 0.5).sum::<f32>();
            let value = middle + scale * noise;
            match layout.kv_type {
                KvType::F16 => cell.extend(f16::from_f32(value).to_le_bytes()),
                _ => cell.extend(value.to_le_bytes()),
            }
        }
    }
    cell
}

#[test]
fn floats_are_written_as_the_format_says() {
    // One head of two tokens and two channels. K: 1 and -5, then -2 and the number before -5. V: 0 and a NaN with a payload, then -0
    // and 0.5.
    let cell: Vec<u8> = [0x3c00_u16, 0xc500, 0xc000, 0xc501, 0x0000, 0x7e55, 0x8000, 0x3800]
        .iter()
        .flat_map(|bits| bits.to_le_bytes())
        .collect();
    // Exponents of K: 15 and 16 in channel 0, of which one is negative, not most; 17 in channel 1, and both are negative. Of V: 0 and
    // 0; 31 and 14.
    // What is left of K: 16 - 15 = 1 before the mantissa 0: 0x0400; 0 before 0x100: 0x0100; the sign: 0x8000; 0x0101.
    // Of V: 0; 0x0255; the sign: 0x8000; 31 - 14 = 17 before 0: 0x4400.
    let expected = [
        vec![1],
        plane(&[16, 0x80 | 17, 0, 31]),
        plane(&[0x04, 0x01, 0x80, 0x01]),
        plane(&[0x00, 0x00, 0x00, 0x01]),
        plane(&[0x00, 0x02, 0x80, 0x44]),
        plane(&[0x00, 0x55, 0x00, 0x00]),
    ]
    .concat();
    let layout = layout(KvType::F16, 1, 2, 2);
    assert_eq!(pack(&layout, &cell).unwrap(), expected);
    assert_eq!(unpack(&layout, &expected).unwrap(), cell);
}

#[test]
fn a_plane_of_another_compressor_is_read() {
    // Codes of one head of 75 tokens with two channels, in K and V: three hundred. Scales: one for each token.
    let layout = layout(KvType::Int8, 1, 75, 2);
    let scales: Vec<[u8; 4]> = (0..150_u32).map(|token| (token as f32).to_le_bytes()).collect();
    let planes =
        (0..4).rev().map(|place| plane(&scales.iter().map(|scale| scale[place]).collect::<Vec<u8>>()));
    let packed = [vec![1], sevens(), planes.collect::<Vec<_>>().concat()].concat();
    let cell = [vec![7; 300], scales.concat()].concat();
    assert_eq!(unpack(&layout, &packed).unwrap(), cell);
    assert_eq!(unpack(&layout, &pack(&layout, &cell).unwrap()).unwrap(), cell);
}

#[test]
fn cells_like_those_of_models_shrink_and_come_back() {
    for kv_type in [KvType::F16, KvType::F32] {
        for (tokens, head_dim) in [(64, 64), (64, 128), (1, 64), (23, 6)] {
            let layout = layout(kv_type, 2, tokens, head_dim);
            let cell = like_keys(&layout, 7);
            let packed = pack(&layout, &cell).unwrap();
            assert_eq!(unpack(&layout, &packed).unwrap(), cell);
            if tokens == 64 {
                assert!(packed.len() * 10 < cell.len() * 9, "{} of {}: {layout:?}", packed.len(), cell.len());
            }
        }
    }
}

#[test]
fn every_pattern_of_bits_comes_back() {
    // All of f16, as one cell; and the corners of f32.
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let one = layout(KvType::F16, 2, 64, 256);
    assert_eq!(unpack(&one, &pack(&one, &all).unwrap()).unwrap(), all);
    let corners: Vec<u8> =
        [0, 1, 0x8000_0000, 0x7f80_0000, 0xff80_0000, 0x7fc0_1234, 0xffff_ffff, 0x7f80_0001]
            .iter()
            .flat_map(|bits: &u32| bits.to_le_bytes())
            .collect();
    for (tokens, head_dim) in [(4, 1), (1, 4), (2, 2)] {
        let layout = layout(KvType::F32, 1, tokens, head_dim);
        assert_eq!(unpack(&layout, &pack(&layout, &corners).unwrap()).unwrap(), corners);
    }
}

#[test]
fn what_does_not_shrink_grows_by_little() {
    let layout = layout(KvType::F16, 3, 64, 64);
    let mut state = 1_u64;
    let noise: Vec<u8> = (0..layout.bytes())
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    let packed = pack(&layout, &noise).unwrap();
    assert!(packed.len() <= noise.len() + noise.len() / 100 + 100, "{} of {}", packed.len(), noise.len());
    assert_eq!(unpack(&layout, &packed).unwrap(), noise);
}

#[test]
fn damage_is_told_by_its_kind() {
    let layout = layout(KvType::F16, 1, 16, 4);
    let cell = like_keys(&layout, 1);
    let packed = pack(&layout, &cell).unwrap();
    assert_eq!(unpack(&layout, &[]), Err(Damage::Short));
    assert_eq!(unpack(&layout, &[&[2], &packed[1..]].concat()), Err(Damage::Version(2)));
    for end in 1..packed.len() {
        assert_eq!(unpack(&layout, &packed[..end]), Err(Damage::Short), "{end}");
    }
    assert_eq!(unpack(&layout, &[&packed[..], &[0]].concat()), Err(Damage::Long));
    assert_eq!(unpack(&layout, &cell), Err(Damage::Version(cell[0])), "a raw cell is none");
    let other = CellLayout { tokens: 17, ..layout };
    assert!(unpack(&other, &packed).is_err());
    assert!(matches!(pack(&layout, &cell[1..]), Err(KernelError::Shape { .. })));
    // A frame that would unpack to three hundred bytes where one is wanted.
    assert_eq!(unpack(&layout, &[vec![1], sevens()].concat()), Err(Damage::Plane));
}

proptest! {
    #[test]
    fn any_bytes_come_back(
        kind in 0..3_usize, heads in 0..3_usize, tokens in 0..70_usize, dim in 0..40_usize, seed in any::<u64>(),
        few in any::<bool>(),
    ) {
        let layout = layout(TYPES[kind], heads, tokens, dim);
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let byte = (state >> 56) as u8;
            if few { byte & 3 } else { byte }
        };
        let cell: Vec<u8> = (0..layout.bytes()).map(|_| random()).collect();
        prop_assert_eq!(unpack(&layout, &pack(&layout, &cell).unwrap()).unwrap(), cell);
    }

    #[test]
    fn flipped_bits_give_a_cell_or_a_typed_error(at in any::<prop::sample::Index>(), bit in 0..8_u32, seed in any::<u64>()) {
        let layout = layout(KvType::F16, 2, 64, 16);
        let mut packed = pack(&layout, &like_keys(&layout, seed)).unwrap();
        let at = at.index(packed.len());
        packed[at] ^= 1 << bit;
        if let Ok(cell) = unpack(&layout, &packed) {
            prop_assert_eq!(cell.len(), layout.bytes());
        }
    }

    #[test]
    fn any_bytes_are_read_as_a_cell_or_refused(
        kind in 0..3_usize, tokens in 0..20_usize, mut bytes in prop::collection::vec(any::<u8>(), 0..400),
        frame in any::<bool>(),
    ) {
        let layout = layout(TYPES[kind], 2, tokens, 8);
        if let Some(first) = bytes.first_mut() {
            *first = 1;
        }
        if frame {
            // A frame of zstd with whatever follows its mark, such as the promise of endless content.
            let length = (bytes.len() as u32 + 3).to_le_bytes();
            bytes = [&[1, 1][..], &length, &[0x28, 0xb5, 0x2f, 0xfd], &bytes].concat();
        }
        if let Ok(cell) = unpack(&layout, &bytes) {
            prop_assert_eq!(cell.len(), layout.bytes());
        }
    }
}
