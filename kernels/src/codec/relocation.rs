//! Moving K and V to an earlier place of their sequence, by way of cells.

use super::CellShape;
use super::elements::turn_back;
use crate::backend::{Backend, KvType, PAGE_TOKENS, PageId};
use crate::error::KernelError;

/// Tokens that are moved at once.
const PIECE: usize = 16 * PAGE_TOKENS;

/// Refuses what cannot be moved.
///
/// # Errors
/// Elements that share scales, heads of another number or shape, a place that is not an earlier one, or pages that are not there.
pub(crate) fn check(
    kv_type: KvType,
    tables: &[&[PageId]],
    shape: &CellShape,
    to: usize,
) -> Result<(), KernelError> {
    let kernel = "relocate";
    let refused = |what, expected, got| Err(KernelError::Shape { kernel, what, expected, got });
    let end = (shape.start + shape.tokens).div_ceil(PAGE_TOKENS);
    let pages = tables.iter().map(|table| table.len()).min().unwrap_or(0);
    match kv_type {
        KvType::Int8 => refused("bits of an element that stands alone", 16, 8),
        _ if tables.len() != shape.kv_heads || tables.is_empty() => {
            refused("KV heads", shape.kv_heads.max(1), tables.len())
        }
        _ if shape.head_dim == 0 || shape.head_dim % 2 == 1 => {
            refused("channels of a head", shape.head_dim.next_multiple_of(2).max(2), shape.head_dim)
        }
        _ if to > shape.start => {
            Err(KernelError::OutOfRange { kernel, what: "place", index: to, limit: shape.start + 1 })
        }
        _ if pages < end => refused("pages", end, pages),
        _ => Ok(()),
    }
}

/// [`Backend::relocate`] of a backend that can gather and scatter cells.
pub(crate) fn through_cells<B: Backend + ?Sized>(
    backend: &B,
    pool: &mut B::Pool,
    kv_type: KvType,
    tables: &[&[PageId]],
    shape: &CellShape,
    to: usize,
) -> Result<(), KernelError> {
    check(kv_type, tables, shape, to)?;
    let row = kv_type.head_bytes(shape.head_dim);
    for moved in (0..shape.tokens).step_by(PIECE) {
        let tokens = PIECE.min(shape.tokens - moved);
        let mut cell = read(backend, pool, tables, row, shape.start + moved, tokens)?;
        let piece = CellShape { start: shape.start + moved, tokens, ..*shape };
        turn_back(kv_type, &piece, &mut cell, shape.start - to)?;
        write(backend, pool, tables, row, to + moved, &cell)?;
    }
    Ok(())
}

/// The pages of tokens `start..end`.
fn places<'a>(tables: &[&'a [PageId]], start: usize, end: usize) -> Vec<&'a [PageId]> {
    tables.iter().map(|table| &table[start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS)]).collect()
}

/// K and V of `tokens` tokens from `start` on, as a cell has them; `row` bytes a token, head and side.
fn read<B: Backend + ?Sized>(
    backend: &B,
    pool: &B::Pool,
    tables: &[&[PageId]],
    row: usize,
    start: usize,
    tokens: usize,
) -> Result<Vec<u8>, KernelError> {
    let lead = start % PAGE_TOKENS;
    let mut cell = vec![0; 2 * tables.len() * (lead + tokens) * row];
    backend.gather_cell(pool, &places(tables, start, start + tokens), lead + tokens, &mut cell)?;
    let mut read = Vec::with_capacity(cell.len());
    for part in cell.chunks_exact((lead + tokens) * row) {
        read.extend_from_slice(&part[lead * row..]);
    }
    Ok(read)
}

/// The inverse of [`read`].
fn write<B: Backend + ?Sized>(
    backend: &B,
    pool: &mut B::Pool,
    tables: &[&[PageId]],
    row: usize,
    start: usize,
    cell: &[u8],
) -> Result<(), KernelError> {
    let (lead, tokens) = (start % PAGE_TOKENS, cell.len() / (2 * tables.len() * row));
    let pages = places(tables, start, start + tokens);
    if lead == 0 {
        return backend.scatter_cell(pool, &pages, tokens, cell);
    }
    let mut before = vec![0; 2 * tables.len() * lead * row];
    backend.gather_cell(pool, &pages, lead, &mut before)?;
    let mut whole = Vec::with_capacity(before.len() + cell.len());
    for (before, moved) in before.chunks_exact(lead * row).zip(cell.chunks_exact(tokens * row)) {
        whole.extend_from_slice(before);
        whole.extend_from_slice(moved);
    }
    backend.scatter_cell(pool, &pages, lead + tokens, &whole)
}
