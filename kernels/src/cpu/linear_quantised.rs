//! The quantised half of [`super::linear`]: packed weights times int8 activations.
//!
//! Few rows of `x`: the weights are taken apart in registers, bound by reading them. Many rows: a pair
//! of groups is expanded to bytes for a panel of rows, a few blocks at a time, so that the inner loop
//! is loads, multiplies and adds. Both end in [`add_block`].
#![expect(clippy::needless_range_loop, reason = "tiles are walked by index so that they stay in registers")]

use std::ops::Range;

use super::lanes::{Kernel, LANES, Lanes};
use super::linear::{DIRECT_ROWS, Product, finish};
use super::packing::{BLOCK, Codes, Packing, STEP_BYTES, STEPS, Scales, with_packing};
use super::quantise::{Activations, CHUNK_BLOCKS, PANEL_ROWS, TILE, Tile, tiles};
use super::workers::Disjoint;
use crate::formats::TensorType;

/// Groups expanded together, so that a broadcast activation serves both.
const PANEL_GROUPS: usize = 2;
/// Pairs of groups that a panel's item covers: the activations of a chunk serve them one after the other.
const ITEM_PAIRS: usize = 4;
/// Groups that a panel's item covers.
pub(super) const ITEM_GROUPS: usize = ITEM_PAIRS * PANEL_GROUPS;
/// Tiles of a panel.
const PANEL_TILES: usize = PANEL_ROWS / TILE;
/// How far ahead weights are asked for.
const PREFETCH: usize = 2048;

/// Some groups of a quantised matrix for some rows of `x`.
pub(super) struct QuantisedJob<'a> {
    pub(super) format: TensorType,
    pub(super) bytes: &'a [u8],
    pub(super) job: &'a Product<'a>,
    pub(super) acts: &'a Activations,
    pub(super) out: &'a Disjoint<'a, f32>,
    pub(super) groups: Range<usize>,
    pub(super) rows: Range<usize>,
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
        if self.job.rows > DIRECT_ROWS {
            self.panel::<L, P>(l);
            return;
        }
        for group in self.groups.clone() {
            for tile in tiles(self.rows.start, self.rows.end) {
                match self.acts.shape.width {
                    1 => self.direct::<L, P, 1>(l, group, tile),
                    _ => self.direct::<L, P, TILE>(l, group, tile),
                }
            }
        }
    }

    /// The bytes of a group; none past the last one.
    #[inline(always)]
    fn group<P: Packing>(&self, group: usize) -> &[u8] {
        let len = P::LAYOUT.group_bytes(self.job.matrix.cols);
        self.bytes.get(group * len..(group + 1) * len).unwrap_or_default()
    }

    /// One group times one tile, codes taken apart on the way.
    #[inline(always)]
    fn direct<L: Lanes, P: Packing, const T: usize>(&self, l: L, group: usize, tile: Tile) {
        let bytes = self.group::<P>(group);
        let words = self.acts.shape.words * T;
        let mut sums = [[l.splat(0.0); T]; 1];
        // A panel of one tile: its chunks follow each other.
        for (chunk, spans) in bytes.chunks(CHUNK_BLOCKS / P::LAYOUT.span * P::LAYOUT.span_bytes()).enumerate()
        {
            let (quads, meta) = self.acts.part(tile, chunk * CHUNK_BLOCKS);
            let mut streams = quads.chunks_exact(STEPS * T).zip(meta.chunks_exact(words));
            for span in spans.chunks_exact(P::LAYOUT.span_bytes()) {
                let (header, blocks) = span.split_at(P::LAYOUT.header);
                for (block, (quads, meta)) in blocks.chunks_exact(P::LAYOUT.block_bytes()).zip(&mut streams) {
                    for line in 0..P::LAYOUT.block_bytes().div_ceil(64) {
                        l.prefetch(block, PREFETCH + 64 * line);
                    }
                    let (codes, raw) = block.split_at(P::LAYOUT.code_bytes);
                    let [one, two] = P::Scales::scales(l, header, raw);
                    let second = if P::LAYOUT.affine { P::Scales::minima(l, header, raw) } else { two };
                    let block = InRegisters::<L> { steps: P::Codes::steps(l, codes), scales: [one, second] };
                    add_block::<L, P, _, T, 1>(l, &block, quads, meta, &mut sums);
                }
            }
        }
        for (row, &sum) in (tile.first..tile.first + tile.rows).zip(&sums[0]) {
            finish(l, self.job, self.out, group, row, sum);
        }
    }

    /// Some pairs of groups times a panel of rows, chunk by chunk.
    #[inline(always)]
    fn panel<L: Lanes, P: Packing>(&self, l: L) {
        let mut weights = Expanded::new();
        let mut sums = [[[[[0.0f32; LANES]; TILE]; PANEL_GROUPS]; PANEL_TILES]; ITEM_PAIRS];
        let pairs = || self.groups.clone().step_by(PANEL_GROUPS);
        let tiles = || tiles(self.rows.start, self.rows.end);
        for first in (0..self.job.matrix.cols / BLOCK).step_by(CHUNK_BLOCKS) {
            let count = self.acts.shape.chunk(first);
            for (group, sums) in pairs().zip(&mut sums) {
                for g in 0..PANEL_GROUPS {
                    weights.fill::<L, P>(l, self.group::<P>(group + g), g, first, count);
                }
                for (tile, sums) in tiles().zip(sums) {
                    self.tile::<L, P>(l, &weights.blocks[..count], first, tile, sums);
                }
            }
        }
        for (group, sums) in pairs().zip(&sums) {
            for (tile, sums) in tiles().zip(sums) {
                for (group, sums) in (group..self.groups.end).zip(sums) {
                    for (row, sum) in (tile.first..tile.first + tile.rows).zip(sums) {
                        finish(l, self.job, self.out, group, row, l.load(sum));
                    }
                }
            }
        }
    }

    /// Adds a chunk of expanded blocks, block `first` of the row and on, to the sums of one tile.
    #[inline(always)]
    fn tile<L: Lanes, P: Packing>(
        &self,
        l: L,
        blocks: &[ExpandedBlock],
        first: usize,
        tile: Tile,
        sums: &mut [[[f32; LANES]; TILE]; PANEL_GROUPS],
    ) {
        let (quads, meta) = self.acts.part(tile, first);
        let quads = quads.as_chunks::<{ STEPS * TILE }>().0;
        let meta = meta.chunks_exact(self.acts.shape.words * TILE);
        let mut acc = [[l.splat(0.0); TILE]; PANEL_GROUPS];
        for g in 0..PANEL_GROUPS {
            for t in 0..TILE {
                acc[g][t] = l.load(&sums[g][t]);
            }
        }
        for ((block, quads), meta) in blocks.iter().zip(quads).zip(meta) {
            add_block::<L, P, _, TILE, PANEL_GROUPS>(l, block, quads, meta, &mut acc);
        }
        for g in 0..PANEL_GROUPS {
            for t in 0..TILE {
                l.store(acc[g][t], &mut sums[g][t]);
            }
        }
    }
}

