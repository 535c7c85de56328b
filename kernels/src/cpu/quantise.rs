//! Activations as int8: per row and block of 32 inputs a scale, 32 bytes, and their sums.
//!
//! `scale = amax / 127`, codes are rounded half to even. Every block is computed from its own 32
//! values alone. The order in memory is the one in which a kernel reads: panels of [`PANEL_ROWS`] rows; in a panel,
//! chunks of [`CHUNK_BLOCKS`] blocks; in a chunk, tiles of up to [`TILE`] rows; in a tile, blocks. Codes of a
//! block are `[step][row of tile][4]`, metadata `[word][row of tile]`.

use super::lanes::{Kernel, Lanes};
use super::packing::{BLOCK, Layout, STEPS};
use super::workers::Disjoint;

/// Rows that a kernel keeps in registers at once.
pub(crate) const TILE: usize = 4;
/// Rows that share one expansion of the weights.
pub(crate) const PANEL_ROWS: usize = 64;
/// Blocks that are walked for all rows of a panel before the next ones (a multiple of every span).
pub(crate) const CHUNK_BLOCKS: usize = 16;
/// Blocks whose largest magnitude is below this count as zero (its inverse must be finite).
const TINY: f32 = 1e-30;
/// Adding this to a float of small magnitude leaves its nearest integer (half to even) in the low bits.
const ROUND: f32 = 12_582_912.0;

/// What a matrix needs to know of a block of activations besides its codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    /// f32 bits of `scale * sum of codes`, for minima.
    Scaled,
    /// `-offset` times sums of codes, for each of `parts` parts of the block: the first two inputs of every step
    /// in the low i16, the last two in the high one.
    Offset {
        /// The offset of the codes.
        offset: i32,
        /// Parts of a block with scales of their own.
        parts: usize,
    },
}

impl Sums {
    /// What a packing needs.
    pub(crate) fn of(layout: &Layout) -> Self {
        if layout.affine { Self::Scaled } else { Self::Offset { offset: layout.offset, parts: layout.subs } }
    }

    /// Words of metadata per row and block: the scale's bits, then the sums.
    pub(crate) const fn words(self) -> usize {
        match self {
            Self::Scaled => 2,
            Self::Offset { parts, .. } => 1 + parts,
        }
    }
}

/// Rows `first..first + rows` of a tile-interleaved buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    /// First row.
    pub(crate) first: usize,
    /// Rows, at most [`TILE`].
    pub(crate) rows: usize,
}

/// The tiles of rows `start..end`; `start` is a multiple of [`TILE`].
pub(crate) fn tiles(start: usize, end: usize) -> impl Iterator<Item = Tile> {
    (start..end).step_by(TILE).map(move |first| Tile { first, rows: TILE.min(end - first) })
}

/// How quantised rows lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Rows, padded to whole tiles.
    rows: usize,
    /// Blocks per row.
    blocks: usize,
    /// Metadata words per row and block.
    pub(crate) words: usize,
    /// Rows a tile has room for: one if there is one row, else [`TILE`], padded with rows nobody reads.
    pub(crate) width: usize,
}

impl Shape {
    fn new(rows: usize, cols: usize, sums: Sums) -> Self {
        let width = if rows == 1 { 1 } else { TILE };
        Self { rows: rows.next_multiple_of(width), blocks: cols / BLOCK, words: sums.words(), width }
    }

    /// Blocks of the chunk that starts at block `first`.
    pub(crate) fn chunk(self, first: usize) -> usize {
        CHUNK_BLOCKS.min(self.blocks - first)
    }

    /// Where a tile's part of the chunk at block `first` starts, in blocks of one row.
    #[inline(always)]
    fn start(self, tile: Tile, first: usize) -> usize {
        let panel = tile.first / PANEL_ROWS * PANEL_ROWS;
        let rows = PANEL_ROWS.min(self.rows - panel);
        panel * self.blocks + first * rows + (tile.first - panel) * self.chunk(first)
    }
}

/// Quantised rows, kept from call to call so that their memory is used again.
#[derive(Default)]
pub(crate) struct Activations {
    /// Codes.
    pub(crate) codes: Vec<[u8; 4]>,
    /// Scales and sums.
    pub(crate) meta: Vec<u32>,
    /// Their order.
    pub(crate) shape: Shape,
}

impl Activations {
    /// Makes room for `rows x cols`.
    pub(crate) fn reset(&mut self, rows: usize, cols: usize, sums: Sums) {
        self.shape = Shape::new(rows, cols, sums);
        let blocks = self.shape.rows * self.shape.blocks;
        self.codes.resize(blocks * STEPS, [0; 4]);
        self.meta.resize(blocks * self.shape.words, 0);
    }

    /// Codes and metadata of a tile's part of the chunk at block `first`.
    #[inline(always)]
    pub(crate) fn part(&self, tile: Tile, first: usize) -> (&[[u8; 4]], &[u32]) {
        let (start, words) = (self.shape.start(tile, first), self.shape.words);
        let end = start + self.shape.chunk(first) * self.shape.width;
        let codes = self.codes.get(start * STEPS..end * STEPS);
        let meta = self.meta.get(start * words..end * words);
        (codes.unwrap_or_default(), meta.unwrap_or_default())
    }
}

