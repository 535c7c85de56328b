//! Pages, attention and cells of the CUDA backend, run on the CPU through the shim: against the reference, against the
//! CPU's bytes, and the same bits however rows, pages and threads are arranged. Every call goes through a recorder, which
//! stops the test where two pieces of work race.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod sample;
mod sequence;
mod shim;

use kernels::backend::{
    AttentionShape, Backend, KvType, PAGE_TOKENS, PageId, PoolSpec, RopePairing, RowGroup,
};
use kernels::codec::{self, CellShape, Codec};
use kernels::cpu::best_isa;
use proptest::prelude::*;
use sample::{Random, bits, floats, tensor_of};
use sequence::{Sequence, poisoned, run, shapes, tables};

fn near(got: &[f32], want: &[f64], tolerance: f64) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        prop_assert!(error < tolerance * (1.0 + want.abs()), "[{}] {} {}", i, got, want);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn i1_attention_is_right_and_the_same_however_it_is_cut(
        shape in shapes(), tokens in 1usize..60, piece in 1usize..60, seed: u64,
    ) {
        let mut random = Random::new(seed);
        let sequence = Sequence::new(&mut random, shape, tokens);
        let backend = shim::backend();
        let (got, got_lse) = run(&backend, &sequence, tokens, &mut random);
        let (want, want_lse) = sequence.expected();
        near(&got, &want, 1e-5)?;
        near(&got_lse, &want_lse, 1e-5)?;
        let other_order = shim::recorded(1 + seed as u32 % 9).0;
        for (backend, piece) in [(&backend, 1), (&backend, piece), (&other_order, 9)] {
            let (other, lse) = run(backend, &sequence, piece, &mut random);
            prop_assert_eq!(bits(&other), bits(&got));
            prop_assert_eq!(bits(&lse), bits(&got_lse));
        }
    }

    #[test]
    fn cells_have_the_bytes_of_the_cpu(
        kv_heads in 1usize..4, dims in 1usize..12, tokens in 1usize..50, kind in 0usize..3, seed: u64,
    ) {
        let kv_type = [KvType::F16, KvType::F32, KvType::Int8][kind];
        let mut random = Random::new(seed);
        let head_dim = 8 * dims;
        let shape = AttentionShape { heads: kv_heads, kv_heads, head_dim, scale: 1.0, window: None };
        let mut sequence = Sequence::new(&mut random, shape, tokens);
        // A token of zeros, whose scales are zero.
        sequence.k[..kv_heads * head_dim].fill(0.0);
        let (cuda, cpu) = (shim::backend(), sample::backend(1, best_isa()));
        let want = cells(&cpu, &sequence, kv_type, &mut random);
        prop_assert_eq!(cells(&cuda, &sequence, kv_type, &mut random), want.clone());
        // Cells of one device are pages of the other.
        let spec = PoolSpec { pages: kv_heads * tokens.div_ceil(PAGE_TOKENS), head_dim, kv_type };
        let mut pool = cuda.pool(spec).unwrap();
        let pages = tables(&mut random, spec.pages, kv_heads, tokens);
        let pages: Vec<&[PageId]> = pages.iter().map(Vec::as_slice).collect();
        cuda.scatter_cell(&mut pool, &pages, tokens, &want).unwrap();
        let mut back = vec![0; want.len()];
        cuda.gather_cell(&pool, &pages, tokens, &mut back).unwrap();
        prop_assert_eq!(back, want);
    }
}

