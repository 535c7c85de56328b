//! `out = x * weights + bias`: quantised weights times int8 activations, float weights times f32.
//!
//! A lane owns an output row. Within a block the products are summed as integers, exactly; across
//! blocks a row's sum is one chain of fused multiply-adds in block order. How many rows of `x` a call
//! has, how they are tiled and who computes which group changes none of these operations.

use std::ops::Range;

use super::lanes::{Kernel, LANES, Lanes};
use super::matrix::{CpuMatrix, Data};
use super::packing::{BLOCK, Codes, GROUP_ROWS, Packing, STEP_BYTES, STEPS, Scales, with_packing};
use super::quantise::{Activations, QuantiseTile, Sums, TILE, Tile, tiles};
use super::workers::{Disjoint, Workers};
use super::{Isa, lanes::dispatch, linear_float::FloatJob};
use crate::formats::TensorType;

/// Up to this many rows of `x`, weights are taken apart in registers; above, once per panel.
const DIRECT_ROWS: usize = TILE;
/// Rows of `x` that share one expansion of the weights.
const PANEL_ROWS: usize = 64;
/// Blocks expanded at a time: 8 KiB of codes.
const PANEL_BLOCKS: usize = 32;
/// Groups that a panel's item covers.
const PANEL_GROUPS: usize = 8;
/// Weight bytes that an item of a few rows covers.
const DIRECT_BYTES: usize = 64 << 10;
/// How far ahead weights are asked for.
const PREFETCH: usize = 2048;

/// The arguments of a product, checked: `x` is `[rows, cols]`, `out` `[rows, matrix.rows]`.
pub(super) struct Product<'a> {
    pub(super) matrix: &'a CpuMatrix,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) x: &'a [f32],
    pub(super) rows: usize,
}

/// Computes a product.
pub(super) fn linear(
    isa: Isa,
    workers: &Workers,
    scratch: &mut Activations,
    job: &Product<'_>,
    out: &mut [f32],
) {
    let out = Disjoint::new(out);
    match &job.matrix.data {
        Data::Quantised { format, layout, bytes } => {
            quantise(isa, workers, scratch, job, Sums::of(layout));
            let acts = &*scratch;
            split(workers, job, |groups, rows| {
                let part = QuantisedJob { format: *format, bytes, job, acts, out: &out, groups, rows };
                dispatch(isa, part);
            });
        }
        _ => split(workers, job, |groups, rows| dispatch(isa, FloatJob { job, out: &out, groups, rows })),
    }
}

fn quantise(isa: Isa, workers: &Workers, scratch: &mut Activations, job: &Product<'_>, sums: Sums) {
    let cols = job.matrix.cols;
    scratch.reset(job.rows, cols, sums);
    let Activations { codes, meta, .. } = scratch;
    let (codes, meta) = (Disjoint::new(codes), Disjoint::new(meta));
    let all: Vec<Tile> = tiles(0, job.rows).collect();
    workers.run(all.len(), &|item| {
        let kernel = QuantiseTile { x: job.x, cols, tile: all[item], sums, codes: &codes, meta: &meta };
        dispatch(isa, kernel);
    });
}

/// Cuts the output into items of (groups, rows of `x`), by shape alone.
fn split(workers: &Workers, job: &Product<'_>, part: impl Fn(Range<usize>, Range<usize>) + Sync) {
    let all = job.matrix.groups();
    let (per_item, panel) = if job.rows <= DIRECT_ROWS {
        (DIRECT_BYTES.div_ceil(job.matrix.group_bytes().max(1)), DIRECT_ROWS)
    } else {
        (PANEL_GROUPS, PANEL_ROWS)
    };
    let chunks = all.div_ceil(per_item);
    workers.run(chunks * job.rows.div_ceil(panel), &|item| {
        let (chunk, first) = (item % chunks * per_item, item / chunks * panel);
        part(chunk..(chunk + per_item).min(all), first..(first + panel).min(job.rows));
    });
}

/// Writes the sums of a group for row `row` of `x`.
#[inline(always)]
pub(super) fn finish<L: Lanes>(
    l: L,
    job: &Product<'_>,
    out: &Disjoint<'_, f32>,
    group: usize,
    row: usize,
    sum: L::F,
) {
    let (first, width) = (group * GROUP_ROWS, job.matrix.rows);
    let count = GROUP_ROWS.min(width - first);
    let mut values = [0.0; LANES];
    l.store(sum, &mut values);
    if let Some(bias) = job.bias {
        for (value, bias) in values.iter_mut().zip(&bias[first..first + count]) {
            *value += bias;
        }
    }
    // SAFETY: an item owns its groups for its rows.
    unsafe { out.slice(row * width + first, count) }.copy_from_slice(&values[..count]);
}

