//! Sequences with their q, k and v, what attention of them has to be, and attention of them by any backend.
#![allow(dead_code, reason = "each test file uses its part")]

use kernels::backend::{AttentionShape, Backend, KvType, PAGE_TOKENS, PageId, PoolSpec, RowGroup};
use kernels::reference;
use proptest::prelude::*;

use crate::sample::{Random, floats, tensor_of};

/// One sequence of one layer: q, k and v of all its tokens.
pub(crate) struct Sequence {
    pub(crate) shape: AttentionShape,
    pub(crate) tokens: usize,
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) kv_type: KvType,
}

impl Sequence {
    pub(crate) fn new(random: &mut Random, shape: AttentionShape, tokens: usize) -> Self {
        let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let (q, k) = (floats(random, tokens * q, 2.0), floats(random, tokens * kv, 2.0));
        Self { shape, tokens, q, k, v: floats(random, tokens * kv, 1.0), kv_type: KvType::F16 }
    }

    pub(crate) fn width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    /// Rows `first..first + rows` of something with `heads` heads.
    pub(crate) fn rows<'a>(&self, values: &'a [f32], heads: usize, first: usize, rows: usize) -> &'a [f32] {
        let width = heads * self.shape.head_dim;
        &values[first * width..(first + rows) * width]
    }

    /// Outputs and log-sum-exps, by the reference.
    pub(crate) fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let AttentionShape { heads, kv_heads, head_dim, scale, .. } = self.shape;
        let mut kv = vec![reference::KvRows::default(); kv_heads];
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for token in 0..self.tokens {
            let (k, v) = (self.rows(&self.k, kv_heads, token, 1), self.rows(&self.v, kv_heads, token, 1));
            for ((kv, k), v) in kv.iter_mut().zip(k.chunks(head_dim)).zip(v.chunks(head_dim)) {
                kv.append(k, v);
            }
            for (head, q) in self.rows(&self.q, heads, token, 1).chunks(head_dim).enumerate() {
                let kv = &kv[head / (heads / kv_heads)];
                let window = self.shape.window.unwrap_or(usize::MAX);
                let (keys, kept) = (kv.keys_f32(), kv.values_f32());
                let (keys, kept) =
                    (reference::window(&keys, head_dim, window), reference::window(&kept, head_dim, window));
                let (values, sum) = reference::attention(q, keys, kept, scale);
                out.extend(values);
                lse.push(sum);
            }
        }
        (out, lse)
    }
}

/// Page tables of one sequence: distinct pages in a random order of the pool.
pub(crate) fn tables(
    random: &mut Random,
    pool_pages: usize,
    kv_heads: usize,
    tokens: usize,
) -> Vec<Vec<PageId>> {
    let mut free: Vec<PageId> = (0..pool_pages as u32).map(PageId).collect();
    let needed = tokens.div_ceil(PAGE_TOKENS);
    (0..kv_heads).map(|_| (0..needed).map(|_| free.swap_remove(random.below(free.len()))).collect()).collect()
}

/// A pool whose pages are full of NaN, so that a slot read before it was written shows.
pub(crate) fn poisoned<B: Backend>(backend: &B, pages: usize, head_dim: usize, kv_type: KvType) -> B::Pool {
    let spec = PoolSpec { pages, head_dim, kv_type };
    let mut pool = backend.pool(spec).unwrap();
    // NaN in either type.
    let cell = [0xff, 0x7f].repeat(spec.cell_bytes(1, PAGE_TOKENS) / 2);
    for page in 0..pages as u32 {
        backend.scatter_cell(&mut pool, &[&[PageId(page)]], PAGE_TOKENS, &cell).unwrap();
    }
    pool
}

/// Appends and attends in pieces of `piece` rows; outputs and log-sum-exps as bits.
pub(crate) fn run<B: Backend>(
    backend: &B,
    sequence: &Sequence,
    piece: usize,
    random: &mut Random,
) -> (Vec<f32>, Vec<f32>) {
    let AttentionShape { heads, kv_heads, head_dim, .. } = sequence.shape;
    let pages = kv_heads * sequence.tokens.div_ceil(PAGE_TOKENS) + 3;
    let mut pool = poisoned(backend, pages, head_dim, sequence.kv_type);
    let tables = tables(random, pages, kv_heads, sequence.tokens);
    let tables: Vec<&[PageId]> = tables.iter().map(Vec::as_slice).collect();
    let (mut outs, mut sums) = (Vec::new(), Vec::new());
    for start in (0..sequence.tokens).step_by(piece) {
        let rows = piece.min(sequence.tokens - start);
        let [k, v] = [&sequence.k, &sequence.v]
            .map(|x| tensor_of(backend, sequence.rows(x, kv_heads, start, rows), kv_heads * head_dim));
        let q = tensor_of(backend, sequence.rows(&sequence.q, heads, start, rows), heads * head_dim);
        // Pages before the window of the first row are gone.
        let gone = sequence.shape.first_seen(start) / PAGE_TOKENS;
        let left: Vec<Vec<PageId>> = tables
            .iter()
            .map(|table| [vec![PageId::ABSENT; gone], table[gone..].to_vec()].concat())
            .collect();
        let left: Vec<&[PageId]> = left.iter().map(Vec::as_slice).collect();
        let groups = [RowGroup { tables: &left, first_row: 0, rows, start }];
        let mut out = backend.tensor(rows, heads * head_dim).unwrap();
        let mut lse = vec![0.0; rows * heads];
        backend.append(&mut pool, sequence.shape, &groups, &k, &v).unwrap();
        backend.attention(&pool, sequence.shape, &groups, &q, &mut out, Some(&mut lse)).unwrap();
        let mut values = vec![0.0; rows * heads * head_dim];
        backend.read(&out, rows, &mut values).unwrap();
        outs.extend(values);
        sums.extend(lse);
    }
    (outs, sums)
}

/// Shapes of attention.
pub(crate) fn shapes() -> impl Strategy<Value = AttentionShape> {
    let window = prop_oneof![Just(None), (1usize..70).prop_map(Some)];
    (1usize..8, 1usize..3, 1usize..10, window).prop_map(|(per_kv, kv_heads, dims, window)| {
        let head_dim = 8 * dims;
        let scale = 1.0 / (head_dim as f32).sqrt();
        AttentionShape { heads: per_kv * kv_heads, kv_heads, head_dim, scale, window }
    })
}
