//! Checks of arguments, the same for every device.

use crate::backend::{AttentionShape, PAGE_TOKENS, PageId, PoolSpec, RowGroup};
use crate::error::KernelError;

/// Refuses `got` where it is not `expected`.
pub(crate) fn equal(
    kernel: &'static str,
    what: &'static str,
    expected: usize,
    got: usize,
) -> Result<(), KernelError> {
    if expected == got { Ok(()) } else { Err(KernelError::Shape { kernel, what, expected, got }) }
}

/// Refuses `index` at or above `limit`.
pub(crate) fn below(
    kernel: &'static str,
    what: &'static str,
    index: usize,
    limit: usize,
) -> Result<(), KernelError> {
    if index < limit { Ok(()) } else { Err(KernelError::OutOfRange { kernel, what, index, limit }) }
}

/// Refuses more than `available` rows.
pub(crate) fn rows(kernel: &'static str, rows: usize, available: usize) -> Result<(), KernelError> {
    below(kernel, "row count", rows, available.saturating_add(1))
}

/// Refuses an impossible attention shape.
pub(crate) fn shape(kernel: &'static str, shape: AttentionShape) -> Result<(), KernelError> {
    let AttentionShape { heads, kv_heads, head_dim, window, .. } = shape;
    if window == Some(0) {
        return Err(KernelError::Size { what: format!("{kernel}: window"), rows: 0, cols: head_dim });
    }
    if heads == 0 || kv_heads == 0 || head_dim == 0 {
        return Err(KernelError::Size {
            what: format!("{kernel}: heads"),
            rows: heads.min(kv_heads),
            cols: head_dim,
        });
    }
    if heads.checked_mul(head_dim).is_none() {
        return Err(KernelError::Size { what: format!("{kernel}: heads"), rows: heads, cols: head_dim });
    }
    equal(kernel, "query heads over KV heads (remainder)", 0, heads % kv_heads)
}

/// Tokens of a group's sequence once its rows are in.
pub(crate) fn tokens(kernel: &'static str, group: &RowGroup<'_>) -> Result<usize, KernelError> {
    let out_of_range =
        KernelError::OutOfRange { kernel, what: "token", index: group.start, limit: usize::MAX - group.rows };
    group.start.checked_add(group.rows).ok_or(out_of_range)
}

/// Refuses groups whose rows overlap or leave the buffer.
pub(crate) fn disjoint(
    kernel: &'static str,
    groups: &[RowGroup<'_>],
    available: usize,
) -> Result<(), KernelError> {
    let mut spans = Vec::with_capacity(groups.len());
    for group in groups {
        let end = group.first_row.saturating_add(group.rows);
        rows(kernel, end, available)?;
        if group.rows > 0 {
            spans.push((group.first_row, end));
        }
    }
    spans.sort_unstable();
    for pair in spans.windows(2) {
        if pair[1].0 < pair[0].1 {
            return Err(KernelError::Overlap { kernel, row: pair[1].0 });
        }
    }
    Ok(())
}

/// Refuses a page outside of the pool.
pub(crate) fn page(kernel: &'static str, pool: &PoolSpec, page: PageId) -> Result<(), KernelError> {
    below(kernel, "page", page.0 as usize, pool.pages)
}

/// Refuses page ids outside of the pool among the pages of a table that hold tokens `first..tokens`.
pub(crate) fn table(
    kernel: &'static str,
    pool: &PoolSpec,
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
    used.iter().skip(first / PAGE_TOKENS).try_for_each(|&id| page(kernel, pool, id))
}

/// Refuses tables of groups that do not fit the shape or the pool.
pub(crate) fn tables(
    kernel: &'static str,
    pool: &PoolSpec,
    attention: AttentionShape,
    groups: &[RowGroup<'_>],
) -> Result<(), KernelError> {
    shape(kernel, attention)?;
    equal(kernel, "head_dim", pool.head_dim, attention.head_dim)?;
    for group in groups {
        equal(kernel, "tables of a group", attention.kv_heads, group.tables.len())?;
        let tokens = tokens(kernel, group)?;
        let first = attention.first_seen(group.start);
        group.tables.iter().try_for_each(|ids| table(kernel, pool, ids, first, tokens))?;
    }
    Ok(())
}

/// Refuses tables and a byte count that do not make a cell of `tokens` tokens.
pub(crate) fn cell(
    kernel: &'static str,
    pool: &PoolSpec,
    tables: &[&[PageId]],
    tokens: usize,
    bytes: usize,
) -> Result<(), KernelError> {
    tables.iter().try_for_each(|ids| table(kernel, pool, ids, 0, tokens))?;
    if tables.is_empty() || tokens == 0 {
        return Err(KernelError::Size { what: format!("{kernel}: cell"), rows: tables.len(), cols: tokens });
    }
    equal(kernel, "cell bytes", pool.cell_bytes(tables.len(), tokens), bytes)
}
