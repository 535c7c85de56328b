//! Pages and attention: against the f64 reference, and the same bits however rows and pages are arranged.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod sample;
mod sequence;

use kernels::backend::{
    AttentionShape, Backend, KvType, PAGE_TOKENS, PageId, PoolSpec, RowGroup, SCALE_BLOCK,
};
use kernels::cpu::{Isa, best_isa};
use kernels::error::KernelError;
use kernels::reference;
use proptest::prelude::*;
use sample::{Random, backend, bits, tensor_of};
use sequence::{Sequence, poisoned, run, shapes, tables};

/// Bytes of a cell of f16.
fn half_cell(kv_heads: usize, head_dim: usize, tokens: usize) -> usize {
    2 * 2 * kv_heads * head_dim * tokens
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn i1_attention_is_the_same_however_it_is_cut(
        shape in shapes(), tokens in 1usize..90, piece in 1usize..90, seed: u64,
    ) {
        let mut random = Random::new(seed);
        let sequence = Sequence::new(&mut random, shape, tokens);
        let (want, want_lse) = run(&backend(2, best_isa()), &sequence, tokens, &mut random);
        let plans = [(Isa::Scalar, 1, tokens), (best_isa(), 1, 1), (best_isa(), 2, 7), (best_isa(), 3, piece)];
        for (isa, threads, piece) in plans {
            let (got, lse) = run(&backend(threads, isa), &sequence, piece, &mut random);
            prop_assert_eq!(bits(&got), bits(&want));
            prop_assert_eq!(bits(&lse), bits(&want_lse));
        }
    }

    #[test]
    fn attention_and_lse_are_right(shape in shapes(), tokens in 1usize..70, seed: u64) {
        let mut random = Random::new(seed);
        let sequence = Sequence::new(&mut random, shape, tokens);
        let (got, got_lse) = run(&backend(2, best_isa()), &sequence, 16, &mut random);
        let (want, want_lse) = sequence.expected();
        for (got, want) in got.iter().zip(&want).chain(got_lse.iter().zip(&want_lse)) {
            prop_assert!((f64::from(*got) - want).abs() < 1e-5 * (1.0 + want.abs()), "{got} {want}");
        }
    }

    #[test]
    fn i1_sequences_in_one_step_do_not_notice_each_other(
        shape in shapes(), lengths in proptest::collection::vec((1usize..40, 1usize..20), 1..4), seed: u64,
    ) {
        let mut random = Random::new(seed);
        let backend = backend(2, best_isa());
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let all: Vec<(Sequence, usize)> = lengths.iter()
            .map(|&(start, rows)| (Sequence::new(&mut random, shape, start + rows), start)).collect();
        let pages: usize = all.iter().map(|(s, _)| kv_heads * s.tokens.div_ceil(PAGE_TOKENS)).sum();
        let mut pool = poisoned(&backend, pages, head_dim, KvType::F16);
        let pages: Vec<PageId> = tables(&mut random, pages, 1, pages * PAGE_TOKENS).remove(0);
        let mut pages = pages.into_iter();
        let tables: Vec<Vec<Vec<PageId>>> = all.iter().map(|(s, _)| {
            (0..kv_heads).map(|_| pages.by_ref().take(s.tokens.div_ceil(PAGE_TOKENS)).collect()).collect()
        }).collect();
        let tables: Vec<Vec<&[PageId]>> = tables.iter().map(|t| t.iter().map(Vec::as_slice).collect()).collect();
        // The tokens before the step, one sequence after the other; then one step with rows of all.
        let (mut groups, mut q, mut k, mut v, mut want) = (Vec::new(), vec![], vec![], vec![], vec![]);
        for ((sequence, start), tables) in all.iter().zip(&tables) {
            let before = [RowGroup { tables, first_row: 0, rows: *start, start: 0 }];
            let [old_k, old_v] = [&sequence.k, &sequence.v]
                .map(|x| tensor_of(&backend, sequence.rows(x, kv_heads, 0, *start), kv_heads * head_dim));
            backend.append(&mut pool, shape, &before, &old_k, &old_v).unwrap();
            let rows = sequence.tokens - start;
            groups.push(RowGroup { tables, first_row: q.len() / sequence.width(), rows, start: *start });
            q.extend_from_slice(sequence.rows(&sequence.q, heads, *start, rows));
            k.extend_from_slice(sequence.rows(&sequence.k, kv_heads, *start, rows));
            v.extend_from_slice(sequence.rows(&sequence.v, kv_heads, *start, rows));
            let alone = run(&backend, sequence, sequence.tokens, &mut random).0;
            want.extend_from_slice(sequence.rows(&alone, heads, *start, rows));
        }
        groups.reverse();
        let [q, k, v] = [(q, heads), (k, kv_heads), (v, kv_heads)].map(|(x, n)| tensor_of(&backend, &x, n * head_dim));
        let rows = want.len() / (heads * head_dim);
        let mut out = backend.tensor(rows, heads * head_dim).unwrap();
        backend.append(&mut pool, shape, &groups, &k, &v).unwrap();
        backend.attention(&pool, shape, &groups, &q, &mut out, None).unwrap();
        let mut got = vec![0.0; want.len()];
        backend.read(&out, rows, &mut got).unwrap();
        prop_assert_eq!(bits(&got), bits(&want));
    }

    #[test]
    fn cells_round_trip_and_hold_plain_rows(kv_heads in 1usize..4, dims in 1usize..9, tokens in 1usize..50, seed: u64) {
        let mut random = Random::new(seed);
        let head_dim = 8 * dims;
        let shape = AttentionShape { heads: kv_heads, kv_heads, head_dim, scale: 1.0, window: None };
        let sequence = Sequence::new(&mut random, shape, tokens);
        let backend = backend(1, best_isa());
        let pages = 2 * kv_heads * tokens.div_ceil(PAGE_TOKENS);
        let mut pool = poisoned(&backend, pages, head_dim, KvType::F16);
        let all = tables(&mut random, pages, 2 * kv_heads, tokens);
        let all: Vec<&[PageId]> = all.iter().map(Vec::as_slice).collect();
        let (from, to) = all.split_at(kv_heads);
        let [k, v] = [&sequence.k, &sequence.v].map(|x| tensor_of(&backend, x, kv_heads * head_dim));
        let group = RowGroup { tables: from, first_row: 0, rows: tokens, start: 0 };
        backend.append(&mut pool, shape, &[group], &k, &v).unwrap();
        let mut cell = vec![0; half_cell(kv_heads, head_dim, tokens)];
        backend.gather_cell(&pool, from, tokens, &mut cell).unwrap();
        let mut want = Vec::new();
        for head in 0..kv_heads {
            let mut kv = reference::KvRows::default();
            for token in 0..tokens {
                let at = (token * kv_heads + head) * head_dim;
                kv.append(&sequence.k[at..at + head_dim], &sequence.v[at..at + head_dim]);
            }
            let part = kv.gather(head_dim, 0, tokens);
            let mut back = reference::KvRows::default();
            back.scatter(&part);
            prop_assert_eq!(&back, &kv);
            want.extend(part);
        }
        prop_assert_eq!(&cell, &want);
        backend.scatter_cell(&mut pool, to, tokens, &cell).unwrap();
        let mut again = vec![0; cell.len()];
        backend.gather_cell(&pool, to, tokens, &mut again).unwrap();
        prop_assert_eq!(&again, &cell);
    }
}