/// Some groups of a quantised matrix for some rows of `x`.
struct QuantisedJob<'a> {
    format: TensorType,
    bytes: &'a [u8],
    job: &'a Product<'a>,
    acts: &'a Activations,
    out: &'a Disjoint<'a, f32>,
    groups: Range<usize>,
    rows: Range<usize>,
}

impl Kernel for QuantisedJob<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        with_packing!(self.format, P => self.run_packed::<L, P>(l), else ());
    }
}

impl QuantisedJob<'_> {
    #[inline(always)]
    fn run_packed<L: Lanes, P: Packing>(&self, l: L) {
        let group_bytes = P::LAYOUT.group_bytes(self.job.matrix.cols);
        for group in self.groups.clone() {
            let bytes = &self.bytes[group * group_bytes..];
            let own = &bytes[..group_bytes];
            if self.job.rows > DIRECT_ROWS {
                self.panel::<L, P>(l, group, own);
                continue;
            }
            for tile in tiles(self.rows.start, self.rows.end) {
                match tile.count {
                    1 => self.direct::<L, P, 1>(l, group, own, tile),
                    2 => self.direct::<L, P, 2>(l, group, own, tile),
                    3 => self.direct::<L, P, 3>(l, group, own, tile),
                    _ => self.direct::<L, P, 4>(l, group, own, tile),
                }
            }
        }
    }

    /// One group times one tile, codes taken apart on the way: bound by reading the weights.
    #[inline(always)]
    fn direct<L: Lanes, P: Packing, const T: usize>(&self, l: L, group: usize, bytes: &[u8], tile: Tile) {
        let (quads, meta) = self.acts.tile(tile);
        let words = self.acts.words;
        let mut sums = [l.splat(0.0); T];
        let mut streams = quads.chunks_exact(STEPS * T).zip(meta.chunks_exact(words * T));
        for span in bytes.chunks_exact(P::LAYOUT.span_bytes()) {
            let (header, blocks) = span.split_at(P::LAYOUT.header);
            for (block, (quads, meta)) in blocks.chunks_exact(P::LAYOUT.block_bytes()).zip(&mut streams) {
                for line in 0..P::LAYOUT.block_bytes().div_ceil(64) {
                    l.prefetch(block, PREFETCH + 64 * line);
                }
                let (codes, raw) = block.split_at(P::LAYOUT.code_bytes);
                let steps = P::Codes::steps(l, codes);
                let scales = P::Scales::scales(l, header, raw);
                let min = P::Scales::minima(l, header, raw);
                add_block::<L, P, T>(l, &steps, scales, min, quads, meta, &mut sums);
            }
        }
        for (i, &sum) in sums.iter().enumerate() {
            finish(l, self.job, self.out, group, tile.first + i, sum);
        }
    }

    /// One group times a panel of rows: the weights are expanded once per chunk of blocks.
    #[inline(always)]
    fn panel<L: Lanes, P: Packing>(&self, l: L, group: usize, bytes: &[u8]) {
        let mut sums = [[0.0f32; LANES]; PANEL_ROWS];
        let mut expanded = Expanded::new();
        let blocks = self.job.matrix.cols / BLOCK;
        for first in (0..blocks).step_by(PANEL_BLOCKS) {
            let count = PANEL_BLOCKS.min(blocks - first);
            expanded.fill::<L, P>(l, bytes, first, count);
            for tile in tiles(self.rows.start, self.rows.end) {
                let sums = &mut sums[tile.first - self.rows.start..][..tile.count];
                match tile.count {
                    1 => self.expanded::<L, P, 1>(l, &expanded, first, count, tile, sums),
                    2 => self.expanded::<L, P, 2>(l, &expanded, first, count, tile, sums),
                    3 => self.expanded::<L, P, 3>(l, &expanded, first, count, tile, sums),
                    _ => self.expanded::<L, P, 4>(l, &expanded, first, count, tile, sums),
                }
            }
        }
        for (row, sum) in self.rows.clone().zip(&sums) {
            finish(l, self.job, self.out, group, row, l.load(sum));
        }
    }

    /// Adds `count` expanded blocks from block `first` on to the sums of one tile.
    #[inline(always)]
    fn expanded<L: Lanes, P: Packing, const T: usize>(
        &self,
        l: L,
        weights: &Expanded,
        first: usize,
        count: usize,
        tile: Tile,
        sums: &mut [[f32; LANES]],
    ) {
        let (quads, meta) = self.acts.tile(tile);
        let words = self.acts.words;
        let quads = quads[first * STEPS * T..][..count * STEPS * T].chunks_exact(STEPS * T);
        let meta = meta[first * words * T..][..count * words * T].chunks_exact(words * T);
        let mut acc: [L::F; T] = std::array::from_fn(|t| l.load(&sums[t]));
        for (((steps, scales), quads), meta) in weights.steps.iter().zip(&weights.scales).zip(quads).zip(meta)
        {
            let steps: [L::B; STEPS] = std::array::from_fn(|j| l.load_bytes(&steps[j]));
            let both = [l.load(&scales[0]), l.load(&scales[1])];
            add_block::<L, P, T>(l, &steps, both, both[1], quads, meta, &mut acc);
        }
        for (sum, acc) in sums.iter_mut().zip(acc) {
            l.store(acc, sum);
        }
    }
}

