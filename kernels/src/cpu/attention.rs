//! `attention`: causal attention of rows over the pages of their sequence.
//!
//! Two passes per (row, head). Scores: a lane owns a key and walks the channels in order. Values: a
//! lane owns a channel and walks the tokens in order. The softmax denominator is kept in 16 partial
//! sums by token index modulo 16, which is the slot in the page, and merged in slot order. A few (row, head)
//! pairs of one KV head are walked together so that K and V are converted once for all of them; the
//! sums of a pair do not notice. A window only moves the first page and masks what lies before it.

use std::cell::RefCell;

use super::exp::exp;
use super::lanes::{Kernel, LANES, Lanes, Wide};
use super::pages::CpuPool;
use super::workers::{Disjoint, Workers};
use super::{Isa, lanes::dispatch};
use crate::backend::{AttentionShape, PAGE_TOKENS, PageId, RowGroup};

/// (row, head) pairs of an item, roughly.
const ITEM_PAIRS: usize = 48;

const _: () = assert!(PAGE_TOKENS == 2 * LANES, "a page is two vectors of keys");

thread_local! {
    /// Scores of one tile of pairs; grows to the longest context seen.
    static SCORES: RefCell<Vec<[f32; PAGE_TOKENS]>> = const { RefCell::new(Vec::new()) };
}

/// Checked arguments. Rows of `q` and `out` have `heads * head_dim` channels.
pub(super) struct Attention<'a> {
    pub(super) pool: &'a CpuPool,
    pub(super) shape: AttentionShape,
    pub(super) groups: &'a [RowGroup<'a>],
    pub(super) q: &'a [f32],
}

/// Rows `first..first + rows` of a group, for one KV head.
#[derive(Clone, Copy)]
struct Item {
    group: usize,
    kv_head: usize,
    first: usize,
    rows: usize,
}

/// Computes attention for all rows of all groups.
pub(super) fn attention(
    isa: Isa,
    workers: &Workers,
    job: &Attention<'_>,
    out: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    let per_kv = job.shape.heads / job.shape.kv_heads;
    let step = (ITEM_PAIRS / per_kv).max(1);
    let mut items = Vec::new();
    for (group, rows) in job.groups.iter().enumerate() {
        // The last rows see the most tokens: they go first so that the workers end together.
        for first in (0..rows.rows).step_by(step).rev() {
            for kv_head in 0..job.shape.kv_heads {
                items.push(Item { group, kv_head, first, rows: step.min(rows.rows - first) });
            }
        }
    }
    let out = Disjoint::new(out);
    let lse = lse.map(Disjoint::new);
    workers.run(items.len(), &|item| {
        SCORES.with_borrow_mut(|scores| {
            dispatch(isa, Run { job, item: items[item], scores, out: &out, lse: lse.as_ref() });
        });
    });
}

struct Run<'a> {
    job: &'a Attention<'a>,
    item: Item,
    scores: &'a mut Vec<[f32; PAGE_TOKENS]>,
    out: &'a Disjoint<'a, f32>,
    lse: Option<&'a Disjoint<'a, f32>>,
}

/// One (row, head): where it lies and which tokens it sees.
#[derive(Clone, Copy)]
struct Pair<'a> {
    q: &'a [f32],
    row: usize,
    head: usize,
    /// The first token it sees.
    from: usize,
    /// One past the last.
    tokens: usize,
}

/// The pages that the pairs of a tile see, and the place of the first one in the sequence.
#[derive(Clone, Copy)]
struct Span<'a> {
    table: &'a [PageId],
    first: usize,
}

impl Span<'_> {
    /// Place in the sequence and id of each page.
    #[inline(always)]
    fn pages(&self) -> impl Iterator<Item = (usize, PageId)> {
        (self.first..).zip(self.table.iter().copied())
    }
}

impl Pair<'_> {
    /// Tokens at the front of page `page` that it does not see: they lie before its window.
    #[inline(always)]
    fn hidden(&self, page: usize) -> usize {
        self.from.saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS)
    }

    /// Tokens of page `page` up to its last.
    #[inline(always)]
    fn seen(&self, page: usize) -> usize {
        self.tokens.saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS)
    }
}

impl Kernel for Run<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        let per_kv = self.job.shape.heads / self.job.shape.kv_heads;
        let total = self.item.rows * per_kv;
        let tiles = total.div_ceil(L::Wide::PAIRS);
        for tile in 0..tiles {
            let (first, end) = (tile * total / tiles, (tile + 1) * total / tiles);
            match end - first {
                1 => self.pairs::<L, 1>(l, first),
                2 => self.pairs::<L, 2>(l, first),
                3 => self.pairs::<L, 3>(l, first),
                4 => self.pairs::<L, 4>(l, first),
                5 => self.pairs::<L, 5>(l, first),
                6 => self.pairs::<L, 6>(l, first),
                count if L::Wide::PAIRS > 6 => match count {
                    7 => self.pairs::<L, 7>(l, first),
                    8 => self.pairs::<L, 8>(l, first),
                    9 => self.pairs::<L, 9>(l, first),
                    10 => self.pairs::<L, 10>(l, first),
                    11 => self.pairs::<L, 11>(l, first),
                    _ => self.pairs::<L, 12>(l, first),
                },
                _ => {}
            }
        }
    }
}