#[test]
fn i1_a_context_of_several_partitions_is_right_and_the_same_however_it_is_cut() {
    for window in [None, Some(700), Some(40)] {
        let shape = AttentionShape { heads: 6, kv_heads: 1, head_dim: 16, scale: 0.25, window };
        let mut random = Random::new(11);
        let sequence = Sequence::new(&mut random, shape, 1200);
        let (one, lse) = run(&backend(1, best_isa()), &sequence, 1200, &mut random);
        for isa in Isa::available() {
            // Rows one by one have their partitions computed apart.
            for piece in [1, 500] {
                let (other, other_lse) = run(&backend(2, isa), &sequence, piece, &mut random);
                assert_eq!(bits(&one), bits(&other), "{} {window:?} {piece}", isa.name());
                assert_eq!(bits(&lse), bits(&other_lse), "{} {window:?} {piece}", isa.name());
            }
        }
        let (want, want_lse) = sequence.expected();
        let pairs = one.iter().zip(&want).chain(lse.iter().zip(&want_lse));
        assert!(pairs.into_iter().all(|(got, want)| (f64::from(*got) - want).abs() < 1e-4), "{window:?}");
    }
}

/// Values that f16 holds exactly are the same in either type of page.
#[test]
fn i1_pages_of_f32_give_the_bits_of_pages_of_f16_where_nothing_is_rounded() {
    let shape = AttentionShape { heads: 6, kv_heads: 2, head_dim: 24, scale: 0.2, window: None };
    let mut random = Random::new(5);
    let mut sequence = Sequence::new(&mut random, shape, 600);
    for value in sequence.k.iter_mut().chain(&mut sequence.v) {
        *value = half::f16::from_f32(*value).to_f32();
    }
    let (want, _) = run(&backend(2, best_isa()), &sequence, 600, &mut random);
    sequence.kv_type = KvType::F32;
    for isa in Isa::available() {
        for piece in [1, 64, 600] {
            let (got, _) = run(&backend(2, isa), &sequence, piece, &mut random);
            assert_eq!(bits(&got), bits(&want), "{} {piece}", isa.name());
        }
    }
}

