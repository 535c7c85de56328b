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
use super::quantise::{Activations, PANEL_ROWS, QuantiseTile, Shared, Sums, TILE, Tile, tiles};
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

/// Activations for every kind of sums that a matrix has wanted, kept from call to call.
#[derive(Default)]
pub(super) struct Scratch(Vec<(Sums, Activations)>);

impl Scratch {
    /// Quantises `x` for every kind of sums in `wanted`.
    fn fill(&mut self, wanted: &[Sums], fill: &Fill<'_>) {
        for sums in wanted {
            if self.0.iter().all(|(have, _)| have != sums) {
                self.0.push((*sums, Activations::default()));
            }
        }
        let used: Vec<(Sums, Shared<'_>)> = self
            .0
            .iter_mut()
            .filter(|(sums, _)| wanted.contains(sums))
            .map(|(sums, acts)| {
                acts.reset(fill.rows, fill.cols, *sums);
                (*sums, acts.share())
            })
            .collect();
        let all: Vec<Tile> = tiles(0, fill.rows).collect();
        let one = |item: usize| {
            let ((sums, out), tile) = (&used[item / all.len()], all[item % all.len()]);
            dispatch(fill.isa, QuantiseTile { x: fill.x, tile, sums: *sums, rounding: fill.rounding, out });
        };
        match all.len() {
            // Waking the workers would take longer.
            1 => (0..used.len()).for_each(one),
            count => fill.workers.run(count * used.len(), &one),
        }
    }

    fn get(&self, sums: Sums) -> Option<&Activations> {
        self.0.iter().find(|(have, _)| *have == sums).map(|(_, acts)| acts)
    }
}

/// How to quantise inputs.
struct Fill<'a> {
    isa: Isa,
    rounding: Rounding,
    workers: &'a Workers,
    x: &'a [f32],
    rows: usize,
    cols: usize,
}

/// Computes products of the same inputs, each into its own place.
pub(super) fn linears(
    isa: Isa,
    rounding: Rounding,
    workers: &Workers,
    scratch: &mut Scratch,
    jobs: &[Product<'_>],
    outs: &[Disjoint<'_, f32>],
) {
    let Some(first) = jobs.first() else { return };
    let sums = |job: &Product<'_>| match &job.matrix.data {
        Data::Quantised { layout, .. } => Some(Sums::of(layout, isa.sums_are_whole())),
        _ => None,
    };
    let mut wanted: Vec<Sums> = Vec::new();
    for sums in jobs.iter().filter_map(sums) {
        if !wanted.contains(&sums) {
            wanted.push(sums);
        }
    }
    if !wanted.is_empty() {
        let (x, rows, cols) = (first.x, first.rows, first.matrix.cols);
        scratch.fill(&wanted, &Fill { isa, rounding, workers, x, rows, cols });
    }
    let cuts: Vec<Cut> = jobs.iter().map(Cut::of).collect();
    workers.run(cuts.iter().map(Cut::items).sum(), &|item| {
        let mut item = item;
        for ((job, cut), out) in jobs.iter().zip(&cuts).zip(outs) {
            if item >= cut.items() {
                item -= cut.items();
                continue;
            }
            let (groups, rows) = cut.item(item);
            match (&job.matrix.data, sums(job).and_then(|sums| scratch.get(sums))) {
                (Data::Quantised { format, bytes, .. }, Some(acts)) => {
                    dispatch(isa, QuantisedJob { format: *format, bytes, job, acts, out, groups, rows });
                }
                _ => dispatch(isa, FloatJob { job, out, groups, rows }),
            }
            return;
        }
    });
}

/// How a product is cut into items of (groups, rows of `x`): by its shape alone.
struct Cut {
    groups: usize,
    rows: usize,
    groups_per_item: usize,
    rows_per_item: usize,
}

impl Cut {
    fn of(job: &Product<'_>) -> Self {
        let (groups_per_item, rows_per_item) = if job.rows <= DIRECT_ROWS {
            (DIRECT_BYTES.div_ceil(job.matrix.group_bytes().max(1)), DIRECT_ROWS)
        } else {
            (ITEM_GROUPS, PANEL_ROWS)
        };
        Self { groups: job.matrix.groups(), rows: job.rows, groups_per_item, rows_per_item }
    }

    fn chunks(&self) -> usize {
        self.groups.div_ceil(self.groups_per_item)
    }

    fn items(&self) -> usize {
        self.chunks() * self.rows.div_ceil(self.rows_per_item)
    }

    fn item(&self, item: usize) -> (Range<usize>, Range<usize>) {
        let (chunk, row) =
            (item % self.chunks() * self.groups_per_item, item / self.chunks() * self.rows_per_item);
        (
            chunk..(chunk + self.groups_per_item).min(self.groups),
            row..(row + self.rows_per_item).min(self.rows),
        )
    }
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
