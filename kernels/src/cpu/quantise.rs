//! Activations as int8: per row and block of 32 inputs a scale, 32 bytes, and their sums.
//!
//! `scale = amax / 127`, codes are rounded half to even. Every block is computed from its own 32
//! values alone. Rows are interleaved in tiles of up to [`TILE`], so that a kernel that walks a tile
//! reads one stream: bytes `[block][step][row of tile][4]`, metadata `[block][word][row of tile]`.

use super::lanes::{Kernel, Lanes};
use super::packing::{BLOCK, Layout, STEPS};
use super::workers::Disjoint;

/// Rows that a kernel keeps in registers at once.
pub(crate) const TILE: usize = 4;
/// Blocks whose largest magnitude is below this count as zero (its inverse must be finite).
const TINY: f32 = 1e-30;
/// Adding this to a float of small magnitude leaves its nearest integer (half to even) in the low bits.
const ROUND: f32 = 12_582_912.0;

/// What a matrix needs to know of a block of activations besides its codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    /// f32 bits of `scale * sum of codes`, for minima.
    Scaled,
    /// `-offset * sum of codes` as i32, for each of `parts` parts of the block.
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

/// Quantised rows, kept from call to call so that their memory is used again.
#[derive(Default)]
pub(crate) struct Activations {
    /// Codes.
    pub(crate) codes: Vec<[u8; 4]>,
    /// Scales and sums.
    pub(crate) meta: Vec<u32>,
    /// Inputs per row.
    pub(crate) cols: usize,
    /// Metadata words per row and block.
    pub(crate) words: usize,
    /// Rows a tile has room for: one if there is one row, else [`TILE`], padded with rows nobody reads.
    pub(crate) width: usize,
}

impl Activations {
    /// Makes room for `rows x cols`.
    pub(crate) fn reset(&mut self, rows: usize, cols: usize, sums: Sums) {
        (self.cols, self.words) = (cols, sums.words());
        self.width = if rows == 1 { 1 } else { TILE };
        let rows = rows.next_multiple_of(TILE);
        self.codes.resize(rows * cols / 4, [0; 4]);
        self.meta.resize(rows * (cols / BLOCK) * self.words, 0);
    }

    /// Codes and metadata of a tile.
    #[inline(always)]
    pub(crate) fn tile(&self, tile: Tile) -> (&[[u8; 4]], &[u32]) {
        let (quads, words) = (self.cols / 4, self.cols / BLOCK * self.words);
        let codes = self.codes.get(tile.first * quads..(tile.first + self.width) * quads);
        let meta = self.meta.get(tile.first * words..(tile.first + self.width) * words);
        (codes.unwrap_or_default(), meta.unwrap_or_default())
    }
}

/// Quantises one tile of row-major `x` (`[.., cols]`).
pub(crate) struct QuantiseTile<'a> {
    /// All rows.
    pub(crate) x: &'a [f32],
    /// Inputs per row.
    pub(crate) cols: usize,
    /// The rows to do.
    pub(crate) tile: Tile,
    /// `Activations::width`.
    pub(crate) width: usize,
    /// What sums to keep.
    pub(crate) sums: Sums,
    /// `Activations::codes`, shared with the other tiles.
    pub(crate) codes: &'a Disjoint<'a, [u8; 4]>,
    /// `Activations::meta`, shared with the other tiles.
    pub(crate) meta: &'a Disjoint<'a, u32>,
}

/// Codes, scale and the sums of both halves of 32 values.
#[inline(always)]
pub(crate) fn quantise_block(values: &[f32; BLOCK]) -> ([u8; BLOCK], f32, [i32; 2]) {
    // As integers the magnitudes keep their order, and NaN is above infinity.
    let largest = values.iter().fold(0u32, |largest, v| largest.max(v.to_bits() & 0x7fff_ffff));
    let amax = f32::from_bits(largest);
    if !amax.is_finite() {
        return ([0; BLOCK], f32::NAN, [0; 2]);
    }
    if amax < TINY {
        return ([0; BLOCK], 0.0, [0; 2]);
    }
    let inverse = 127.0 / amax;
    let rounded: [i32; BLOCK] =
        values.map(|v| v.mul_add(inverse, ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32);
    let sums = [rounded[..16].iter().sum(), rounded[16..].iter().sum()];
    (rounded.map(|v| v as u8), amax / 127.0, sums)
}

impl Kernel for QuantiseTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        let Tile { first, rows } = self.tile;
        let width = self.width;
        let (quads, words) = (self.cols / 4, self.sums.words());
        let row_words = self.cols / BLOCK * words;
        // SAFETY: the rows of a tile belong to this item alone.
        let (codes, meta) = unsafe {
            (
                self.codes.slice(first * quads, width * quads),
                self.meta.slice(first * row_words, width * row_words),
            )
        };
        let blocks = codes.chunks_exact_mut(STEPS * width).zip(meta.chunks_exact_mut(words * width));
        for (block, (codes, meta)) in blocks.enumerate() {
            for row in 0..rows {
                let at = (first + row) * self.cols + block * BLOCK;
                let Some(values) = self.x.get(at..).and_then(|rest| rest.first_chunk()) else { return };
                let (bytes, scale, sums) = quantise_block(values);
                for (step, quad) in bytes.as_chunks::<4>().0.iter().enumerate() {
                    codes[step * width + row] = *quad;
                }
                meta[row] = scale.to_bits();
                match self.sums {
                    Sums::Scaled => meta[width + row] = (scale * (sums[0] + sums[1]) as f32).to_bits(),
                    Sums::Offset { offset, parts: 1 } => {
                        meta[width + row] = (-offset * (sums[0] + sums[1])) as u32;
                    }
                    Sums::Offset { offset, .. } => {
                        meta[width + row] = (-offset * sums[0]) as u32;
                        meta[2 * width + row] = (-offset * sums[1]) as u32;
                    }
                }
            }
        }
    }
}
