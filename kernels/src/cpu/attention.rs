//! `attention`: causal attention of rows over the pages of their sequence.
//!
//! Two passes per (row, head). Scores: a lane owns a key and walks the channels in order. Values: a
//! lane owns a channel and walks the tokens in order. The softmax denominator is kept in 16 partial
//! sums by token index modulo 16, which is the slot in the page, and merged in slot order. A few (row, head)
//! pairs of one KV head are walked together so that K and V are converted once for all of them; the
//! sums of a pair do not notice. A window only moves the first page and masks what lies before it.
//!
//! A context is walked in partitions of [`PART_PAGES`] pages, cut at fixed places of the sequence and merged in order by
//! their log-sum-exps, so that a partition's keys, values and scores stay in the cache. Where one row has a long context,
//! its partitions are items of their own and merged afterwards by the same operations.

use std::cell::RefCell;

use super::exp::exp;
use super::lanes::{Kernel, LANES, Lanes, Wide};
use super::pages::{Element, PagesOf};
use super::workers::{Disjoint, Workers};
use super::{Isa, lanes::dispatch};
use crate::backend::{AttentionShape, PAGE_TOKENS, PageId, RowGroup, SCALE_BLOCK};

/// (row, head) pairs of an item, roughly.
const ITEM_PAIRS: usize = 48;

/// Pages of a partition.
const PART_PAGES: usize = 32;
/// Tokens of a partition.
const PART_TOKENS: usize = PART_PAGES * PAGE_TOKENS;

const _: () = assert!(PAGE_TOKENS == 2 * LANES, "a page is two vectors of keys");

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch::new()) };
}

/// What a thread needs for one tile of pairs.
struct Scratch {
    /// The queries, `[channel][pair]`.
    queries: Vec<f32>,
    /// Scores of a partition, `[page][pair][slot]`.
    scores: Vec<[f32; PAGE_TOKENS]>,
    /// Weighted values of a partition and of those before it, `[pair][channel]`.
    part: Vec<f32>,
    merged: Vec<f32>,
}

impl Scratch {
    const fn new() -> Self {
        Self { queries: Vec::new(), scores: Vec::new(), part: Vec::new(), merged: Vec::new() }
    }

    /// Makes room for `pairs` pairs.
    fn reset(&mut self, pairs: usize, head_dim: usize) {
        self.scores.resize(PART_PAGES * pairs, [0.0; PAGE_TOKENS]);
        self.part.resize(pairs * head_dim, 0.0);
        self.merged.resize(pairs * head_dim, 0.0);
    }
}

/// The softmax of some partitions of one (row, head): the largest score and the sum of the weights relative to it. The
/// weighted values are kept beside it.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    sum: f32,
}

/// Adds a partition to those before it: both sums are scaled to the larger maximum. (Rabe & Staats, "Self-attention Does
/// Not Need O(n^2) Memory", 2021, section 3.)
#[inline(always)]
fn merge<L: Lanes>(
    l: L,
    before: Option<Softmax>,
    merged: &mut [f32],
    part: Softmax,
    values: &[f32],
) -> Softmax {
    let Some(before) = before else {
        merged.copy_from_slice(values);
        return part;
    };
    let max = if part.max > before.max { part.max } else { before.max };
    let factor = |of: Softmax| exp(l, l.splat(of.max - max));
    let (old, new) = (factor(before), factor(part));
    for (merged, value) in merged.as_chunks_mut().0.iter_mut().zip(values.as_chunks().0) {
        l.store(l.fma(l.load(value), new, l.mul(l.load(merged), old)), merged);
    }
    let mut sum = [0.0; LANES];
    l.store(l.fma(l.splat(part.sum), new, l.mul(l.splat(before.sum), old)), &mut sum);
    Softmax { max, sum: sum[0] }
}

/// Checked arguments. Rows of `q` and `out` have `heads * head_dim` channels.
pub(super) struct Attention<'a, E: Element> {
    pub(super) pages: &'a PagesOf<E>,
    pub(super) shape: AttentionShape,
    pub(super) groups: &'a [RowGroup<'a>],
    pub(super) q: &'a [f32],
}

/// Rows `first..first + rows` of a group, for one KV head; one partition alone where `part` says so.
#[derive(Clone, Copy)]
struct Item {
    group: usize,
    kv_head: usize,
    first: usize,
    rows: usize,
    part: Option<Part>,
}