/// A block of `G` groups as [`add_block`] reads it.
trait Block<L: Lanes> {
    /// Step `j` of group `g`.
    fn step(&self, l: L, g: usize, j: usize) -> L::B;
    /// Scale `i` of group `g`; the second is the minimum where the format has one.
    fn scale(&self, l: L, g: usize, i: usize) -> L::F;
}

/// One group, taken apart.
struct InRegisters<L: Lanes> {
    steps: [L::B; STEPS],
    scales: [L::F; 2],
}

impl<L: Lanes> Block<L> for InRegisters<L> {
    #[inline(always)]
    fn step(&self, _l: L, _g: usize, j: usize) -> L::B {
        self.steps[j]
    }

    #[inline(always)]
    fn scale(&self, _l: L, _g: usize, i: usize) -> L::F {
        self.scales[i]
    }
}

/// A pair of groups with one byte per code and f32 scales.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct ExpandedBlock {
    steps: [[[u8; STEP_BYTES]; PANEL_GROUPS]; STEPS],
    scales: [[[f32; LANES]; 2]; PANEL_GROUPS],
}

impl<L: Lanes> Block<L> for ExpandedBlock {
    #[inline(always)]
    fn step(&self, l: L, g: usize, j: usize) -> L::B {
        l.load_bytes(&self.steps[j][g])
    }

    #[inline(always)]
    fn scale(&self, l: L, g: usize, i: usize) -> L::F {
        l.load(&self.scales[g][i])
    }
}

/// Some blocks of a pair of groups.
struct Expanded {
    blocks: [ExpandedBlock; CHUNK_BLOCKS],
}

impl Expanded {
    #[inline(always)]
    fn new() -> Self {
        let zero = ExpandedBlock {
            steps: [[[0; STEP_BYTES]; PANEL_GROUPS]; STEPS],
            scales: [[[0.0; LANES]; 2]; PANEL_GROUPS],
        };
        Self { blocks: [zero; CHUNK_BLOCKS] }
    }

