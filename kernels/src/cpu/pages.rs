//! The pool of KV pages: `append`, `copy_page`, and `gather`/`scatter` between pages and cells.
//!
//! A page holds K transposed, `[head_dim][PAGE_TOKENS]`, so that a lane can own a key, then V as
//! `[PAGE_TOKENS][head_dim]`, so that a lane can own a channel. Both are f16, or f32, or int8 with a scale for
//! each token and block of [`SCALE_BLOCK`] channels: `[blocks][PAGE_TOKENS]` for K, `[PAGE_TOKENS][blocks]` for V.

use std::ops::Range;

use half::f16;

use super::buffer::{Buffer, Plain};
use super::lanes::{LANES, Wide};
use crate::backend::{AttentionShape, KvType, PAGE_TOKENS, PageId, PoolSpec, RowGroup, SCALE_BLOCK};
use crate::error::KernelError;

/// Most channels of a head.
const MAX_HEAD_DIM: usize = 1024;

/// A value of K or V as stored.
pub(super) trait Element: Plain {
    /// Zero.
    const ZERO: Self;
    /// Bytes of a value.
    const BYTES: usize;
    /// Whether a value counts in units of the scale of its block.
    const SCALED: bool = false;
    /// Rounds; where `SCALED`, a value in units of its scale.
    fn of(value: f32) -> Self;
    /// Reads two vectors.
    fn load<W: Wide>(w: W, v: &[[Self; LANES]; 2]) -> W::F;
    /// Writes the little-endian bytes.
    fn put(self, out: &mut [u8]);
    /// The value of little-endian bytes; zero if there are not [`Element::BYTES`] of them.
    fn read(bytes: &[u8]) -> Self;
}

impl Element for u16 {
    const ZERO: Self = 0;
    const BYTES: usize = 2;

    #[inline(always)]
    fn of(value: f32) -> Self {
        f16::from_f32(value).to_bits()
    }

    #[inline(always)]
    fn load<W: Wide>(w: W, v: &[[Self; LANES]; 2]) -> W::F {
        w.load_f16(v)
    }

    #[inline(always)]
    fn put(self, out: &mut [u8]) {
        out.copy_from_slice(&self.to_le_bytes());
    }

    #[inline(always)]
    fn read(bytes: &[u8]) -> Self {
        bytes.try_into().map_or(0, Self::from_le_bytes)
    }
}

impl Element for f32 {
    const ZERO: Self = 0.0;
    const BYTES: usize = 4;

    #[inline(always)]
    fn of(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn load<W: Wide>(w: W, v: &[[Self; LANES]; 2]) -> W::F {
        w.load(v)
    }

    #[inline(always)]
    fn put(self, out: &mut [u8]) {
        out.copy_from_slice(&self.to_le_bytes());
    }

    #[inline(always)]
    fn read(bytes: &[u8]) -> Self {
        bytes.try_into().map_or(0.0, Self::from_le_bytes)
    }
}

/// A signed byte.
impl Element for u8 {
    const ZERO: Self = 0;
    const BYTES: usize = 1;
    const SCALED: bool = true;

    #[inline(always)]
    fn of(value: f32) -> Self {
        (value.round_ties_even() as i8).cast_unsigned()
    }

    #[inline(always)]
    fn load<W: Wide>(w: W, v: &[[Self; LANES]; 2]) -> W::F {
        w.load_i8(v)
    }

    #[inline(always)]
    fn put(self, out: &mut [u8]) {
        out.fill(self);
    }