/// A partition that is an item, and where its pairs' results go.
#[derive(Clone, Copy)]
struct Part {
    index: usize,
    slot: usize,
}

/// Computes attention for all rows of all groups.
pub(super) fn attention<E: Element>(
    isa: Isa,
    workers: &Workers,
    job: &Attention<'_, E>,
    out: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    let shape = job.shape;
    let per_kv = shape.heads / shape.kv_heads;
    let step = (ITEM_PAIRS / per_kv).max(1);
    let (mut items, mut split, mut slots) = (Vec::new(), Vec::new(), 0);
    for (group, rows) in job.groups.iter().enumerate() {
        let parts =
            shape.first_seen(rows.start) / PART_TOKENS..(rows.start + rows.rows).div_ceil(PART_TOKENS);
        for kv_head in 0..shape.kv_heads {
            if rows.rows == 1 && parts.len() > 1 {
                let item = Item { group, kv_head, first: 0, rows: 1, part: None };
                split.push(Split { item, first_slot: slots, parts: parts.len() });
                for index in parts.clone() {
                    items.push(Item { part: Some(Part { index, slot: slots }), ..item });
                    slots += per_kv;
                }
                continue;
            }
            // The last rows see the most tokens: they go first so that the workers end together.
            for first in (0..rows.rows).step_by(step).rev() {
                items.push(Item { group, kv_head, first, rows: step.min(rows.rows - first), part: None });
            }
        }
    }
    let width = shape.head_dim + 2;
    let mut partial = vec![0.0; slots * width];
    let partial = Disjoint::new(&mut partial);
    let out = Disjoint::new(out);
    let lse = lse.map(Disjoint::new);
    let to = Target { out: &out, lse: lse.as_ref(), partial: &partial };
    workers.run(items.len(), &|item| {
        SCRATCH.with_borrow_mut(|scratch| dispatch(isa, Run { job, item: items[item], scratch, to }));
    });
    workers.run(split.len(), &|item| {
        SCRATCH.with_borrow_mut(|scratch| dispatch(isa, Merge { job, split: split[item], scratch, to }));
    });
}

/// Where results go.
#[derive(Clone, Copy)]
struct Target<'a> {
    out: &'a Disjoint<'a, f32>,
    lse: Option<&'a Disjoint<'a, f32>>,
    /// Partitions that are items: for each pair of each the maximum, the sum and the weighted values.
    partial: &'a Disjoint<'a, f32>,
}

impl Target<'_> {
    /// Writes the result of one (row, head).
    #[inline(always)]
    fn put<L: Lanes>(&self, l: L, shape: AttentionShape, pair: &Pair<'_>, softmax: Softmax, values: &[f32]) {
        let at = pair.row * shape.heads + pair.head;
        // SAFETY: a (row, head) belongs to one item.
        let out = unsafe { self.out.slice(at * shape.head_dim, shape.head_dim) };
        for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values.as_chunks().0) {
            l.store(l.div(l.load(value), l.splat(softmax.sum)), out);
        }
        if let Some(lse) = self.lse {
            let value = f64::from(softmax.max) + libm::log(f64::from(softmax.sum));
            // SAFETY: as above.
            unsafe { lse.slice(at, 1) }.fill(value as f32);
        }
    }
}

/// A row whose partitions were items, for one KV head.
#[derive(Clone, Copy)]
struct Split {
    item: Item,
    first_slot: usize,
    parts: usize,
}

/// Merges the partitions of a row.
struct Merge<'a, E: Element> {
    job: &'a Attention<'a, E>,
    split: Split,
    scratch: &'a mut Scratch,
    to: Target<'a>,
}

impl<E: Element> Kernel for Merge<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let shape = self.job.shape;
        let (per_kv, width) = (shape.heads / shape.kv_heads, shape.head_dim + 2);
        self.scratch.reset(1, shape.head_dim);
        for index in 0..per_kv {
            let mut softmax = None;
            for part in 0..self.split.parts {
                let slot = self.split.first_slot + part * per_kv + index;
                // SAFETY: the items that wrote it have ended, and this one alone reads it.
                let partial = unsafe { self.to.partial.slice(slot * width, width) };
                if let [max, sum, values @ ..] = partial {
                    let part = Softmax { max: *max, sum: *sum };
                    softmax = Some(merge(l, softmax, &mut self.scratch.merged, part, values));
                }
            }
            if let Some(softmax) = softmax {
                let pair = self.job.pair(self.split.item, index);
                self.to.put(l, shape, &pair, softmax, &self.scratch.merged);
            }
        }
    }
}