/// Cells of f16 values, some of them no numbers or without a sign that matters.
fn cell_values() -> impl Strategy<Value = Vec<u16>> {
    let odd = prop_oneof![Just(0x8000u16), Just(0), Just(0x7c00), Just(0xfc00), Just(0x7e00), Just(0x7bff)];
    let usual = (-8.0f32..8.0).prop_map(|value| half::f16::from_f32(value).to_bits());
    let flat = Just(half::f16::from_f32(0.3).to_bits());
    proptest::collection::vec(prop_oneof![1 => odd, 20 => usual, 4 => flat], 64..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn packed_cells_have_the_bytes_of_the_codec_and_come_back_as_it_says(
        kv_heads in 1usize..4, dims in 1usize..9, tokens in 1usize..70, start in 0usize..5000, values in cell_values(),
        int8: bool, adjacent: bool, seed: u64,
    ) {
        let head_dim = 8 * dims;
        let codec = if int8 { Codec::Int8 } else { Codec::Int4 };
        let rope_pairing = if adjacent { RopePairing::Adjacent } else { RopePairing::Halves };
        let shape = CellShape { kv_heads, tokens, head_dim, start, rope_base: 10_000.0, rope_pairing };
        let count = shape.bytes() / 2;
        let cell: Vec<u8> = values.iter().cycle().take(count).flat_map(|raw| raw.to_le_bytes()).collect();
        let want = codec::pack(codec, &shape, &cell).unwrap();
        let back = codec::unpack(codec, &shape, &want).unwrap();
        let mut random = Random::new(seed);
        let pages = kv_heads * tokens.div_ceil(PAGE_TOKENS) + 3;
        let tables = tables(&mut random, pages, kv_heads, tokens);
        let tables: Vec<&[PageId]> = tables.iter().map(Vec::as_slice).collect();
        for backend in [shim::backend(), shim::recorded(2 + seed as u32 % 9).0] {
            let mut pool = poisoned(&backend, pages, head_dim, KvType::F16);
            backend.scatter_cell(&mut pool, &tables, tokens, &cell).unwrap();
            let mut packed = vec![0xab; want.len()];
            backend.gather_packed(&pool, &tables, codec, &shape, &mut packed).unwrap();
            prop_assert_eq!(&packed, &want);
            let mut pool = poisoned(&backend, pages, head_dim, KvType::F16);
            backend.scatter_packed(&mut pool, &tables, codec, &shape, &packed).unwrap();
            let mut got = vec![0; cell.len()];
            backend.gather_cell(&pool, &tables, tokens, &mut got).unwrap();
            prop_assert_eq!(numbers(&got), numbers(&back));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn moved_tokens_have_the_bytes_of_the_cpu_and_the_others_stay(
        kv_heads in 1usize..4, dims in 1usize..33, tokens in 1usize..90, cut in (0usize..90, 0usize..90), wide: bool,
        adjacent: bool, seed: u64,
    ) {
        let kv_type = if wide { KvType::F32 } else { KvType::F16 };
        let rope_pairing = if adjacent { RopePairing::Adjacent } else { RopePairing::Halves };
        let (to, start) = (cut.0.min(cut.1).min(tokens), cut.0.max(cut.1).min(tokens));
        let head_dim = 8 * dims;
        let mut random = Random::new(seed);
        let spec = PoolSpec { pages: kv_heads * tokens.div_ceil(PAGE_TOKENS) + 3, head_dim, kv_type };
        let pages = tables(&mut random, spec.pages, kv_heads, tokens);
        let pages: Vec<&[PageId]> = pages.iter().map(Vec::as_slice).collect();
        let count = kv_heads * 2 * tokens * head_dim;
        let values = floats(&mut random, count, 3.0);
        let cell: Vec<u8> = match kv_type {
            KvType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            _ => values.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect(),
        };
        let shape = CellShape { kv_heads, tokens: tokens - start, head_dim, start, rope_base: 10_000.0, rope_pairing };
        let moved = |backend: &dyn Fn(&mut Vec<u8>)| { let mut back = vec![0; cell.len()]; backend(&mut back); back };
        let cpu = sample::backend(1, best_isa());
        let want = moved(&|back| {
            let mut pool = cpu.pool(spec).unwrap();
            cpu.scatter_cell(&mut pool, &pages, tokens, &cell).unwrap();
            cpu.relocate(&mut pool, kv_type, &pages, &shape, to).unwrap();
            cpu.gather_cell(&pool, &pages, tokens, back).unwrap();
        });
        for cuda in [shim::backend(), shim::recorded(2 + seed as u32 % 9).0] {
            let got = moved(&|back| {
                let mut pool = poisoned(&cuda, spec.pages, head_dim, kv_type);
                cuda.scatter_cell(&mut pool, &pages, tokens, &cell).unwrap();
                cuda.relocate(&mut pool, kv_type, &pages, &shape, to).unwrap();
                cuda.gather_cell(&pool, &pages, tokens, back).unwrap();
            });
            prop_assert!(got == want, "{shape:?} to {to}");
        }
        // By themselves: tokens before the new place, and values.
        let row = kv_type.head_bytes(head_dim);
        for (place, (after, before)) in want.chunks(tokens * row).zip(cell.chunks(tokens * row)).enumerate() {
            prop_assert!(after[..to * row] == before[..to * row]);
            let end = to + tokens - start;
            prop_assert!(place % 2 == 0 || after[to * row..end * row] == before[start * row..]);
            prop_assert!(after[end * row..] == before[end * row..]);
        }
    }
}

#[test]
fn what_cannot_be_moved_is_refused() {
    let (cuda, cpu) = (shim::backend(), sample::backend(1, best_isa()));
    let rope_pairing = RopePairing::Halves;
    let shape = CellShape { kv_heads: 1, tokens: 4, head_dim: 16, start: 20, rope_base: 1e4, rope_pairing };
    let (two, one): ([PageId; 2], [PageId; 1]) = ([PageId(0), PageId(1)], [PageId(0)]);
    let spec = |kv_type| PoolSpec { pages: 2, head_dim: 16, kv_type };
    let mut pools = (cuda.pool(spec(KvType::F16)).unwrap(), cpu.pool(spec(KvType::F16)).unwrap());
    let cases: [(KvType, &[&[PageId]], usize, &str); 7] = [
        (KvType::F16, &[], 3, "KV heads"),
        (KvType::Int8, &[&two], 3, "bits of an element"),
        (KvType::F32, &[&two], 3, "bytes"),
        (KvType::F16, &[&two, &two], 3, "KV heads"),
        (KvType::F16, &[&one], 3, "pages"),
        (KvType::F16, &[&two], 21, "place 21"),
        (KvType::F16, &[&[PageId(0), PageId(7)]], 3, "page"),
    ];
    for (kv_type, tables, to, why) in cases {
        let refused = [
            cuda.relocate(&mut pools.0, kv_type, tables, &shape, to).unwrap_err(),
            cpu.relocate(&mut pools.1, kv_type, tables, &shape, to).unwrap_err(),
        ];
        assert!(refused.iter().all(|error| error.to_string().contains(why)), "{refused:?}");
    }
    cuda.relocate(&mut pools.0, KvType::F16, &[&two], &shape, 3).unwrap();
    cpu.relocate(&mut pools.1, KvType::F16, &[&two], &shape, 20).unwrap();
}

/// Values of a cell; which of the many patterns a NaN has says nothing.
fn numbers(cell: &[u8]) -> Vec<u16> {
    let values = cell.as_chunks().0.iter().map(|raw| half::f16::from_le_bytes(*raw));
    values.map(|value| if value.is_nan() { 0x7e00 } else { value.to_bits() }).collect()
}

#[test]
fn packed_cells_of_another_shape_are_refused() {
    let backend = shim::backend();
    let shape = CellShape {
        kv_heads: 1,
        tokens: 16,
        head_dim: 32,
        start: 0,
        rope_base: 1e4,
        rope_pairing: RopePairing::Halves,
    };
    let mut packed = vec![0; shape.packed_bytes(Codec::Int4)];
    let tables: [&[PageId]; 1] = [&[PageId(0)]];
    for (head_dim, kv_type) in [(32, KvType::F32), (32, KvType::Int8), (40, KvType::F16)] {
        let pool = backend.pool(PoolSpec { pages: 1, head_dim, kv_type }).unwrap();
        assert!(backend.gather_packed(&pool, &tables, Codec::Int4, &shape, &mut packed).is_err());
    }
    let mut pool = backend.pool(PoolSpec { pages: 1, head_dim: 32, kv_type: KvType::F16 }).unwrap();
    assert!(backend.gather_packed(&pool, &tables, Codec::Int8, &shape, &mut packed).is_err(), "its bytes");
    assert!(backend.scatter_packed(&mut pool, &[], Codec::Int4, &shape, &packed).is_err(), "its heads");
    backend.gather_packed(&pool, &tables, Codec::Int4, &shape, &mut packed).unwrap();
}

/// Appends a sequence in two steps and gathers all of it.
fn cells<B: Backend>(backend: &B, sequence: &Sequence, kv_type: KvType, random: &mut Random) -> Vec<u8> {
    let AttentionShape { kv_heads, head_dim, .. } = sequence.shape;
    let pages = kv_heads * sequence.tokens.div_ceil(PAGE_TOKENS) + 2;
    let mut pool = poisoned(backend, pages, head_dim, kv_type);
    let tables = tables(random, pages, kv_heads, sequence.tokens);
    let tables: Vec<&[PageId]> = tables.iter().map(Vec::as_slice).collect();
    let half = sequence.tokens / 2;
    for (start, rows) in [(0, half), (half, sequence.tokens - half)] {
        let [k, v] = [&sequence.k, &sequence.v].map(|all| {
            let rows_of = sequence.rows(all, kv_heads, start, rows);
            // A buffer without a row cannot be made.
            let padded = [rows_of, &vec![f32::NAN; kv_heads * head_dim]].concat();
            tensor_of(backend, &padded, kv_heads * head_dim)
        });
        let group = RowGroup { tables: &tables, first_row: 0, rows, start };
        backend.append(&mut pool, sequence.shape, &[group], &k, &v).unwrap();
    }
    let spec = PoolSpec { pages, head_dim, kv_type };
    let mut cell = vec![0; spec.cell_bytes(kv_heads, sequence.tokens)];
    backend.gather_cell(&pool, &tables, sequence.tokens, &mut cell).unwrap();
    cell
}

#[test]
fn i1_a_context_of_several_partitions_is_right_and_the_same_however_it_is_cut() {
    for (window, head_dim, heads) in [(None, 72, 3), (Some(300), 16, 10), (Some(40), 8, 18), (None, 256, 1)] {
        let shape = AttentionShape { heads, kv_heads: 1, head_dim, scale: 0.25, window };
        let mut random = Random::new(11);
        let sequence = Sequence::new(&mut random, shape, 530);
        let backend = shim::backend();
        let (one, lse) = run(&backend, &sequence, 530, &mut random);
        // Rows one by one have their partitions computed apart.
        for piece in [1, 200] {
            let (other, other_lse) = run(&backend, &sequence, piece, &mut random);
            assert_eq!(bits(&one), bits(&other), "{window:?} {piece}");
            assert_eq!(bits(&lse), bits(&other_lse), "{window:?} {piece}");
        }
        let (want, want_lse) = sequence.expected();
        near(&one, &want, 1e-4).unwrap();
        near(&lse, &want_lse, 1e-4).unwrap();
    }
}

#[test]
fn i1_pages_of_every_type_give_the_bits_of_f32_with_the_values_they_hold() {
    let shape = AttentionShape { heads: 6, kv_heads: 2, head_dim: 72, scale: 0.2, window: None };
    let backend = shim::backend();
    for kv_type in [KvType::F16, KvType::Int8] {
        let mut random = Random::new(6);
        let mut sequence = Sequence { kv_type, ..Sequence::new(&mut random, shape, 270) };
        let [got, one_by_one] = [270, 1].map(|piece| run(&backend, &sequence, piece, &mut random));
        assert_eq!(bits(&got.0), bits(&one_by_one.0));
        sequence.kv_type = KvType::F32;
        for values in [&mut sequence.k, &mut sequence.v] {
            for head in values.chunks_mut(72) {
                match kv_type {
                    KvType::Int8 => head.chunks_mut(32).for_each(|block| {
                        let (scale, codes) = kernels::reference::round_int8(block);
                        block.iter_mut().zip(codes).for_each(|(v, code)| *v = f32::from(code) * scale);
                    }),
                    _ => head.iter_mut().for_each(|v| *v = half::f16::from_f32(*v).to_f32()),
                }
            }
        }
        let want = run(&backend, &sequence, 270, &mut random);
        assert_eq!(bits(&got.0), bits(&want.0), "{}", kv_type.name());
        assert_eq!(bits(&got.1), bits(&want.1), "{}", kv_type.name());
    }
}

#[test]
fn i1_sequences_in_one_step_do_not_notice_each_other() {
    let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 24, scale: 0.2, window: Some(30) };
    let mut random = Random::new(8);
    let backend = shim::backend();
    // Tokens that are there, and rows of the step: some by partition, some in tiles.
    let parts = [(20, 1), (0, 33), (270, 5), (7, 9)];
    let all: Vec<(Sequence, usize)> =
        parts.iter().map(|&(start, rows)| (Sequence::new(&mut random, shape, start + rows), start)).collect();
    let count: usize = all.iter().map(|(s, _)| 2 * s.tokens.div_ceil(PAGE_TOKENS)).sum();
    let mut pool = poisoned(&backend, count, 24, KvType::F16);
    let mut pages = tables(&mut random, count, 1, count * PAGE_TOKENS).remove(0).into_iter();
    let tables: Vec<Vec<Vec<PageId>>> = all
        .iter()
        .map(|(s, _)| (0..2).map(|_| pages.by_ref().take(s.tokens.div_ceil(PAGE_TOKENS)).collect()).collect())
        .collect();
    let tables: Vec<Vec<&[PageId]>> = tables.iter().map(|t| t.iter().map(Vec::as_slice).collect()).collect();
    let (mut groups, mut q, mut k, mut v, mut want) = (Vec::new(), vec![], vec![], vec![], vec![]);
    for ((sequence, start), tables) in all.iter().zip(&tables) {
        if *start > 0 {
            let [old_k, old_v] = [&sequence.k, &sequence.v]
                .map(|x| tensor_of(&backend, sequence.rows(x, 2, 0, *start), 2 * 24));
            let before = [RowGroup { tables, first_row: 0, rows: *start, start: 0 }];
            backend.append(&mut pool, shape, &before, &old_k, &old_v).unwrap();
        }
        let rows = sequence.tokens - start;
        groups.push(RowGroup { tables, first_row: q.len() / (4 * 24), rows, start: *start });
        q.extend_from_slice(sequence.rows(&sequence.q, 4, *start, rows));
        k.extend_from_slice(sequence.rows(&sequence.k, 2, *start, rows));
        v.extend_from_slice(sequence.rows(&sequence.v, 2, *start, rows));
        let alone = run(&backend, sequence, sequence.tokens, &mut random).0;
        want.extend_from_slice(sequence.rows(&alone, 4, *start, rows));
    }
    groups.reverse();
    let [q, k, v] = [(q, 4), (k, 2), (v, 2)].map(|(x, heads)| tensor_of(&backend, &x, heads * 24));
    let rows = want.len() / (4 * 24);
    let mut out = tensor_of(&backend, &vec![f32::NAN; want.len()], 4 * 24);
    backend.append(&mut pool, shape, &groups, &k, &v).unwrap();
    backend.attention(&pool, shape, &groups, &q, &mut out, None).unwrap();
    let mut got = vec![0.0; want.len()];
    backend.read(&out, rows, &mut got).unwrap();
    assert_eq!(bits(&got), bits(&want));
}

#[test]
fn f16_is_rounded_as_the_format_says() {
    // Every place where rounding turns, and the ends of the range.
    let mut values: Vec<f32> = (0..=u16::MAX)
        .step_by(7)
        .map(|raw| half::f16::from_bits(raw).to_f32())
        .filter(|value| value.is_finite())
        .flat_map(|value| {
            let step = f32::from_bits(value.to_bits() ^ 0x1000);
            [
                value,
                step,
                f32::from_bits(step.to_bits() + 1),
                f32::from_bits(step.to_bits().saturating_sub(1)),
            ]
        })
        .collect();
    values.extend([
        65519.9,
        65520.0,
        -65520.0,
        1e30,
        f32::INFINITY,
        f32::NEG_INFINITY,
        1e-8,
        2.98e-8,
        2.981e-8,
        -0.0,
    ]);
    values.extend(floats(&mut Random::new(1), 64, 1e-6));
    values.resize(values.len().next_multiple_of(64), 0.0);
    let backend = shim::backend();
    let tokens = values.len() / 64;
    let pages = tokens.div_ceil(PAGE_TOKENS);
    let mut pool = backend.pool(PoolSpec { pages, head_dim: 64, kv_type: KvType::F16 }).unwrap();
    let table: Vec<PageId> = (0..pages as u32).map(PageId).collect();
    let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 64, scale: 1.0, window: None };
    let x = tensor_of(&backend, &values, 64);
    let group = RowGroup { tables: &[&table], first_row: 0, rows: tokens, start: 0 };
    backend.append(&mut pool, shape, &[group], &x, &x).unwrap();
    let mut cell = vec![0; 2 * 2 * values.len()];
    backend.gather_cell(&pool, &[&table], tokens, &mut cell).unwrap();
    for (i, raw) in cell.as_chunks::<2>().0.iter().enumerate() {
        let value = values[i % values.len()];
        assert_eq!(u16::from_le_bytes(*raw), half::f16::from_f32(value).to_bits(), "{value:e}");
    }
}

#[test]
fn a_copied_page_is_the_same_and_the_others_stay() {
    let backend = shim::backend();
    for kv_type in [KvType::F16, KvType::F32, KvType::Int8] {
        let spec = PoolSpec { pages: 3, head_dim: 40, kv_type };
        let mut pool = backend.pool(spec).unwrap();
        let size = spec.cell_bytes(1, PAGE_TOKENS);
        let contents: Vec<Vec<u8>> =
            (0..3u8).map(|page| (0..size).map(|i| (i as u8 & 0x7f) ^ (page << 5)).collect()).collect();
        for (page, cell) in contents.iter().enumerate() {
            backend.scatter_cell(&mut pool, &[&[PageId(page as u32)]], PAGE_TOKENS, cell).unwrap();
        }
        backend.copy_page(&mut pool, PageId(2), PageId(0)).unwrap();
        backend.copy_page(&mut pool, PageId(1), PageId(1)).unwrap();
        for (page, want) in [2, 1, 2].into_iter().enumerate() {
            let mut cell = vec![0; size];
            backend.gather_cell(&pool, &[&[PageId(page as u32)]], PAGE_TOKENS, &mut cell).unwrap();
            assert_eq!(cell, contents[want]);
        }
    }
}