    #[inline(always)]
    fn read(bytes: &[u8]) -> Self {
        bytes.first().copied().unwrap_or(0)
    }
}

/// Pages of one type of values.
pub(super) struct PagesOf<E: Element> {
    data: Buffer<E>,
    /// Scales of a page: those of K, then those of V. Empty where values have none.
    scales: Buffer<f32>,
    head_dim: usize,
}

/// Pages of any type.
pub(super) enum Pages {
    F16(PagesOf<u16>),
    F32(PagesOf<f32>),
    Int8(PagesOf<u8>),
}

/// Pages on the host.
pub struct CpuPool {
    pub(super) spec: PoolSpec,
    pub(super) pages: Pages,
}

/// Evaluates `$body` with `$pages` bound to the pages of whichever type.
macro_rules! with_pages {
    ($all:expr, $pages:ident => $body:expr) => {
        match $all {
            Pages::F16($pages) => $body,
            Pages::F32($pages) => $body,
            Pages::Int8($pages) => $body,
        }
    };
}

impl CpuPool {
    pub(super) fn new(spec: PoolSpec) -> Result<Self, KernelError> {
        let PoolSpec { pages, head_dim, kv_type } = spec;
        let refused = || KernelError::Size { what: "page pool".to_string(), rows: pages, cols: head_dim };
        if pages == 0 || u32::try_from(pages).is_err() {
            return Err(refused());
        }
        if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM {
            return Err(refused());
        }
        if pages.checked_mul(spec.page_bytes()).is_none() {
            return Err(refused());
        }
        let pages = match kv_type {
            KvType::F16 => Pages::F16(PagesOf::new(pages, head_dim)?),
            KvType::F32 => Pages::F32(PagesOf::new(pages, head_dim)?),
            KvType::Int8 => Pages::Int8(PagesOf::new(pages, head_dim)?),
        };
        Ok(Self { spec, pages })
    }

    pub(super) fn copy_page(&mut self, source: PageId, target: PageId) {
        with_pages!(&mut self.pages, pages => pages.copy_page(source, target));
    }

    /// Writes the K and V rows of a group, rounded as stored, to their slots. Tables are checked.
    pub(super) fn append(&mut self, shape: AttentionShape, group: &RowGroup<'_>, k: &[f32], v: &[f32]) {
        with_pages!(&mut self.pages, pages => pages.append(shape, group, k, v));
    }

    /// Pages to cell, see [`crate::backend::Backend::gather_cell`]. Tables and length are checked.
    pub(super) fn gather(&self, tables: &[&[PageId]], tokens: usize, cell: &mut [u8]) {
        with_pages!(&self.pages, pages => pages.gather(tables, tokens, cell));
    }

    /// Cell to pages, the inverse of `gather`.
    pub(super) fn scatter(&mut self, tables: &[&[PageId]], tokens: usize, cell: &[u8]) {
        with_pages!(&mut self.pages, pages => pages.scatter(tables, tokens, cell));
    }
}

impl<E: Element> PagesOf<E> {
    /// `pages` pages of zeros. What they take was found to be countable.
    fn new(pages: usize, head_dim: usize) -> Result<Self, KernelError> {
        let mut all = Self { data: Buffer::zeroed("", 0)?, scales: Buffer::zeroed("", 0)?, head_dim };
        all.data = Buffer::zeroed("page pool", pages * 2 * all.half_len())?;
        all.scales = Buffer::zeroed("scales of the page pool", pages * 2 * PAGE_TOKENS * all.blocks())?;
        Ok(all)
    }

    fn half_len(&self) -> usize {
        PAGE_TOKENS * self.head_dim
    }

    /// Scales of a token's K, and of its V.
    #[inline(always)]
    pub(super) fn blocks(&self) -> usize {
        if E::SCALED { self.head_dim.div_ceil(SCALE_BLOCK) } else { 0 }
    }

    fn range(&self, page: PageId) -> Range<usize> {
        let (start, len) = (page.0 as usize * 2 * self.half_len(), 2 * self.half_len());
        start..start + len
    }

    fn scale_range(&self, page: PageId) -> Range<usize> {
        let len = 2 * PAGE_TOKENS * self.blocks();
        let start = page.0 as usize * len;
        start..start + len
    }

    /// K `[head_dim][PAGE_TOKENS]` and V `[PAGE_TOKENS][head_dim]` of a page inside the pool.
    #[inline(always)]
    pub(super) fn page(&self, page: PageId) -> (&[E], &[E]) {
        self.data[self.range(page)].split_at(self.half_len())
    }

