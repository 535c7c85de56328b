//! Checks of shape arguments.

use crate::backend::{AttentionShape, RowGroup};
use crate::error::KernelError;

/// Refuses `got` where it is not `expected`.
pub(super) fn equal(
    kernel: &'static str,
    what: &'static str,
    expected: usize,
    got: usize,
) -> Result<(), KernelError> {
    if expected == got { Ok(()) } else { Err(KernelError::Shape { kernel, what, expected, got }) }
}

/// Refuses `index` at or above `limit`.
pub(super) fn below(
    kernel: &'static str,
    what: &'static str,
    index: usize,
    limit: usize,
) -> Result<(), KernelError> {
    if index < limit { Ok(()) } else { Err(KernelError::OutOfRange { kernel, what, index, limit }) }
}

/// Refuses more than `available` rows.
pub(super) fn rows(kernel: &'static str, rows: usize, available: usize) -> Result<(), KernelError> {
    below(kernel, "row count", rows, available.saturating_add(1))
}

/// Refuses an impossible attention shape.
pub(super) fn shape(kernel: &'static str, shape: AttentionShape) -> Result<(), KernelError> {
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
pub(super) fn tokens(kernel: &'static str, group: &RowGroup<'_>) -> Result<usize, KernelError> {
    let out_of_range =
        KernelError::OutOfRange { kernel, what: "token", index: group.start, limit: usize::MAX - group.rows };
    group.start.checked_add(group.rows).ok_or(out_of_range)
}

/// Refuses groups whose rows overlap or leave the buffer.
pub(super) fn disjoint(
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
