//! The quantised half of [`super::linear`]: packed weights times int8 activations.
//!
//! Few rows of `x`: the weights are taken apart in registers, bound by reading them. Many rows: a pair
//! of groups is expanded to bytes for a panel of rows, a few blocks at a time, so that the inner loop
//! is loads, multiplies and adds. [`add_block`] and [`add_wide`] are the same operations in the same order.
#![expect(clippy::needless_range_loop, reason = "tiles are walked by index so that they stay in registers")]

use std::ops::Range;

use super::lanes::{Kernel, LANES, Lanes, Wide};
use super::linear::{DIRECT_ROWS, Product, finish};
use super::packing::{BLOCK, Codes, Packing, STEP_BYTES, STEPS, Scales, with_packing};
use super::quantise::{Activations, CHUNK_BLOCKS, PANEL_ROWS, Part, TILE, Tile, tiles};
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
/// Flags of a tile whose rows all have a second digit.
const ALL: u8 = (1 << TILE) - 1;
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
        let mut sums = [l.splat(0.0); T];
        // A panel of one tile: its chunks follow each other.
        for (chunk, spans) in bytes.chunks(CHUNK_BLOCKS / P::LAYOUT.span * P::LAYOUT.span_bytes()).enumerate()
        {
            let part = self.acts.part(tile, chunk * CHUNK_BLOCKS);
            let coarse = part.coarse.0.chunks_exact(STEPS * T).zip(part.coarse.1.chunks_exact(words));
            let fine = part.fine.0.chunks_exact(STEPS * T).zip(part.fine.1.chunks_exact(words));
            let mut streams = coarse.zip(fine).zip(part.flags);
            for span in spans.chunks_exact(P::LAYOUT.span_bytes()) {
                let (header, blocks) = span.split_at(P::LAYOUT.header);
                for (block, ((coarse, fine), flags)) in
                    blocks.chunks_exact(P::LAYOUT.block_bytes()).zip(&mut streams)
                {
                    for line in 0..P::LAYOUT.block_bytes().div_ceil(64) {
                        l.prefetch(block, PREFETCH + 64 * line);
                    }
                    let (codes, raw) = block.split_at(P::LAYOUT.code_bytes);
                    let [one, two] = P::Scales::scales(l, header, raw);
                    let second = if P::LAYOUT.affine { P::Scales::minima(l, header, raw) } else { two };
                    let block = InRegisters::<L> { steps: P::Codes::steps(l, codes), scales: [one, second] };
                    add_block::<L, P, T>(l, &block, coarse.0, coarse.1, u8::MAX, &mut sums);
                    if *flags != 0 {
                        add_block::<L, P, T>(l, &block, fine.0, fine.1, *flags, &mut sums);
                    }
                }
            }
        }
        for (row, &sum) in (tile.first..tile.first + tile.rows).zip(&sums) {
            finish(l, self.job, self.out, group, row, sum);
        }
    }

    /// Some pairs of groups times a panel of rows, chunk by chunk.
    #[inline(always)]
    fn panel<L: Lanes, P: Packing>(&self, l: L) {
        let mut weights = Expanded::new();
        let mut sums = [[[[[0.0f32; LANES]; PANEL_GROUPS]; TILE]; PANEL_TILES]; ITEM_PAIRS];
        let pairs = || self.groups.clone().step_by(PANEL_GROUPS);
        let tiles = || tiles(self.rows.start, self.rows.end);
        for first in (0..self.job.matrix.cols / BLOCK).step_by(CHUNK_BLOCKS) {
            let count = self.acts.shape.chunk(first);
            for (group, sums) in pairs().zip(&mut sums) {
                for g in 0..PANEL_GROUPS {
                    weights.fill::<L, P>(l, self.group::<P>(group + g), g, first, count);
                }
                let blocks = &weights.blocks[..count];
                let mut tile = self.rows.start;
                // As many tiles at once as the registers have room for.
                while tile < self.rows.end {
                    let at = (tile - self.rows.start) / TILE;
                    if L::Wide::TILES == 2 && tile + TILE < self.rows.end {
                        if let Some(sums) = sums[at..].first_chunk_mut::<2>() {
                            self.tiles::<L, P, 2>(l, blocks, first, tile, sums);
                        }
                        tile += 2 * TILE;
                    } else {
                        if let Some(sums) = sums[at..].first_chunk_mut::<1>() {
                            self.tiles::<L, P, 1>(l, blocks, first, tile, sums);
                        }
                        tile += TILE;
                    }
                }
            }
        }
        for (group, sums) in pairs().zip(&sums) {
            for (tile, sums) in tiles().zip(sums) {
                for (row, sums) in (tile.first..tile.first + tile.rows).zip(sums) {
                    for (group, sum) in (group..self.groups.end).zip(sums) {
                        finish(l, self.job, self.out, group, row, l.load(sum));
                    }
                }
            }
        }
    }

    /// Adds a chunk of expanded blocks, block `first` of the row and on, to the sums of `N` tiles from row `row` on.
    #[inline(always)]
    fn tiles<L: Lanes, P: Packing, const N: usize>(
        &self,
        l: L,
        blocks: &[ExpandedBlock],
        first: usize,
        row: usize,
        sums: &mut [[[[f32; LANES]; PANEL_GROUPS]; TILE]; N],
    ) {
        let w = l.wide();
        let words = self.acts.shape.words * TILE;
        let mut parts = [Part::default(); N];
        let mut acc = [[w.splat(0.0); TILE]; N];
        for n in 0..N {
            parts[n] = self.acts.part(Tile { first: row + n * TILE, rows: TILE }, first);
            for t in 0..TILE {
                acc[n][t] = w.load(&sums[n][t]);
            }
        }
        for (b, block) in blocks.iter().enumerate() {
            let mut coarse = [(&[[0; 4]; STEPS * TILE], &[0u32; 0][..]); N];
            let mut flags = [0; N];
            for n in 0..N {
                let Some(codes) = parts[n].coarse.0[b * STEPS * TILE..].first_chunk() else { return };
                coarse[n] = (codes, &parts[n].coarse.1[b * words..(b + 1) * words]);
                flags[n] = parts[n].flags[b];
            }
            add_wide::<L, P, N>(w, block, coarse, &mut acc);
            for n in 0..N {
                if flags[n] != 0 {
                    let Some(codes) = parts[n].fine.0[b * STEPS * TILE..].first_chunk() else { return };
                    let fine = (codes, &parts[n].fine.1[b * words..(b + 1) * words]);
                    if flags[n] == ALL {
                        let mut tile = [acc[n]];
                        add_wide::<L, P, 1>(w, block, [fine], &mut tile);
                        acc[n] = tile[0];
                    } else {
                        for t in 0..TILE {
                            if flags[n] & (1 << t) != 0 {
                                acc[n][t] = add_one_wide::<L, P>(w, block, fine, t, acc[n][t]);
                            }
                        }
                    }
                }
            }
        }
        for n in 0..N {
            for t in 0..TILE {
                w.store(acc[n][t], &mut sums[n][t]);
            }
        }
    }
}