    /// Scales of K `[blocks][PAGE_TOKENS]` and of V `[PAGE_TOKENS][blocks]`.
    #[inline(always)]
    pub(super) fn scales(&self, page: PageId) -> (&[f32], &[f32]) {
        self.scales[self.scale_range(page)].split_at(PAGE_TOKENS * self.blocks())
    }

    fn page_mut(&mut self, page: PageId) -> (&mut [E], &mut [E]) {
        let (range, half) = (self.range(page), self.half_len());
        self.data[range].split_at_mut(half)
    }

    fn scales_mut(&mut self, page: PageId) -> (&mut [f32], &mut [f32]) {
        let (range, half) = (self.scale_range(page), PAGE_TOKENS * self.blocks());
        self.scales[range].split_at_mut(half)
    }

    fn copy_page(&mut self, source: PageId, target: PageId) {
        let (from, to) = (self.range(source), self.range(target).start);
        self.data.copy_within(from, to);
        let (from, to) = (self.scale_range(source), self.scale_range(target).start);
        self.scales.copy_within(from, to);
    }

    fn append(&mut self, shape: AttentionShape, group: &RowGroup<'_>, k: &[f32], v: &[f32]) {
        let (dim, width) = (shape.head_dim, shape.kv_heads * shape.head_dim);
        for (head, table) in group.tables.iter().enumerate() {
            for row in 0..group.rows {
                let (token, at) = (group.start + row, (group.first_row + row) * width + head * dim);
                let (page, slot) = (table[token / PAGE_TOKENS], token % PAGE_TOKENS);
                self.write(page, slot, &k[at..at + dim], &v[at..at + dim]);
            }
        }
    }

    /// Writes K and V of one token, rounded as stored.
    fn write(&mut self, page: PageId, slot: usize, k: &[f32], v: &[f32]) {
        let (dim, blocks) = (self.head_dim, self.blocks());
        let block = if E::SCALED { SCALE_BLOCK } else { dim };
        let (keys, values) = self.page_mut(page);
        let keys = keys[slot..].chunks_mut(PAGE_TOKENS * block).zip(k.chunks(block));
        for (keys, k) in keys {
            let units = units::<E>(k);
            for (key, value) in keys.iter_mut().step_by(PAGE_TOKENS).zip(k) {
                *key = E::of(*value * units);
            }
        }
        for (out, v) in values[slot * dim..][..dim].chunks_mut(block).zip(v.chunks(block)) {
            let units = units::<E>(v);
            for (out, value) in out.iter_mut().zip(v) {
                *out = E::of(*value * units);
            }
        }
        if E::SCALED {
            let (of_keys, of_values) = self.scales_mut(page);
            let of_keys = of_keys[slot..].iter_mut().step_by(PAGE_TOKENS);
            for (scale, k) in of_keys.zip(k.chunks(block)) {
                *scale = largest(k) / LARGEST;
            }
            for (scale, v) in of_values[slot * blocks..][..blocks].iter_mut().zip(v.chunks(block)) {
                *scale = largest(v) / LARGEST;
            }
        }
    }

    /// Bytes of a cell's K, and of its V, for one head: values, then scales.
    fn cell_parts(&self, tokens: usize) -> (usize, usize) {
        (E::BYTES * tokens * self.head_dim, size_of::<f32>() * tokens * self.blocks())
    }