/// What int8 holds is a number of scales: pages of f32 with those very values give the same bits.
#[test]
fn i1_pages_of_int8_give_the_bits_of_pages_of_f32_with_the_rounded_values() {
    for head_dim in [24, 64, 72] {
        let shape = AttentionShape { heads: 6, kv_heads: 2, head_dim, scale: 0.2, window: None };
        let mut random = Random::new(6);
        let mut sequence = Sequence::new(&mut random, shape, 530);
        sequence.kv_type = KvType::Int8;
        let mut rounded = Sequence { kv_type: KvType::F32, ..Sequence::new(&mut Random::new(6), shape, 530) };
        for values in [&mut rounded.k, &mut rounded.v] {
            let blocks = values.chunks_mut(head_dim).flat_map(|head| head.chunks_mut(SCALE_BLOCK));
            for block in blocks {
                let (scale, codes) = reference::round_int8(block);
                for (value, code) in block.iter_mut().zip(codes) {
                    let held = f32::from(code) * scale;
                    assert!(
                        (held - *value).abs() <= scale * 0.5001,
                        "{held} for {value} in scales of {scale}"
                    );
                    *value = held;
                }
            }
        }
        let (want, want_lse) = run(&backend(2, Isa::Scalar), &rounded, 530, &mut random);
        for isa in Isa::available() {
            for piece in [1, 64, 530] {
                let (got, lse) = run(&backend(2, isa), &sequence, piece, &mut random);
                assert_eq!(bits(&got), bits(&want), "{} {head_dim} {piece}", isa.name());
                assert_eq!(bits(&lse), bits(&want_lse), "{} {head_dim} {piece}", isa.name());
            }
        }
    }
}

#[test]
fn cells_of_int8_come_back_as_they_were_with_their_scales() {
    let backend = backend(1, best_isa());
    for head_dim in [8, 64, 72] {
        let spec = PoolSpec { pages: 5, head_dim, kv_type: KvType::Int8 };
        assert_eq!(spec.page_bytes(), 2 * PAGE_TOKENS * (head_dim + 4 * head_dim.div_ceil(32)));
        let mut pool = backend.pool(spec).unwrap();
        let (first, second) = ([PageId(1), PageId(3)], [PageId(4), PageId(0)]);
        let cell: Vec<u8> = (0..spec.cell_bytes(2, 21)).map(|i| (i * 31 % 251) as u8).collect();
        backend.scatter_cell(&mut pool, &[&first, &second], 21, &cell).unwrap();
        backend.copy_page(&mut pool, PageId(3), PageId(2)).unwrap();
        let mut back = vec![0; cell.len()];
        backend.gather_cell(&pool, &[&[PageId(1), PageId(2)], &second], 21, &mut back).unwrap();
        assert_eq!(back, cell, "{head_dim}");
    }
}

#[test]
fn cells_of_f32_hold_the_very_values() {
    let backend = backend(1, best_isa());
    let spec = PoolSpec { pages: 2, head_dim: 8, kv_type: KvType::F32 };
    let mut pool = backend.pool(spec).unwrap();
    let values: Vec<f32> = (0..2 * 5 * 8).map(|i| 1.0 / (3.0 + i as f32)).collect();
    let cell: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(cell.len(), spec.cell_bytes(1, 5));
    backend.scatter_cell(&mut pool, &[&[PageId(1)]], 5, &cell).unwrap();
    backend.copy_page(&mut pool, PageId(1), PageId(0)).unwrap();
    let mut back = vec![0; cell.len()];
    backend.gather_cell(&pool, &[&[PageId(0)]], 5, &mut back).unwrap();
    assert_eq!(back, cell);
}

