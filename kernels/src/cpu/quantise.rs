//! Activations as int8: per row and block of 32 inputs a scale, 32 bytes, and their sums.
//!
//! `scale = amax / 127`, codes are rounded half to even. A block whose largest magnitude stands out of its row
//! ([`OUTLIER`]) would lose what its other values say, and more of the row's sum than all other blocks
//! together: it gets a second digit, what rounding left over in units of `scale / 254`. With [`Rounding::Fine`]
//! every block gets one. Everything is computed from the row alone. The order in memory is the one in which a
//! kernel reads: panels of [`PANEL_ROWS`] rows; in a panel,
//! chunks of [`CHUNK_BLOCKS`] blocks; in a chunk, tiles of up to [`TILE`] rows; in a tile, blocks. Codes of a
//! block are `[step][row of tile][4]`, metadata `[word][row of tile]`.

use std::ops::Range;

use super::Rounding;
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
/// A block is an outlier if its largest magnitude is above this many times the mean of its row's blocks'.
const OUTLIER: f32 = 2.0;
/// Units of the second digit in one of the first: its codes are in `-127..=127` too.
const FINE: f32 = 254.0;
/// Adding this to a float of small magnitude leaves its nearest integer (half to even) in the low bits.
const ROUND: f32 = 12_582_912.0;

/// What a matrix needs to know of a block of activations besides its codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sums {
    /// f32 bits of `scale * sum of codes`, for minima.
    Scaled,
    /// `-offset` times sums of codes, for each of `parts` parts of the block: one i32 if `whole`, else the first two
    /// inputs of every step in the low i16 and the last two in the high one.
    Offset {
        /// The offset of the codes.
        offset: i32,
        /// Parts of a block with scales of their own.
        parts: usize,
        /// Whether the kernel sums in i32.
        whole: bool,
    },
}

impl Sums {
    /// What a packing needs of a kernel that sums in i32 (`whole`) or in i16. Where sums are whole, signed codes are
    /// 128 too large.
    pub(crate) fn of(layout: &Layout, whole: bool) -> Self {
        if layout.affine {
            return Self::Scaled;
        }
        let offset = if whole && layout.signed { 128 } else { layout.offset };
        Self::Offset { offset, parts: layout.subs, whole }
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
    /// The first digits.
    coarse: Digits,
    /// The second digits, of flagged blocks alone.
    fine: Digits,
    /// For each (tile, block) a bit per row that has a second digit.
    flags: Vec<u8>,
    /// Their order.
    pub(crate) shape: Shape,
}

#[derive(Default)]
struct Digits {
    codes: Vec<[u8; 4]>,
    /// Scales and sums.
    meta: Vec<u32>,
}

impl Digits {
    /// Codes and metadata of `blocks`, of `words` words each.
    #[inline(always)]
    fn part(&self, blocks: Range<usize>, words: usize) -> (&[[u8; 4]], &[u32]) {
        let codes = self.codes.get(blocks.start * STEPS..blocks.end * STEPS);
        let meta = self.meta.get(blocks.start * words..blocks.end * words);
        (codes.unwrap_or_default(), meta.unwrap_or_default())
    }

    fn share(&mut self) -> Target<'_> {
        Target { codes: Disjoint::new(&mut self.codes), meta: Disjoint::new(&mut self.meta) }
    }
}

/// A tile's part of a chunk, block by block.
#[derive(Clone, Copy, Default)]
pub(crate) struct Part<'a> {
    /// First digits, `[block][step][row of tile][4]`, and their metadata, `[block][word][row of tile]`.
    pub(crate) coarse: (&'a [[u8; 4]], &'a [u32]),
    /// Second digits and their metadata, valid where flagged.
    pub(crate) fine: (&'a [[u8; 4]], &'a [u32]),
    /// For each block a bit per row that has a second digit.
    pub(crate) flags: &'a [u8],
}

impl Activations {
    /// Makes room for `rows x cols`.
    pub(crate) fn reset(&mut self, rows: usize, cols: usize, sums: Sums) {
        self.shape = Shape::new(rows, cols, sums);
        let blocks = self.shape.rows * self.shape.blocks;
        for digits in [&mut self.coarse, &mut self.fine] {
            digits.codes.resize(blocks * STEPS, [0; 4]);
            digits.meta.resize(blocks * self.shape.words, 0);
        }
        self.flags.resize(blocks / self.shape.width, 0);
    }

