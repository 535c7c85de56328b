//! The pool of KV pages: `append`, `copy_page`, and `gather`/`scatter` between pages and cells.
//!
//! A page holds K transposed, `[head_dim][PAGE_TOKENS]`, so that a lane can own a key, then V as
//! `[PAGE_TOKENS][head_dim]`, so that a lane can own a channel. Both are f16.

use std::ops::Range;

use half::f16;

use super::buffer::Buffer;
use crate::backend::{AttentionShape, PAGE_TOKENS, PageId, PoolSpec, RowGroup};
use crate::error::KernelError;

/// Most channels of a head.
const MAX_HEAD_DIM: usize = 1024;

/// Pages on the host.
pub struct CpuPool {
    pub(super) spec: PoolSpec,
    data: Buffer<u16>,
}

impl CpuPool {
    pub(super) fn new(spec: PoolSpec) -> Result<Self, KernelError> {
        let PoolSpec { pages, head_dim } = spec;
        let refused = || KernelError::Size { what: "page pool".to_string(), rows: pages, cols: head_dim };
        if pages == 0 || u32::try_from(pages).is_err() {
            return Err(refused());
        }
        if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM {
            return Err(refused());
        }
        let len = pages.checked_mul(spec.page_bytes() / 2).ok_or_else(refused)?;
        Ok(Self { spec, data: Buffer::zeroed("page pool", len)? })
    }

    fn half_len(&self) -> usize {
        PAGE_TOKENS * self.spec.head_dim
    }

    fn range(&self, page: PageId) -> Range<usize> {
        let (start, len) = (page.0 as usize * 2 * self.half_len(), 2 * self.half_len());
        start..start + len
    }

    /// K `[head_dim][PAGE_TOKENS]` and V `[PAGE_TOKENS][head_dim]` of a page inside the pool.
    #[inline(always)]
    pub(super) fn page(&self, page: PageId) -> (&[u16], &[u16]) {
        self.data[self.range(page)].split_at(self.half_len())
    }

    fn page_mut(&mut self, page: PageId) -> (&mut [u16], &mut [u16]) {
        let (range, half) = (self.range(page), self.half_len());
        self.data[range].split_at_mut(half)
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
        let (source, target) = (self.range(source), self.range(target).start);
        self.data.copy_within(source, target);
    }

    /// Writes the K and V rows of a group, rounded to f16, to their slots. Tables are checked.
    pub(super) fn append(&mut self, shape: AttentionShape, group: &RowGroup<'_>, k: &[f32], v: &[f32]) {
        let (dim, width) = (shape.head_dim, shape.kv_heads * shape.head_dim);
        for (head, table) in group.tables.iter().enumerate() {
            for row in 0..group.rows {
                let (token, at) = (group.start + row, (group.first_row + row) * width + head * dim);
                let (keys, values) = self.page_mut(table[token / PAGE_TOKENS]);
                let slot = token % PAGE_TOKENS;
                for (key, value) in keys[slot..].iter_mut().step_by(PAGE_TOKENS).zip(&k[at..at + dim]) {
                    *key = f16::from_f32(*value).to_bits();
                }
                for (out, value) in values[slot * dim..][..dim].iter_mut().zip(&v[at..at + dim]) {
                    *out = f16::from_f32(*value).to_bits();
                }
            }
        }
    }

    /// Pages to cell, see [`crate::backend::Backend::gather_cell`]. Tables and length are checked.
    pub(super) fn gather(&self, tables: &[&[PageId]], tokens: usize, cell: &mut [u8]) {
        let dim = self.spec.head_dim;
        for (table, cell) in tables.iter().zip(cell.chunks_exact_mut(4 * tokens * dim)) {
            let (cell_k, cell_v) = cell.split_at_mut(2 * tokens * dim);
            let rows = cell_k.chunks_exact_mut(2 * dim).zip(cell_v.chunks_exact_mut(2 * dim));
            for (token, (row_k, row_v)) in rows.enumerate() {
                let (keys, values) = self.page(table[token / PAGE_TOKENS]);
                let slot = token % PAGE_TOKENS;
                for (out, key) in
                    row_k.as_chunks_mut().0.iter_mut().zip(keys[slot..].iter().step_by(PAGE_TOKENS))
                {
                    *out = key.to_le_bytes();
                }
                for (out, value) in row_v.as_chunks_mut().0.iter_mut().zip(&values[slot * dim..][..dim]) {
                    *out = value.to_le_bytes();
                }
            }
        }
    }

    /// Cell to pages, the inverse of `gather`.
    pub(super) fn scatter(&mut self, tables: &[&[PageId]], tokens: usize, cell: &[u8]) {
        let dim = self.spec.head_dim;
        for (table, cell) in tables.iter().zip(cell.chunks_exact(4 * tokens * dim)) {
            let (cell_k, cell_v) = cell.split_at(2 * tokens * dim);
            let rows = cell_k.chunks_exact(2 * dim).zip(cell_v.chunks_exact(2 * dim));
            for (token, (row_k, row_v)) in rows.enumerate() {
                let (keys, values) = self.page_mut(table[token / PAGE_TOKENS]);
                let slot = token % PAGE_TOKENS;
                for (key, raw) in keys[slot..].iter_mut().step_by(PAGE_TOKENS).zip(row_k.as_chunks().0) {
                    *key = u16::from_le_bytes(*raw);
                }
                for (value, raw) in values[slot * dim..][..dim].iter_mut().zip(row_v.as_chunks().0) {
                    *value = u16::from_le_bytes(*raw);
                }
            }
        }
    }
}