impl Run<'_> {
    #[inline(always)]
    fn pairs<L: Lanes, const N: usize>(&mut self, l: L, first: usize) {
        let (job, item) = (self.job, self.item);
        let AttentionShape { heads, kv_heads, head_dim, .. } = job.shape;
        let group = &job.groups[item.group];
        let pairs: [Pair<'_>; N] = std::array::from_fn(|n| {
            let (row, head) = ((first + n) / (heads / kv_heads), (first + n) % (heads / kv_heads));
            let head = item.kv_head * (heads / kv_heads) + head;
            let at = ((group.first_row + item.first + row) * heads + head) * head_dim;
            let token = group.start + item.first + row;
            let (from, tokens) = (job.shape.first_seen(token), token + 1);
            Pair { q: &job.q[at..at + head_dim], row: group.first_row + item.first + row, head, from, tokens }
        });
        let first_page = pairs[0].from / PAGE_TOKENS;
        let table = &group.tables[item.kv_head][first_page..pairs[N - 1].tokens.div_ceil(PAGE_TOKENS)];
        let (pages, span) = (table.len(), Span { table, first: first_page });
        if self.scores.len() < pages * N {
            self.scores.resize(pages * N, [0.0; PAGE_TOKENS]);
        }
        let scores = &mut self.scores[..pages * N];
        let maxima = score_pass(l, job, span, &pairs, scores);
        let sums = weight_pass(l, span, &pairs, maxima, scores);
        let values = Values { job, span, pairs: &pairs, weights: scores, sums, out: self.out };
        for channel in (0..head_dim / LANES).step_by(2) {
            values.two(l.wide(), channel);
        }
        if let Some(lse) = self.lse {
            for ((pair, max), sum) in pairs.iter().zip(maxima).zip(sums) {
                let value = f64::from(max) + libm::log(f64::from(sum));
                // SAFETY: a (row, head) belongs to one item.
                unsafe { lse.slice(pair.row * heads + pair.head, 1) }.fill(value as f32);
            }
        }
    }
}

/// `v` with `other` in its first `count` lanes. Only a page that a window begins in needs it.
#[inline(always)]
fn drop_first<L: Lanes>(l: L, v: L::F, count: usize, other: f32) -> L::F {
    if count == 0 {
        return v;
    }
    let mut lanes = [0.0; LANES];
    l.store(v, &mut lanes);
    lanes[..count.min(LANES)].fill(other);
    l.load(&lanes)
}