    /// A tile's part of the chunk at block `first`.
    #[inline(always)]
    pub(crate) fn part(&self, tile: Tile, first: usize) -> Part<'_> {
        let Shape { words, width, .. } = self.shape;
        let start = self.shape.start(tile, first);
        let end = start + self.shape.chunk(first) * width;
        Part {
            coarse: self.coarse.part(start..end, words),
            fine: self.fine.part(start..end, words),
            flags: self.flags.get(start / width..end / width).unwrap_or_default(),
        }
    }

    /// Shares the memory among the items that fill it.
    pub(crate) fn share(&mut self) -> Shared<'_> {
        Shared {
            shape: self.shape,
            coarse: self.coarse.share(),
            fine: self.fine.share(),
            flags: Disjoint::new(&mut self.flags),
        }
    }
}

/// Codes and metadata to be filled.
struct Target<'a> {
    codes: Disjoint<'a, [u8; 4]>,
    meta: Disjoint<'a, u32>,
}

impl Target<'_> {
    /// Codes and metadata of `blocks`, of `words` words each.
    ///
    /// # Safety
    /// As [`Disjoint::slice`].
    #[expect(clippy::mut_from_ref, reason = "see `Disjoint::slice`")]
    unsafe fn part(&self, blocks: Range<usize>, words: usize) -> (&mut [[u8; 4]], &mut [u32]) {
        let (start, len) = (blocks.start, blocks.len());
        // SAFETY: the caller's promise.
        unsafe { (self.codes.slice(start * STEPS, len * STEPS), self.meta.slice(start * words, len * words)) }
    }
}

/// [`Activations`] that are being filled, tile by tile.
pub(crate) struct Shared<'a> {
    shape: Shape,
    coarse: Target<'a>,
    fine: Target<'a>,
    flags: Disjoint<'a, u8>,
}

/// Quantises one tile of row-major `x`.
pub(crate) struct QuantiseTile<'a> {
    /// All rows.
    pub(crate) x: &'a [f32],
    /// The rows to do.
    pub(crate) tile: Tile,
    /// What sums to keep.
    pub(crate) sums: Sums,
    /// How many digits.
    pub(crate) rounding: Rounding,
    /// Where to put them.
    pub(crate) out: &'a Shared<'a>,
}

/// One digit of one block: codes, scale, and for each half the sums of codes over the first two and the last two
/// inputs of its steps.
struct Digit {
    codes: [u8; BLOCK],
    scale: f32,
    sums: [[i32; 2]; 2],
}

/// The largest magnitude; NaN if there is one.
#[inline(always)]
fn amax(values: &[f32; BLOCK]) -> f32 {
    // As integers the magnitudes keep their order, and NaN is above infinity.
    f32::from_bits(values.iter().fold(0u32, |largest, v| largest.max(v.to_bits() & 0x7fff_ffff)))
}

