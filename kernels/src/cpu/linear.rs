//! `out = x * weights + bias`: quantised weights times int8 activations, float weights times f32.
//!
//! A lane owns an output row. Within a block the products are summed as integers, exactly; across
//! blocks a row's sum is one chain of fused multiply-adds in block order. How many rows of `x` a call
//! has, how they are tiled and who computes which group changes none of these operations.

use std::ops::Range;

use super::lanes::{LANES, Lanes};
use super::linear_quantised::{ITEM_GROUPS, QuantisedJob};
use super::matrix::{CpuMatrix, Data};
use super::packing::GROUP_ROWS;
use super::quantise::{Activations, PANEL_ROWS, QuantiseTile, Sums, TILE, Tile, tiles};
use super::workers::{Disjoint, Workers};
use super::{Isa, Rounding, lanes::dispatch, linear_float::FloatJob};

/// Up to this many rows of `x`, weights are taken apart in registers; above, once per panel.
pub(super) const DIRECT_ROWS: usize = TILE;
/// Weight bytes that an item of a few rows covers.
const DIRECT_BYTES: usize = 64 << 10;

/// The arguments of a product, checked: `x` is `[rows, cols]`, `out` `[rows, matrix.rows]`.
pub(super) struct Product<'a> {
    pub(super) matrix: &'a CpuMatrix,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) x: &'a [f32],
    pub(super) rows: usize,
}

/// Computes a product.
pub(super) fn linear(
    isa: Isa,
    rounding: Rounding,
    workers: &Workers,
    scratch: &mut Activations,
    job: &Product<'_>,
    out: &mut [f32],
) {
    let out = Disjoint::new(out);
    match &job.matrix.data {
        Data::Quantised { format, layout, bytes } => {
            let sums = Sums::of(layout, isa.sums_are_whole());
            quantise(isa, rounding, workers, scratch, job, sums);
            let acts = &*scratch;
            split(workers, job, |groups, rows| {
                let part = QuantisedJob { format: *format, bytes, job, acts, out: &out, groups, rows };
                dispatch(isa, part);
            });
        }
        _ => split(workers, job, |groups, rows| dispatch(isa, FloatJob { job, out: &out, groups, rows })),
    }
}

fn quantise(
    isa: Isa,
    rounding: Rounding,
    workers: &Workers,
    scratch: &mut Activations,
    job: &Product<'_>,
    sums: Sums,
) {
    scratch.reset(job.rows, job.matrix.cols, sums);
    let out = scratch.share();
    let all: Vec<Tile> = tiles(0, job.rows).collect();
    workers.run(all.len(), &|item| {
        dispatch(isa, QuantiseTile { x: job.x, tile: all[item], sums, rounding, out: &out });
    });
}

/// Cuts the output into items of (groups, rows of `x`), by shape alone.
fn split(workers: &Workers, job: &Product<'_>, part: impl Fn(Range<usize>, Range<usize>) + Sync) {
    let all = job.matrix.groups();
    let (per_item, panel) = if job.rows <= DIRECT_ROWS {
        (DIRECT_BYTES.div_ceil(job.matrix.group_bytes().max(1)), DIRECT_ROWS)
    } else {
        (ITEM_GROUPS, PANEL_ROWS)
    };
    let chunks = all.div_ceil(per_item);
    workers.run(chunks * job.rows.div_ceil(panel), &|item| {
        let (chunk, first) = (item % chunks * per_item, item / chunks * panel);
        part(chunk..(chunk + per_item).min(all), first..(first + panel).min(job.rows));
    });
}

/// Writes the sums of a group for row `row` of `x`.
#[inline(always)]
pub(super) fn finish<L: Lanes>(
    l: L,
    job: &Product<'_>,
    out: &Disjoint<'_, f32>,
    group: usize,
    row: usize,
    sum: L::F,
) {
    let (first, width) = (group * GROUP_ROWS, job.matrix.rows);
    let mut values = [0.0; LANES];
    l.store(sum, &mut values);
    let count = GROUP_ROWS.min(width - first);
    if let Some(bias) = job.bias {
        for (value, bias) in values.iter_mut().zip(&bias[first..first + count]) {
            *value += bias;
        }
    }
    // SAFETY: an item owns its groups for its rows.
    let out = unsafe { out.slice(row * width + first, count) };
    match out.first_chunk_mut() {
        Some(whole) => *whole = values,
        None => out.copy_from_slice(&values[..out.len()]),
    }
}