    /// Expands `count` blocks of a group from block `first` on (a multiple of the span) as group `g`.
    #[inline(always)]
    fn fill<L: Lanes, P: Packing>(&mut self, l: L, group: &[u8], g: usize, first: usize, count: usize) {
        let layout = P::LAYOUT;
        let spans =
            group.chunks_exact(layout.span_bytes()).skip(first / layout.span).take(count / layout.span);
        let mut targets = self.blocks.iter_mut();
        for span in spans {
            let (header, blocks) = span.split_at(layout.header);
            for (block, target) in blocks.chunks_exact(layout.block_bytes()).zip(&mut targets) {
                let (codes, raw) = block.split_at(layout.code_bytes);
                for (step, out) in P::Codes::steps(l, codes).into_iter().zip(&mut target.steps) {
                    l.store_bytes(step, &mut out[g]);
                }
                let [one, two] = P::Scales::scales(l, header, raw);
                let second = if layout.affine { P::Scales::minima(l, header, raw) } else { two };
                l.store(one, &mut target.scales[g][0]);
                l.store(second, &mut target.scales[g][1]);
            }
        }
    }
}

/// Adds the products of one block of `G` groups to the sums of a tile of `T` rows: the one place where
/// quantised numbers meet, for every path.
#[inline(always)]
fn add_block<L: Lanes, P: Packing, B: Block<L>, const T: usize, const G: usize>(
    l: L,
    block: &B,
    quads: &[[u8; 4]],
    meta: &[u32],
    sums: &mut [[L::F; T]; G],
) {
    let (subs, run) = (P::Scales::SUBS, P::RUN);
    let (quads, meta) = (&quads[..STEPS * T], &meta[..(1 + subs) * T]);
    for sub in 0..subs {
        let mut start = [l.zero_i16(); T];
        if P::OFFSET != 0 {
            for t in 0..T {
                start[t] = l.splat_i16_pair(meta[(1 + sub) * T + t]);
            }
        }
        let (first, end) = (sub * STEPS / subs, (sub + 1) * STEPS / subs);
        let mut totals = [[l.splat_i32(0); T]; G];
        add_run::<L, P, B, T, G>(l, block, quads, first, start, &mut totals);
        for next in (first + run..end).step_by(run) {
            add_run::<L, P, B, T, G>(l, block, quads, next, [l.zero_i16(); T], &mut totals);
        }
        for g in 0..G {
            let scale = block.scale(l, g, sub);
            for t in 0..T {
                let scaled = l.mul(l.to_f32(totals[g][t]), scale);
                sums[g][t] = l.fma(scaled, l.splat(f32::from_bits(meta[t])), sums[g][t]);
            }
        }
    }
    if P::Scales::AFFINE {
        for g in 0..G {
            let min = block.scale(l, g, 1);
            for t in 0..T {
                sums[g][t] = l.fma(min, l.splat(f32::from_bits(meta[T + t])), sums[g][t]);
            }
        }
    }
}

/// Adds the products of the run of steps at `first`, as many as fit an i16 sum that begins at `start`.
#[inline(always)]
fn add_run<L: Lanes, P: Packing, B: Block<L>, const T: usize, const G: usize>(
    l: L,
    block: &B,
    quads: &[[u8; 4]],
    first: usize,
    start: [L::H; T],
    totals: &mut [[L::I; T]; G],
) {
    let mut pairs = [start; G];
    for j in first..first + P::RUN {
        add_step::<L, P, B, T, G>(l, block, quads, j, &mut pairs);
    }
    for g in 0..G {
        for t in 0..T {
            totals[g][t] = l.add_i32(totals[g][t], l.sum_pairs(pairs[g][t]));
        }
    }
}

/// Adds the pairwise products of step `j`.
#[inline(always)]
fn add_step<L: Lanes, P: Packing, B: Block<L>, const T: usize, const G: usize>(
    l: L,
    block: &B,
    quads: &[[u8; 4]],
    j: usize,
    pairs: &mut [[L::H; T]; G],
) {
    let mut codes = [block.step(l, 0, j); G];
    for (g, codes) in codes.iter_mut().enumerate().skip(1) {
        *codes = block.step(l, g, j);
    }
    for t in 0..T {
        let values = l.splat_quad(&quads[j * T + t]);
        for g in 0..G {
            let products = if P::Codes::SIGNED {
                l.dot_signed(codes[g], values)
            } else {
                l.dot_unsigned(codes[g], values)
            };
            pairs[g][t] = l.add_i16(pairs[g][t], products);
        }
    }
    if T > 1 {
        for g in 0..G {
            for t in 0..T {
                pairs[g][t] = l.pin_i16(pairs[g][t]);
            }
        }
    }
}