/// Quantises one tile of row-major `x`.
pub(crate) struct QuantiseTile<'a> {
    /// All rows.
    pub(crate) x: &'a [f32],
    /// Order of the result.
    pub(crate) shape: Shape,
    /// The rows to do.
    pub(crate) tile: Tile,
    /// What sums to keep.
    pub(crate) sums: Sums,
    /// `Activations::codes`, shared with the other tiles.
    pub(crate) codes: &'a Disjoint<'a, [u8; 4]>,
    /// `Activations::meta`, shared with the other tiles.
    pub(crate) meta: &'a Disjoint<'a, u32>,
}

/// One block: codes, scale, and for each half the sums of codes over the first two and the last two inputs of
/// its steps.
struct Quantised {
    codes: [u8; BLOCK],
    scale: f32,
    sums: [[i32; 2]; 2],
}

#[inline(always)]
fn quantise_block(values: &[f32; BLOCK]) -> Quantised {
    // As integers the magnitudes keep their order, and NaN is above infinity.
    let largest = values.iter().fold(0u32, |largest, v| largest.max(v.to_bits() & 0x7fff_ffff));
    let amax = f32::from_bits(largest);
    let mut out = Quantised { codes: [0; BLOCK], scale: 0.0, sums: [[0; 2]; 2] };
    if !amax.is_finite() {
        out.scale = f32::NAN;
        return out;
    }
    if amax < TINY {
        return out;
    }
    out.scale = amax / 127.0;
    let inverse = 127.0 / amax;
    let parts = values.as_chunks::<16>().0.iter().zip(out.codes.as_chunks_mut::<16>().0).zip(&mut out.sums);
    for ((values, codes), sums) in parts {
        let mut columns = [0; 4];
        for (values, codes) in values.as_chunks::<4>().0.iter().zip(codes.as_chunks_mut::<4>().0) {
            for ((value, byte), column) in values.iter().zip(codes).zip(&mut columns) {
                let shifted = value.mul_add(inverse, ROUND);
                let code = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
                *byte = code as u8;
                *column += code;
            }
        }
        *sums = [columns[0] + columns[1], columns[2] + columns[3]];
    }
    out
}

/// What quantising `values` (whole blocks) leaves over: each value less its code times its block's scale.
/// Plain multiplications and subtractions, so every instruction set gives the same bits.
pub(crate) fn remainder(values: &[f32], left: &mut [f32]) {
    for (values, left) in values.as_chunks::<BLOCK>().0.iter().zip(left.as_chunks_mut::<BLOCK>().0) {
        let Quantised { codes, scale, .. } = quantise_block(values);
        for ((value, code), left) in values.iter().zip(codes).zip(left) {
            *left = value - scale * f32::from(code as i8);
        }
    }
}

impl Kernel for QuantiseTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        let Shape { blocks, words, width, .. } = self.shape;
        for first in (0..blocks).step_by(CHUNK_BLOCKS) {
            let (start, len) = (self.shape.start(self.tile, first), self.shape.chunk(first) * width);
            // SAFETY: the rows of a tile belong to this item alone.
            let (codes, meta) = unsafe {
                (self.codes.slice(start * STEPS, len * STEPS), self.meta.slice(start * words, len * words))
            };
            let parts = codes.chunks_exact_mut(STEPS * width).zip(meta.chunks_exact_mut(words * width));
            for (block, (codes, meta)) in (first..).zip(parts) {
                self.block(block, codes, meta);
            }
        }
    }
}

impl QuantiseTile<'_> {
    #[inline(always)]
    fn block(&self, block: usize, codes: &mut [[u8; 4]], meta: &mut [u32]) {
        let (cols, width) = (self.shape.blocks * BLOCK, self.shape.width);
        for row in 0..self.tile.rows {
            let at = (self.tile.first + row) * cols + block * BLOCK;
            let Some(values) = self.x.get(at..).and_then(|rest| rest.first_chunk()) else { return };
            let Quantised { codes: bytes, scale, sums: [low, high] } = quantise_block(values);
            for (step, quad) in bytes.as_chunks::<4>().0.iter().enumerate() {
                codes[step * width + row] = *quad;
            }
            meta[row] = scale.to_bits();
            let both = [low[0] + high[0], low[1] + high[1]];
            match self.sums {
                Sums::Scaled => meta[width + row] = (scale * (both[0] + both[1]) as f32).to_bits(),
                Sums::Offset { offset, parts: 1 } => meta[width + row] = offset_word(offset, both),
                Sums::Offset { offset, .. } => {
                    meta[width + row] = offset_word(offset, low);
                    meta[2 * width + row] = offset_word(offset, high);
                }
            }
        }
    }
}

/// Two i16 of `-offset * sum`; the packing's run length keeps them in range.
#[inline(always)]
fn offset_word(offset: i32, sums: [i32; 2]) -> u32 {
    let [low, high] = sums.map(|sum| (-offset * sum) as u32);
    (low & 0xffff) | (high << 16)
}