/// Blocks of one group with one byte per code and f32 scales; the second scale is the minimum where
/// the format has one.
struct Expanded {
    steps: [[[u8; STEP_BYTES]; STEPS]; PANEL_BLOCKS],
    scales: [[[f32; LANES]; 2]; PANEL_BLOCKS],
}

impl Expanded {
    #[inline(always)]
    fn new() -> Self {
        Self { steps: [[[0; STEP_BYTES]; STEPS]; PANEL_BLOCKS], scales: [[[0.0; LANES]; 2]; PANEL_BLOCKS] }
    }

    /// Expands `count` blocks of a group from block `first` on (a multiple of the span).
    #[inline(always)]
    fn fill<L: Lanes, P: Packing>(&mut self, l: L, group: &[u8], first: usize, count: usize) {
        let layout = P::LAYOUT;
        let spans =
            group.chunks_exact(layout.span_bytes()).skip(first / layout.span).take(count / layout.span);
        let mut targets = self.steps.iter_mut().zip(&mut self.scales);
        for span in spans {
            let (header, blocks) = span.split_at(layout.header);
            for (block, (steps, scales)) in blocks.chunks_exact(layout.block_bytes()).zip(&mut targets) {
                let (codes, raw) = block.split_at(layout.code_bytes);
                for (step, out) in P::Codes::steps(l, codes).into_iter().zip(steps) {
                    l.store_bytes(step, out);
                }
                let [one, two] = P::Scales::scales(l, header, raw);
                l.store(one, &mut scales[0]);
                l.store(if layout.affine { P::Scales::minima(l, header, raw) } else { two }, &mut scales[1]);
            }
        }
    }
}

/// Adds the products of one block to the sums of a tile of `T` rows: the one place where quantised
/// numbers meet, for every path.
#[inline(always)]
fn add_block<L: Lanes, P: Packing, const T: usize>(
    l: L,
    steps: &[L::B; STEPS],
    scales: [L::F; 2],
    min: L::F,
    quads: &[[u8; 4]],
    meta: &[u32],
    sums: &mut [L::F; T],
) {
    let (subs, run) = (P::Scales::SUBS, P::Codes::RUN);
    let (quads, meta) = (&quads[..STEPS * T], &meta[..(1 + subs) * T]);
    for sub in 0..subs {
        let mut totals: [L::I; T] = std::array::from_fn(|t| match P::OFFSET {
            0 => l.splat_i32(0),
            _ => l.splat_i32(meta[(1 + sub) * T + t] as i32),
        });
        for start in (sub * STEPS / subs..(sub + 1) * STEPS / subs).step_by(run) {
            let mut pairs: [L::H; T] =
                std::array::from_fn(|t| dot::<L, P>(l, steps[start], &quads[start * T + t]));
            for j in start + 1..start + run {
                for t in 0..T {
                    pairs[t] = l.add_i16(pairs[t], dot::<L, P>(l, steps[j], &quads[j * T + t]));
                }
            }
            for t in 0..T {
                totals[t] = l.add_i32(totals[t], l.sum_pairs(pairs[t]));
            }
        }
        for t in 0..T {
            let scaled = l.mul(l.to_f32(totals[t]), scales[sub]);
            sums[t] = l.fma(scaled, l.splat(f32::from_bits(meta[t])), sums[t]);
        }
    }
    if P::Scales::AFFINE {
        for t in 0..T {
            sums[t] = l.fma(min, l.splat(f32::from_bits(meta[T + t])), sums[t]);
        }
    }
}

#[inline(always)]
fn dot<L: Lanes, P: Packing>(l: L, codes: L::B, quad: &[u8; 4]) -> L::H {
    if P::Codes::SIGNED {
        l.dot_signed(codes, l.splat_quad(quad))
    } else {
        l.dot_unsigned(codes, l.splat_quad(quad))
    }
}
