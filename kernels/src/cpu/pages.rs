//! The pool of KV pages: `append`, `copy_page`, and `gather`/`scatter` between pages and cells.
//!
//! A page holds K transposed, `[head_dim][PAGE_TOKENS]`, so that a lane can own a key, then V as
//! `[PAGE_TOKENS][head_dim]`, so that a lane can own a channel. Both are f16, or f32.

use std::ops::Range;

use half::f16;

use super::buffer::{Buffer, Plain};
use super::lanes::{LANES, Wide};
use crate::backend::{AttentionShape, KvType, PAGE_TOKENS, PageId, PoolSpec, RowGroup};
use crate::error::KernelError;

/// Most channels of a head.
const MAX_HEAD_DIM: usize = 1024;

/// A value of K or V as stored.
pub(super) trait Element: Plain {
    /// Zero.
    const ZERO: Self;
    /// Bytes of a value.
    const BYTES: usize;
    /// Rounds.
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

/// Pages of one type of values.
pub(super) struct PagesOf<E: Element> {
    data: Buffer<E>,
    head_dim: usize,
}

/// Pages of either type.
pub(super) enum Pages {
    F16(PagesOf<u16>),
    F32(PagesOf<f32>),
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
        let len = pages.checked_mul(spec.page_bytes() / kv_type.bytes()).ok_or_else(refused)?;
        let pages = match kv_type {
            KvType::F16 => Pages::F16(PagesOf { data: Buffer::zeroed("page pool", len)?, head_dim }),
            KvType::F32 => Pages::F32(PagesOf { data: Buffer::zeroed("page pool", len)?, head_dim }),
        };
        Ok(Self { spec, pages })
    }

    /// Refuses page ids outside of the pool among the pages of a table that hold tokens `first..tokens`.
    pub(super) fn check_table(
        &self,
        kernel: &'static str,
        table: &[PageId],
        first: usize,
        tokens: usize,
    ) -> Result<(), KernelError> {
        let needed = tokens.div_ceil(PAGE_TOKENS);
        let Some(used) = table.get(..needed) else {
            return Err(KernelError::Shape {
                kernel,
                what: "pages of a table",
                expected: needed,
                got: table.len(),
            });
        };
        used.iter().skip(first / PAGE_TOKENS).try_for_each(|&page| self.check_page(kernel, page))
    }

    pub(super) fn check_page(&self, kernel: &'static str, page: PageId) -> Result<(), KernelError> {
        let (index, limit) = (page.0 as usize, self.spec.pages);
        if index < limit {
            Ok(())
        } else {
            Err(KernelError::OutOfRange { kernel, what: "page", index, limit })
        }
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
    fn half_len(&self) -> usize {
        PAGE_TOKENS * self.head_dim
    }

    fn range(&self, page: PageId) -> Range<usize> {
        let (start, len) = (page.0 as usize * 2 * self.half_len(), 2 * self.half_len());
        start..start + len
    }

    /// K `[head_dim][PAGE_TOKENS]` and V `[PAGE_TOKENS][head_dim]` of a page inside the pool.
    #[inline(always)]
    pub(super) fn page(&self, page: PageId) -> (&[E], &[E]) {
        self.data[self.range(page)].split_at(self.half_len())
    }

    fn page_mut(&mut self, page: PageId) -> (&mut [E], &mut [E]) {
        let (range, half) = (self.range(page), self.half_len());
        self.data[range].split_at_mut(half)
    }

    fn copy_page(&mut self, source: PageId, target: PageId) {
        let (source, target) = (self.range(source), self.range(target).start);
        self.data.copy_within(source, target);
    }

    fn append(&mut self, shape: AttentionShape, group: &RowGroup<'_>, k: &[f32], v: &[f32]) {
        let (dim, width) = (shape.head_dim, shape.kv_heads * shape.head_dim);
        for (head, table) in group.tables.iter().enumerate() {
            for row in 0..group.rows {
                let (token, at) = (group.start + row, (group.first_row + row) * width + head * dim);
                let (keys, values) = self.page_mut(table[token / PAGE_TOKENS]);
                let slot = token % PAGE_TOKENS;
                for (key, value) in keys[slot..].iter_mut().step_by(PAGE_TOKENS).zip(&k[at..at + dim]) {
                    *key = E::of(*value);
                }
                for (out, value) in values[slot * dim..][..dim].iter_mut().zip(&v[at..at + dim]) {
                    *out = E::of(*value);
                }
            }
        }
    }

    fn gather(&self, tables: &[&[PageId]], tokens: usize, cell: &mut [u8]) {
        let (dim, half) = (self.head_dim, E::BYTES * tokens * self.head_dim);
        for (table, cell) in tables.iter().zip(cell.chunks_exact_mut(2 * half)) {
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
        }
    }

    fn scatter(&mut self, tables: &[&[PageId]], tokens: usize, cell: &[u8]) {
        let (dim, half) = (self.head_dim, E::BYTES * tokens * self.head_dim);
        for (table, cell) in tables.iter().zip(cell.chunks_exact(2 * half)) {
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
        }
    }
}