#[test]
fn a_copied_page_is_the_same_and_the_others_stay() {
    let backend = backend(1, best_isa());
    let mut pool = backend.pool(PoolSpec { pages: 3, head_dim: 8, kv_type: KvType::F16 }).unwrap();
    let size = half_cell(1, 8, PAGE_TOKENS);
    let contents: Vec<Vec<u8>> =
        (0..3u8).map(|page| (0..size).map(|i| (i as u8 & 0x7f) ^ (page << 5)).collect()).collect();
    for (page, cell) in contents.iter().enumerate() {
        backend.scatter_cell(&mut pool, &[&[PageId(page as u32)]], PAGE_TOKENS, cell).unwrap();
    }
    backend.copy_page(&mut pool, PageId(2), PageId(0)).unwrap();
    for (page, want) in [2, 1, 2].into_iter().enumerate() {
        let mut cell = vec![0; size];
        backend.gather_cell(&pool, &[&[PageId(page as u32)]], PAGE_TOKENS, &mut cell).unwrap();
        assert_eq!(cell, contents[want]);
    }
    assert!(matches!(
        backend.copy_page(&mut pool, PageId(3), PageId(0)),
        Err(KernelError::OutOfRange { .. })
    ));
    assert!(matches!(
        backend.copy_page(&mut pool, PageId(0), PageId(u32::MAX)),
        Err(KernelError::OutOfRange { .. })
    ));
}

fn group<'a>(tables: &'a [&'a [PageId]], first_row: usize, rows: usize, start: usize) -> RowGroup<'a> {
    RowGroup { tables, first_row, rows, start }
}

#[test]
fn pages_outside_the_pool_and_wrong_shapes_are_refused() {
    let backend = backend(1, best_isa());
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 8, scale: 1.0, window: None };
    let mut pool = backend.pool(PoolSpec { pages: 2, head_dim: 8, kv_type: KvType::F16 }).unwrap();
    let (q, kv) = (backend.tensor(20, 16).unwrap(), backend.tensor(20, 8).unwrap());
    let mut out = backend.tensor(20, 16).unwrap();
    let good: &[PageId] = &[PageId(0), PageId(1)];
    let good_only: &[&[PageId]] = &[good];
    let outside: &[PageId] = &[PageId(0), PageId(2)];
    let mut both = |shape, groups: &[RowGroup<'_>]| {
        let appended = backend.append(&mut pool, shape, groups, &kv, &kv);
        assert_eq!(appended.is_err(), backend.attention(&pool, shape, groups, &q, &mut out, None).is_err());
        appended
    };
    assert!(both(shape, &[group(&[good], 0, 20, 0)]).is_ok());
    assert!(both(shape, &[group(&[outside], 0, 16, 0)]).is_ok(), "the second page is not used");
    assert!(matches!(
        both(shape, &[group(&[outside], 0, 17, 0)]),
        Err(KernelError::OutOfRange { what: "page", index: 2, limit: 2, .. })
    ));
    assert!(
        matches!(both(shape, &[group(&[good], 0, 1, 32)]), Err(KernelError::Shape { .. })),
        "table too short"
    );
    assert!(both(shape, &[group(&[good], 0, 2, usize::MAX - 1)]).is_err());
    assert!(both(shape, &[group(&[good], 1, 20, 0)]).is_err(), "more rows than the buffers");
    assert!(both(shape, &[group(&[good], usize::MAX, 2, 0)]).is_err());
    assert!(both(shape, &[group(&[good, good], 0, 1, 0)]).is_err(), "a table too many");
    let overlapping = [group(good_only, 0, 3, 0), group(good_only, 2, 2, 0)];
    assert!(matches!(both(shape, &overlapping), Err(KernelError::Overlap { row: 2, .. })));
    for bad in [
        AttentionShape { heads: 3, kv_heads: 2, ..shape },
        AttentionShape { kv_heads: 0, ..shape },
        AttentionShape { heads: 0, ..shape },
        AttentionShape { head_dim: 16, ..shape },
        AttentionShape { heads: usize::MAX, ..shape },
        AttentionShape { window: Some(0), ..shape },
    ] {
        assert!(both(bad, &[group(&[good], 0, 1, 0)]).is_err(), "{bad:?}");
    }
    let mut lse = [0.0; 3];
    assert!(
        backend.attention(&pool, shape, &[group(&[good], 0, 2, 0)], &q, &mut out, Some(&mut lse)).is_err()
    );
    for (pages, head_dim) in [(0, 8), (1, 0), (1, 12), (1, 4096), (usize::MAX, 8)] {
        assert!(backend.pool(PoolSpec { pages, head_dim, kv_type: KvType::F16 }).is_err());
    }
    let mut cell = vec![0; half_cell(1, 8, 4)];
    assert!(backend.gather_cell(&pool, &[&[PageId(9)]], 4, &mut cell).is_err());
    assert!(backend.gather_cell(&pool, &[good], 5, &mut cell).is_err());
    assert!(backend.gather_cell(&pool, &[good], 33, &mut cell).is_err());
    assert!(backend.gather_cell(&pool, &[], 4, &mut cell).is_err());
    assert!(backend.scatter_cell(&mut pool, &[good], usize::MAX, &cell).is_err());
    assert!(backend.scatter_cell(&mut pool, &[good], 4, &cell).is_ok());
}