    fn gather(&self, tables: &[&[PageId]], tokens: usize, cell: &mut [u8]) {
        let (dim, blocks, (half, scales)) = (self.head_dim, self.blocks(), self.cell_parts(tokens));
        for (table, cell) in tables.iter().zip(cell.chunks_exact_mut(2 * (half + scales))) {
            let (cell, cell_scales) = cell.split_at_mut(2 * half);
            let (cell_k, cell_v) = cell.split_at_mut(half);
            let rows = cell_k.chunks_exact_mut(E::BYTES * dim).zip(cell_v.chunks_exact_mut(E::BYTES * dim));
            for (token, (row_k, row_v)) in rows.enumerate() {
                let (keys, values) = self.page(table[token / PAGE_TOKENS]);
                let slot = token % PAGE_TOKENS;
                let keys = keys[slot..].iter().step_by(PAGE_TOKENS);
                for (out, key) in row_k.chunks_exact_mut(E::BYTES).zip(keys) {
                    key.put(out);
                }
                for (out, value) in row_v.chunks_exact_mut(E::BYTES).zip(&values[slot * dim..][..dim]) {
                    value.put(out);
                }
            }
            let (scales_k, scales_v) = cell_scales.split_at_mut(scales);
            let rows = chunks_mut(scales_k, blocks).zip(chunks_mut(scales_v, blocks));
            for (token, (row_k, row_v)) in rows.enumerate() {
                let (of_keys, of_values) = self.scales(table[token / PAGE_TOKENS]);
                let slot = token % PAGE_TOKENS;
                for (out, scale) in row_k.iter_mut().zip(of_keys[slot..].iter().step_by(PAGE_TOKENS)) {
                    *out = scale.to_le_bytes();
                }
                for (out, scale) in row_v.iter_mut().zip(&of_values[slot * blocks..]) {
                    *out = scale.to_le_bytes();
                }
            }
        }
    }

    fn scatter(&mut self, tables: &[&[PageId]], tokens: usize, cell: &[u8]) {
        let (dim, blocks, (half, scales)) = (self.head_dim, self.blocks(), self.cell_parts(tokens));
        for (table, cell) in tables.iter().zip(cell.chunks_exact(2 * (half + scales))) {
            let (cell, cell_scales) = cell.split_at(2 * half);
            let (cell_k, cell_v) = cell.split_at(half);
            let rows = cell_k.chunks_exact(E::BYTES * dim).zip(cell_v.chunks_exact(E::BYTES * dim));
            for (token, (row_k, row_v)) in rows.enumerate() {
                let (keys, values) = self.page_mut(table[token / PAGE_TOKENS]);
                let slot = token % PAGE_TOKENS;
                let keys = keys[slot..].iter_mut().step_by(PAGE_TOKENS);
                for (key, raw) in keys.zip(row_k.chunks_exact(E::BYTES)) {
                    *key = E::read(raw);
                }
                for (value, raw) in values[slot * dim..][..dim].iter_mut().zip(row_v.chunks_exact(E::BYTES)) {
                    *value = E::read(raw);
                }
            }
            let (scales_k, scales_v) = cell_scales.split_at(scales);
            let rows = chunks(scales_k, blocks).zip(chunks(scales_v, blocks));
            for (token, (row_k, row_v)) in rows.enumerate() {
                let (of_keys, of_values) = self.scales_mut(table[token / PAGE_TOKENS]);
                let slot = token % PAGE_TOKENS;
                for (scale, raw) in of_keys[slot..].iter_mut().step_by(PAGE_TOKENS).zip(row_k) {
                    *scale = f32::from_le_bytes(*raw);
                }
                for (scale, raw) in of_values[slot * blocks..].iter_mut().zip(row_v) {
                    *scale = f32::from_le_bytes(*raw);
                }
            }
        }
    }
}

/// The scales of tokens, `blocks` to a token.
fn chunks(bytes: &[u8], blocks: usize) -> impl Iterator<Item = &[[u8; size_of::<f32>()]]> {
    bytes.as_chunks().0.chunks_exact(blocks.max(1))
}

fn chunks_mut(bytes: &mut [u8], blocks: usize) -> impl Iterator<Item = &mut [[u8; size_of::<f32>()]]> {
    bytes.as_chunks_mut().0.chunks_exact_mut(blocks.max(1))
}

/// The largest magnitude of an int8 value.
const LARGEST: f32 = 127.0;

/// The largest magnitude of a block.
fn largest(block: &[f32]) -> f32 {
    block.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()))
}

/// What a value of a block is multiplied by before it is rounded.
fn units<E: Element>(block: &[f32]) -> f32 {
    if !E::SCALED {
        return 1.0;
    }
    let largest = largest(block);
    if largest > 0.0 { LARGEST / largest } else { 0.0 }
}