/// Scaled scores of all keys, `[page][pair][slot]`, minus infinity where a pair may not look; and their maxima.
#[inline(always)]
fn score_pass<L: Lanes, const N: usize>(
    l: L,
    job: &Attention<'_>,
    span: Span<'_>,
    pairs: &[Pair<'_>; N],
    scores: &mut [[f32; PAGE_TOKENS]],
) -> [f32; N] {
    let w = l.wide();
    let scale = w.splat(job.shape.scale);
    let mut maxima = [w.splat(f32::NEG_INFINITY); N];
    for ((page, id), scores) in span.pages().zip(scores.chunks_exact_mut(N)) {
        let keys = job.pool.page(id).0.as_chunks::<LANES>().0.as_chunks::<2>().0;
        let mut queries = [&[0.0f32; 0][..]; N];
        for n in 0..N {
            queries[n] = &pairs[n].q[..keys.len()];
        }
        let mut sums = [w.splat(0.0); N];
        for (channel, keys) in keys.iter().enumerate() {
            let keys = w.load_f16(keys);
            for n in 0..N {
                sums[n] = w.fma(w.splat(queries[n][channel]), keys, sums[n]);
            }
        }
        for n in 0..N {
            let mut score = w.mul(sums[n], scale);
            let out = pair_of(&mut scores[n]);
            w.store(score, out);
            let (hidden, seen) = (pairs[n].hidden(page), pairs[n].seen(page));
            if hidden > 0 || seen < PAGE_TOKENS {
                scores[n][..hidden].fill(f32::NEG_INFINITY);
                scores[n][seen..].fill(f32::NEG_INFINITY);
                score = w.load(pair_of(&mut scores[n]));
            }
            maxima[n] = w.max(score, maxima[n]);
        }
    }
    let mut out = [f32::NEG_INFINITY; N];
    for n in 0..N {
        let mut lanes = [[0.0; LANES]; 2];
        w.store(maxima[n], &mut lanes);
        out[n] = lanes.into_iter().flatten().fold(out[n], |a, b| if b > a { b } else { a });
    }
    out
}

/// A page's scores as two vectors.
#[inline(always)]
fn pair_of(scores: &mut [f32; PAGE_TOKENS]) -> &mut [[f32; LANES]; 2] {
    const { assert!(PAGE_TOKENS == 2 * LANES) };
    // SAFETY: both are the same sixteen values.
    unsafe { &mut *std::ptr::from_mut(scores).cast() }
}

/// Turns scores into weights `exp(score - max)` (zero where a pair may not look); returns their sums.
#[inline(always)]
fn weight_pass<L: Lanes, const N: usize>(
    l: L,
    span: Span<'_>,
    pairs: &[Pair<'_>; N],
    maxima: [f32; N],
    scores: &mut [[f32; PAGE_TOKENS]],
) -> [f32; N] {
    let mut sums = [[l.splat(0.0); 2]; N];
    for (page, scores) in (span.first..).zip(scores.chunks_exact_mut(N)) {
        for n in 0..N {
            let hidden = pairs[n].hidden(page);
            let (seen, max) = (pairs[n].seen(page), l.splat(maxima[n]));
            for (half, score) in scores[n].as_chunks_mut().0.iter_mut().enumerate() {
                let weight = exp(l, l.sub(l.load(score), max));
                let weight = l.keep_first(weight, seen.saturating_sub(half * LANES), 0.0);
                let weight = drop_first(l, weight, hidden.saturating_sub(half * LANES), 0.0);
                sums[n][half] = l.add(sums[n][half], weight);
                l.store(weight, score);
            }
        }
    }
    let mut out = [0.0; N];
    for n in 0..N {
        let mut lanes = [[0.0; LANES]; 2];
        l.store(sums[n][0], &mut lanes[0]);
        l.store(sums[n][1], &mut lanes[1]);
        out[n] = lanes.iter().flatten().sum();
    }
    out
}

/// Weighted values of the tokens, divided by the sums.
struct Values<'a, const N: usize> {
    job: &'a Attention<'a>,
    span: Span<'a>,
    pairs: &'a [Pair<'a>; N],
    weights: &'a [[f32; PAGE_TOKENS]],
    sums: [f32; N],
    out: &'a Disjoint<'a, f32>,
}

/// Two vectors of a token's value; zeros behind the last one.
#[inline(always)]
fn two_of(row: &[[u16; LANES]], channel: usize) -> [[u16; LANES]; 2] {
    match row[channel..].first_chunk::<2>() {
        Some(two) => *two,
        None => [row[channel], [0; LANES]],
    }
}

impl<const N: usize> Values<'_, N> {
    /// Two vectors of channels, from vector `channel` on.
    #[inline(always)]
    fn two<W: Wide>(&self, w: W, channel: usize) {
        let dim = self.job.shape.head_dim;
        let mut totals = [w.splat(0.0); N];
        for ((page, id), weights) in self.span.pages().zip(self.weights.as_chunks::<N>().0) {
            let rows = self.job.pool.page(id).1.chunks_exact(dim).enumerate();
            let mut all_see = true;
            for n in 0..N {
                all_see &= self.pairs[n].seen(page) == PAGE_TOKENS && self.pairs[n].hidden(page) == 0;
            }
            if all_see {
                for (slot, row) in rows {
                    let value = w.load_f16(&two_of(row.as_chunks().0, channel));
                    for n in 0..N {
                        totals[n] = w.fma(w.splat(weights[n][slot]), value, totals[n]);
                    }
                }
                continue;
            }
            for (slot, row) in rows {
                let value = w.load_f16(&two_of(row.as_chunks().0, channel));
                for n in 0..N {
                    // A slot that a pair may not look at can hold anything, NaN included: it is skipped.
                    if (self.pairs[n].hidden(page)..self.pairs[n].seen(page)).contains(&slot) {
                        totals[n] = w.fma(w.splat(weights[n][slot]), value, totals[n]);
                    }
                }
            }
        }
        for (n, total) in totals.into_iter().enumerate() {
            let mut values = [[0.0; LANES]; 2];
            w.store(w.div(total, w.splat(self.sums[n])), &mut values);
            self.put(n, channel, &values.as_flattened()[..(dim - channel * LANES).min(2 * LANES)]);
        }
    }

    /// Writes channels of pair `n`.
    #[inline(always)]
    fn put(&self, n: usize, channel: usize, values: &[f32]) {
        let AttentionShape { heads, head_dim, .. } = self.job.shape;
        let at = (self.pairs[n].row * heads + self.pairs[n].head) * head_dim + channel * LANES;
        // SAFETY: a (row, head) belongs to one item, and its channels to one pass.
        unsafe { self.out.slice(at, values.len()) }.copy_from_slice(values);
    }
}