/// One block of one group, taken apart.
struct InRegisters<L: Lanes> {
    steps: [L::B; STEPS],
    /// The scale; then the second scale, or the minimum where the format has one.
    scales: [L::F; 2],
}

/// A pair of groups with one byte per code and f32 scales.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct ExpandedBlock {
    steps: [[[u8; STEP_BYTES]; PANEL_GROUPS]; STEPS],
    /// Scales, then the second scales or the minima, of both groups.
    scales: [[[f32; LANES]; PANEL_GROUPS]; 2],
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
            scales: [[[0.0; LANES]; PANEL_GROUPS]; 2],
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
                l.store(one, &mut target.scales[0][g]);
                l.store(second, &mut target.scales[1][g]);
            }
        }
    }
}

/// Adds the products of one block of one group to the sums of the flagged rows of a tile of `T`.
#[inline(always)]
fn add_block<L: Lanes, P: Packing, const T: usize>(
    l: L,
    block: &InRegisters<L>,
    quads: &[[u8; 4]],
    meta: &[u32],
    flags: u8,
    sums: &mut [L::F; T],
) {
    let (subs, run) = (P::Scales::SUBS, P::run::<L>());
    let (quads, meta) = (&quads[..STEPS * T], &meta[..P::WORDS * T]);
    let before = *sums;
    for sub in 0..subs {
        let mut totals = [l.splat_i32(0); T];
        let (first, end) = (sub * STEPS / subs, (sub + 1) * STEPS / subs);
        for from in (first..end).step_by(run) {
            let mut run_sums = [l.start(0); T];
            if has_start::<L, P>() && from == first {
                for t in 0..T {
                    run_sums[t] = l.start(meta[(1 + sub) * T + t]);
                }
            }
            for j in from..from + run {
                for t in 0..T {
                    let values = l.splat_quad(&quads[j * T + t]);
                    run_sums[t] = if P::Codes::SIGNED {
                        l.add_dot::<true>(run_sums[t], block.steps[j], values)
                    } else {
                        l.add_dot::<false>(run_sums[t], block.steps[j], values)
                    };
                }
                if T > 1 {
                    for t in 0..T {
                        run_sums[t] = l.pin(run_sums[t]);
                    }
                }
            }
            for t in 0..T {
                totals[t] = l.add_i32(totals[t], l.total(run_sums[t]));
            }
        }
        for t in 0..T {
            let scaled = l.mul(l.to_f32(totals[t]), block.scales[sub]);
            sums[t] = l.fma(scaled, l.splat(f32::from_bits(meta[t])), sums[t]);
        }
    }
    if P::Scales::AFFINE {
        for t in 0..T {
            sums[t] = l.fma(block.scales[1], l.splat(f32::from_bits(meta[T + t])), sums[t]);
        }
    }
    for t in 0..T {
        if flags & (1 << t) == 0 {
            // Its words are those of an earlier call.
            sums[t] = before[t];
        }
    }
}