struct Run<'a, E: Element> {
    job: &'a Attention<'a, E>,
    item: Item,
    scratch: &'a mut Scratch,
    to: Target<'a>,
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
    /// Whether it sees a token of the span.
    #[inline(always)]
    fn sees(&self, span: Span<'_>) -> bool {
        let first = span.first * PAGE_TOKENS;
        self.from < first + span.table.len() * PAGE_TOKENS && self.tokens > first
    }

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

impl<E: Element> Kernel for Run<'_, E> {
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

impl<'a, E: Element> Attention<'a, E> {
    /// (row, head) pair `index` of an item.
    #[inline(always)]
    fn pair(&self, item: Item, index: usize) -> Pair<'a> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let (row, head) = (index / (heads / kv_heads), index % (heads / kv_heads));
        let head = item.kv_head * (heads / kv_heads) + head;
        let group = &self.groups[item.group];
        let at = ((group.first_row + item.first + row) * heads + head) * head_dim;
        let token = group.start + item.first + row;
        let (from, tokens) = (self.shape.first_seen(token), token + 1);
        Pair { q: &self.q[at..at + head_dim], row: group.first_row + item.first + row, head, from, tokens }
    }
}

impl<E: Element> Run<'_, E> {
    #[inline(always)]
    fn pairs<L: Lanes, const N: usize>(&mut self, l: L, first: usize) {
        let (job, item, dim) = (self.job, self.item, self.job.shape.head_dim);
        let mut pairs = [job.pair(item, first); N];
        for (n, pair) in pairs.iter_mut().enumerate() {
            *pair = job.pair(item, first + n);
        }
        self.scratch.reset(N, dim);
        let mut queries = std::mem::take(&mut self.scratch.queries);
        queries.clear();
        queries.extend((0..dim).flat_map(|channel| pairs.iter().map(move |pair| pair.q[channel])));
        let table = job.groups[item.group].tables[item.kv_head];
        let pages = pairs[0].from / PAGE_TOKENS..pairs[N - 1].tokens.div_ceil(PAGE_TOKENS);
        let parts = match item.part {
            Some(part) => part.index..part.index + 1,
            None => pages.start / PART_PAGES..pages.end.div_ceil(PART_PAGES),
        };
        let mut softmax = [None; N];
        for index in parts {
            let first_page = pages.start.max(index * PART_PAGES);
            let span = Span {
                table: &table[first_page..pages.end.min((index + 1) * PART_PAGES)],
                first: first_page,
            };
            let scores = &mut self.scratch.scores[..span.table.len() * N];
            let maxima = score_pass(l, job, span, &pairs, queries.as_chunks().0, scores);
            let sums = weight_pass(l, span, &pairs, maxima, scores);
            let mut values =
                Values { job, span, pairs: &pairs, weights: scores, out: &mut self.scratch.part };
            for channel in (0..dim / LANES).step_by(2) {
                values.two(l.wide(), channel);
            }
            for n in 0..N {
                let values = &self.scratch.part[n * dim..(n + 1) * dim];
                let part = Softmax { max: maxima[n], sum: sums[n] };
                if let Some(to) = item.part {
                    let width = dim + 2;
                    // SAFETY: a slot belongs to one pair of one item.
                    let partial = unsafe { self.to.partial.slice((to.slot + first + n) * width, width) };
                    if let [max, sum, out @ ..] = partial {
                        (*max, *sum) = (part.max, part.sum);
                        out.copy_from_slice(values);
                    }
                } else if pairs[n].sees(span) {
                    let merged = &mut self.scratch.merged[n * dim..(n + 1) * dim];
                    softmax[n] = Some(merge(l, softmax[n], merged, part, values));
                }
            }
        }
        self.scratch.queries = queries;
        for n in 0..N {
            if let Some(softmax) = softmax[n] {
                self.to.put(l, job.shape, &pairs[n], softmax, &self.scratch.merged[n * dim..(n + 1) * dim]);
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
fn score_pass<L: Lanes, E: Element, const N: usize>(
    l: L,
    job: &Attention<'_, E>,
    span: Span<'_>,
    pairs: &[Pair<'_>; N],
    queries: &[[f32; N]],
    scores: &mut [[f32; PAGE_TOKENS]],
) -> [f32; N] {
    let w = l.wide();
    let scale = w.splat(job.shape.scale);
    let mut maxima = [w.splat(f32::NEG_INFINITY); N];
    for ((page, id), scores) in span.pages().zip(scores.chunks_exact_mut(N)) {
        let keys = job.pages.page(id).0.as_chunks::<LANES>().0.as_chunks::<2>().0;
        let mut sums = [w.splat(0.0); N];
        if E::SCALED {
            let scales = job.pages.scales(id).0.as_chunks::<LANES>().0.as_chunks::<2>().0;
            let blocks = keys.chunks(SCALE_BLOCK).zip(queries.chunks(SCALE_BLOCK));
            for ((keys, queries), scales) in blocks.zip(scales) {
                let scales = w.load(scales);
                for (keys, queries) in keys.iter().zip(queries) {
                    let keys = w.mul(E::load(w, keys), scales);
                    for n in 0..N {
                        sums[n] = w.fma(w.splat(queries[n]), keys, sums[n]);
                    }
                }
            }
        } else {
            for (keys, queries) in keys.iter().zip(queries) {
                let keys = E::load(w, keys);
                for n in 0..N {
                    sums[n] = w.fma(w.splat(queries[n]), keys, sums[n]);
                }
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

/// Weighted values of the tokens of a partition, `[pair][channel]`.
struct Values<'a, E: Element, const N: usize> {
    job: &'a Attention<'a, E>,
    span: Span<'a>,
    pairs: &'a [Pair<'a>; N],
    weights: &'a [[f32; PAGE_TOKENS]],
    out: &'a mut [f32],
}

/// Two vectors of a token's value; zeros behind the last one.
#[inline(always)]
fn two_of<E: Element>(row: &[[E; LANES]], channel: usize) -> [[E; LANES]; 2] {
    match row[channel..].first_chunk::<2>() {
        Some(two) => *two,
        None => [row[channel], [E::ZERO; LANES]],
    }
}

impl<E: Element, const N: usize> Values<'_, E, N> {
    /// Two vectors of a token's value, in its scales where it has some.
    #[inline(always)]
    fn value<W: Wide>(&self, w: W, row: &[E], channel: usize, scales: &[f32]) -> W::F {
        let value = E::load(w, &two_of(row.as_chunks().0, channel));
        if E::SCALED { w.mul(value, w.splat(scales[channel * LANES / SCALE_BLOCK])) } else { value }
    }

    /// Two vectors of channels, from vector `channel` on.
    #[inline(always)]
    fn two<W: Wide>(&mut self, w: W, channel: usize) {
        let (dim, blocks) = (self.job.shape.head_dim, self.job.pages.blocks());
        let mut totals = [w.splat(0.0); N];
        for ((page, id), weights) in self.span.pages().zip(self.weights.as_chunks::<N>().0) {
            let rows = self.job.pages.page(id).1.chunks_exact(dim).enumerate();
            let scales = self.job.pages.scales(id).1;
            let mut all_see = true;
            for n in 0..N {
                all_see &= self.pairs[n].seen(page) == PAGE_TOKENS && self.pairs[n].hidden(page) == 0;
            }
            if all_see {
                for (slot, row) in rows {
                    let value = self.value(w, row, channel, &scales[slot * blocks..]);
                    for n in 0..N {
                        totals[n] = w.fma(w.splat(weights[n][slot]), value, totals[n]);
                    }
                }
                continue;
            }
            for (slot, row) in rows {
                let value = self.value(w, row, channel, &scales[slot * blocks..]);
                for n in 0..N {
                    // A slot that a pair may not look at can hold anything, NaN included: it is skipped.
                    if (self.pairs[n].hidden(page)..self.pairs[n].seen(page)).contains(&slot) {
                        totals[n] = w.fma(w.splat(weights[n][slot]), value, totals[n]);
                    }
                }
            }
        }
        let width = (dim - channel * LANES).min(2 * LANES);
        for (total, out) in totals.into_iter().zip(self.out.chunks_exact_mut(dim)) {
            let mut values = [[0.0; LANES]; 2];
            w.store(total, &mut values);
            out[channel * LANES..][..width].copy_from_slice(&values.as_flattened()[..width]);
        }
    }
}
