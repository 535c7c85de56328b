//! Keys that are turned back, against the rotary embedding of the reference at the earlier position; elements of another type.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use half::f16;
use kernels::backend::{KvType, RopePairing};
use kernels::codec::CellShape;
use kernels::codec::elements::{convert, turn_back};
use kernels::reference;
use proptest::prelude::*;

const BASE: f32 = 10_000.0;

fn bytes(kv_type: KvType, numbers: &[f32]) -> Vec<u8> {
    match kv_type {
        KvType::F32 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        _ => numbers.iter().flat_map(|number| f16::from_f32(*number).to_le_bytes()).collect(),
    }
}

fn numbers(kv_type: KvType, bytes: &[u8]) -> Vec<f32> {
    match kv_type {
        KvType::F32 => bytes.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        _ => bytes.as_chunks().0.iter().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect(),
    }
}

/// A cell of keys that the reference rotates to `position(token)`, and of values.
fn cell(
    kv_type: KvType,
    shape: &CellShape,
    rows: &[Vec<f32>],
    position: impl Fn(usize) -> usize,
) -> (Vec<f32>, Vec<u8>) {
    let mut all = Vec::new();
    for head in rows.chunks(2 * shape.tokens) {
        let (keys, values) = head.split_at(shape.tokens);
        for (token, key) in keys.iter().enumerate() {
            let at = position(token) as u32;
            let key = reference::rope(key, shape.head_dim, f64::from(BASE), shape.rope_pairing, at);
            all.extend(key.iter().map(|number| *number as f32));
        }
        all.extend(values.iter().flatten());
    }
    let bytes = bytes(kv_type, &all);
    (all, bytes)
}

fn shapes() -> impl Strategy<Value = CellShape> {
    let pairing = prop_oneof![Just(RopePairing::Adjacent), Just(RopePairing::Halves)];
    (1usize..4, 1usize..20, 1usize..20, 0usize..3000, pairing).prop_map(
        |(kv_heads, tokens, half, start, rope_pairing)| CellShape {
            kv_heads,
            tokens,
            head_dim: 2 * half,
            start,
            rope_base: BASE,
            rope_pairing,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn keys_turned_back_are_those_of_the_earlier_position(
        shape in shapes(),
        back in 0usize..3000,
        wide in any::<bool>(),
        seed in prop::collection::vec(-4.0f32..4.0, 2 * 3 * 20 * 38),
    ) {
        let kv_type = if wide { KvType::F32 } else { KvType::F16 };
        let back = back.min(shape.start);
        let rows: Vec<Vec<f32>> = seed
            .chunks_exact(shape.head_dim)
            .take(2 * shape.kv_heads * shape.tokens)
            .map(<[f32]>::to_vec)
            .collect();
        let (_, mut moved) = cell(kv_type, &shape, &rows, |token| shape.start + token);
        let (wanted, at_once) = cell(kv_type, &shape, &rows, |token| shape.start + token - back);
        turn_back(kv_type, &shape, &mut moved, back).unwrap();
        // A pair of channels has a length of at most 6; each rounding loses half a unit in the last place.
        let most = if wide { 6.0 * 2.0f32.powi(-21) } else { 6.0 * 2.0f32.powi(-10) };
        for (got, wanted) in numbers(kv_type, &moved).iter().zip(&wanted) {
            prop_assert!((got - wanted).abs() <= most, "{got} {wanted}");
        }
        let head = shape.tokens * kv_type.head_bytes(shape.head_dim);
        for (moved, at_once) in moved.chunks(2 * head).zip(at_once.chunks(2 * head)) {
            prop_assert_eq!(&moved[head..], &at_once[head..], "values have no position");
        }
    }

    #[test]
    fn elements_of_another_type_are_rounded_once(shape in shapes(), seed in prop::collection::vec(any::<f32>(), 64)) {
        let count = 2 * shape.kv_heads * shape.tokens * shape.head_dim;
        let values: Vec<f32> = seed.iter().copied().filter(|value| !value.is_nan()).cycle().take(count).collect();
        prop_assume!(values.len() == count);
        let (wide, narrow) = (bytes(KvType::F32, &values), bytes(KvType::F16, &values));
        prop_assert_eq!(&convert(KvType::F32, KvType::F16, &shape, &wide).unwrap(), &narrow);
        let back = convert(KvType::F16, KvType::F32, &shape, &narrow).unwrap();
        prop_assert_eq!(&numbers(KvType::F32, &back), &numbers(KvType::F16, &narrow));
        prop_assert_eq!(&convert(KvType::F32, KvType::F32, &shape, &wide).unwrap(), &wide);
    }
}

#[test]
fn other_lengths_and_elements_with_scales_are_refused() {
    let rope_pairing = RopePairing::Halves;
    let shape = CellShape { kv_heads: 2, tokens: 3, head_dim: 4, start: 9, rope_base: BASE, rope_pairing };
    let mut cell = vec![0; 2 * 2 * 3 * 4 * 2];
    assert!(turn_back(KvType::F16, &shape, &mut cell, 5).is_ok());
    let refused = |result: Result<(), kernels::error::KernelError>| result.unwrap_err().to_string();
    assert!(
        refused(turn_back(KvType::F32, &shape, &mut cell, 5))
            .contains("bytes of the cell is 96, expected 192")
    );
    assert!(refused(turn_back(KvType::Int8, &shape, &mut cell, 5)).contains("bits of an element"));
    assert!(
        refused(convert(KvType::F16, KvType::Int8, &shape, &cell).map(drop)).contains("bits of an element")
    );
    assert!(
        refused(convert(KvType::F32, KvType::F16, &shape, &cell).map(drop)).contains("bytes of the cell")
    );
}