/// Rounds `values` of magnitude at most `limit` to codes in units of `limit / 127`.
#[inline(always)]
fn digit(values: &[f32; BLOCK], limit: f32) -> Digit {
    let mut out = Digit { codes: [0; BLOCK], scale: 0.0, sums: [[0; 2]; 2] };
    if !limit.is_finite() {
        out.scale = f32::NAN;
        return out;
    }
    if limit < TINY {
        return out;
    }
    out.scale = limit / 127.0;
    let inverse = 127.0 / limit;
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

/// What rounding to a digit left over, in units of `scale / 254`.
#[inline(always)]
fn second_digit(values: &[f32; BLOCK], first: &Digit) -> Digit {
    let mut left = [0.0; BLOCK];
    for ((value, code), left) in values.iter().zip(first.codes).zip(&mut left) {
        let rest = value - first.scale * f32::from(code as i8);
        // Rounding may leave a hair more than half a unit.
        *left = rest.clamp(-0.5 * first.scale, 0.5 * first.scale);
    }
    digit(&left, first.scale * (127.0 / FINE))
}

impl Kernel for QuantiseTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        let Shape { blocks, words, width, .. } = self.out.shape;
        let threshold = match self.rounding {
            Rounding::Fast => OUTLIER,
            Rounding::Fine => 0.0,
        };
        let mut limits = [f32::INFINITY; TILE];
        for (row, limit) in limits.iter_mut().enumerate().take(self.tile.rows) {
            let at = (self.tile.first + row) * blocks * BLOCK;
            let Some(values) = self.x.get(at..at + blocks * BLOCK) else { return };
            let total: f32 = values.as_chunks::<BLOCK>().0.iter().map(amax).sum();
            *limit = total / blocks as f32 * threshold;
        }
        for first in (0..blocks).step_by(CHUNK_BLOCKS) {
            let start = self.out.shape.start(self.tile, first);
            let len = self.out.shape.chunk(first) * width;
            let all = start..start + len;
            // SAFETY: the rows of a tile belong to this item alone.
            let (coarse, fine, flags) = unsafe {
                (
                    self.out.coarse.part(all.clone(), words),
                    self.out.fine.part(all, words),
                    self.out.flags.slice(start / width, len / width),
                )
            };
            for (block, flags) in flags.iter_mut().enumerate() {
                let codes = block * STEPS * width..(block + 1) * STEPS * width;
                let meta = block * words * width..(block + 1) * words * width;
                let coarse = (&mut coarse.0[codes.clone()], &mut coarse.1[meta.clone()]);
                let fine = (&mut fine.0[codes], &mut fine.1[meta]);
                *flags = self.block(first + block, &limits, coarse, fine);
            }
        }
    }
}

impl QuantiseTile<'_> {
    /// Quantises one block of all rows of the tile; returns the flags of those with a second digit.
    #[inline(always)]
    fn block(
        &self,
        block: usize,
        limits: &[f32; TILE],
        coarse: (&mut [[u8; 4]], &mut [u32]),
        fine: (&mut [[u8; 4]], &mut [u32]),
    ) -> u8 {
        let Shape { blocks, width, .. } = self.out.shape;
        let mut flags = 0;
        for (row, limit) in limits.iter().enumerate().take(self.tile.rows) {
            let at = ((self.tile.first + row) * blocks + block) * BLOCK;
            let Some(values) = self.x.get(at..).and_then(|rest| rest.first_chunk()) else { return flags };
            let amax = amax(values);
            let first = digit(values, amax);
            put(&first, row, width, self.sums, coarse.0, coarse.1);
            if amax > *limit && amax.is_finite() {
                flags |= 1 << row;
                put(&second_digit(values, &first), row, width, self.sums, fine.0, fine.1);
            }
        }
        flags
    }
}

/// Writes a digit of row `row` of a tile of `width`.
#[inline(always)]
fn put(digit: &Digit, row: usize, width: usize, sums: Sums, codes: &mut [[u8; 4]], meta: &mut [u32]) {
    let Digit { codes: bytes, scale, sums: [low, high] } = digit;
    for (step, quad) in bytes.as_chunks::<4>().0.iter().enumerate() {
        codes[step * width + row] = *quad;
    }
    meta[row] = scale.to_bits();
    let both = [low[0] + high[0], low[1] + high[1]];
    match sums {
        Sums::Scaled => meta[width + row] = (scale * (both[0] + both[1]) as f32).to_bits(),
        Sums::Offset { offset, parts: 1, whole } => meta[width + row] = offset_word(offset, both, whole),
        Sums::Offset { offset, whole, .. } => {
            meta[width + row] = offset_word(offset, *low, whole);
            meta[2 * width + row] = offset_word(offset, *high, whole);
        }
    }
}

/// `-offset` times the sum of `sums` if `whole`, else two i16 of `-offset * sum`; the packing's run length keeps
/// them in range.
#[inline(always)]
fn offset_word(offset: i32, sums: [i32; 2], whole: bool) -> u32 {
    if whole {
        return (-offset * (sums[0] + sums[1])) as u32;
    }
    let [low, high] = sums.map(|sum| (-offset * sum) as u32);
    (low & 0xffff) | (high << 16)
}