/// Whether sums of a part start at a word of the activations' metadata.
#[inline(always)]
fn has_start<L: Lanes, P: Packing>() -> bool {
    P::OFFSET != 0 || (L::WHOLE && P::Codes::SIGNED)
}

/// Adds `codes * values` of one step.
#[inline(always)]
fn add_step<W: Wide, P: Packing>(w: W, sums: W::H, codes: W::B, values: &[u8; 4]) -> W::H {
    if P::Codes::SIGNED {
        w.add_dot::<true>(sums, codes, values)
    } else {
        w.add_dot::<false>(sums, codes, values)
    }
}

/// As [`add_block`], for a pair of groups and all rows of `N` tiles: the same operations for every row.
#[inline(always)]
fn add_wide<L: Lanes, P: Packing, const N: usize>(
    w: L::Wide,
    block: &ExpandedBlock,
    tiles: [(&[[u8; 4]; STEPS * TILE], &[u32]); N],
    sums: &mut [[<L::Wide as Wide>::F; TILE]; N],
) {
    let (subs, run) = (P::Scales::SUBS, P::run::<L>());
    let mut meta = [&[0u32; 0][..]; N];
    for n in 0..N {
        meta[n] = &tiles[n].1[..P::WORDS * TILE];
    }
    for sub in 0..subs {
        let mut totals = [[w.zero_i32(); TILE]; N];
        let (first, end) = (sub * STEPS / subs, (sub + 1) * STEPS / subs);
        for from in (first..end).step_by(run) {
            let mut run_sums = [[w.start(0); TILE]; N];
            if has_start::<L, P>() && from == first {
                for n in 0..N {
                    for t in 0..TILE {
                        run_sums[n][t] = w.start(meta[n][(1 + sub) * TILE + t]);
                    }
                }
            }
            for j in from..from + run {
                let codes = w.load_bytes(&block.steps[j]);
                for n in 0..N {
                    for t in 0..TILE {
                        run_sums[n][t] =
                            add_step::<_, P>(w, run_sums[n][t], codes, &tiles[n].0[j * TILE + t]);
                    }
                }
                for n in 0..N {
                    for t in 0..TILE {
                        run_sums[n][t] = w.pin(run_sums[n][t]);
                    }
                }
            }
            for n in 0..N {
                for t in 0..TILE {
                    totals[n][t] = w.add_i32(totals[n][t], w.total(run_sums[n][t]));
                }
            }
        }
        let scale = w.load(&block.scales[sub]);
        for n in 0..N {
            for t in 0..TILE {
                let scaled = w.mul(w.to_f32(totals[n][t]), scale);
                sums[n][t] = w.fma(scaled, w.splat(f32::from_bits(meta[n][t])), sums[n][t]);
            }
        }
    }
    if P::Scales::AFFINE {
        let min = w.load(&block.scales[1]);
        for n in 0..N {
            for t in 0..TILE {
                sums[n][t] = w.fma(min, w.splat(f32::from_bits(meta[n][TILE + t])), sums[n][t]);
            }
        }
    }
}

/// As [`add_wide`], for row `t` of a tile alone.
#[inline(always)]
fn add_one_wide<L: Lanes, P: Packing>(
    w: L::Wide,
    block: &ExpandedBlock,
    (quads, meta): (&[[u8; 4]; STEPS * TILE], &[u32]),
    t: usize,
    sum: <L::Wide as Wide>::F,
) -> <L::Wide as Wide>::F {
    let (subs, run) = (P::Scales::SUBS, P::run::<L>());
    let meta = &meta[..P::WORDS * TILE];
    let mut sum = sum;
    let factor = w.splat(f32::from_bits(meta[t]));
    for sub in 0..subs {
        let mut total = w.zero_i32();
        let (first, end) = (sub * STEPS / subs, (sub + 1) * STEPS / subs);
        for from in (first..end).step_by(run) {
            let start = if has_start::<L, P>() && from == first { meta[(1 + sub) * TILE + t] } else { 0 };
            let mut run_sum = w.start(start);
            for j in from..from + run {
                run_sum = add_step::<_, P>(w, run_sum, w.load_bytes(&block.steps[j]), &quads[j * TILE + t]);
            }
            total = w.add_i32(total, w.total(run_sum));
        }
        sum = w.fma(w.mul(w.to_f32(total), w.load(&block.scales[sub])), factor, sum);
    }
    if P::Scales::AFFINE {
        sum = w.fma(w.load(&block.scales[1]), w.splat(f32::from_bits(meta[TILE + t])), sum);
    }
    sum
}
