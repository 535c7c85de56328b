//! A product whose activations are two int8 digits instead of one.
//!
//! The second digit is what rounding to the first left over, quantised the same way. Both digits are
//! rows of one product, so the weights are read once; their results are added in a fixed order. A row
//! still depends on nothing but itself.

use super::linear::{Product, linear};
use super::quantise::{Activations, remainder};
use super::workers::{Disjoint, Workers};
use super::{Isa, matrix::CpuMatrix};

/// Both digits and both results, kept from call to call so that their memory is used again.
#[derive(Default)]
pub(super) struct Digits {
    x: Vec<f32>,
    out: Vec<f32>,
}

/// Rows of `x` that one item prepares or adds up.
const ITEM_ROWS: usize = 8;

/// Computes a product with two digits of `x`.
pub(super) fn linear_fine(
    isa: Isa,
    workers: &Workers,
    scratch: &mut Activations,
    digits: &mut Digits,
    job: &Product<'_>,
    out: &mut [f32],
) {
    let (rows, cols, width) = (job.rows, job.matrix.cols, job.matrix.rows);
    if !CpuMatrix::is_quantised(job.matrix) {
        return linear(isa, workers, scratch, job, out);
    }
    digits.x.resize(2 * rows * cols, 0.0);
    digits.out.resize(2 * rows * width, 0.0);
    let (first, second) = digits.x.split_at_mut(rows * cols);
    first.copy_from_slice(&job.x[..rows * cols]);
    let second = Disjoint::new(second);
    let items = rows.div_ceil(ITEM_ROWS);
    workers.run(items, &|item| {
        let (from, to) = (item * ITEM_ROWS * cols, ((item + 1) * ITEM_ROWS).min(rows) * cols);
        // SAFETY: an item owns its rows.
        let left = unsafe { second.slice(from, to - from) };
        remainder(&job.x[from..to], left);
    });
    let both = Product { matrix: job.matrix, bias: None, x: &digits.x, rows: 2 * rows };
    linear(isa, workers, scratch, &both, &mut digits.out);
    let (coarse, fine) = digits.out.split_at(rows * width);
    let out = Disjoint::new(out);
    workers.run(items, &|item| {
        let (first, last) = (item * ITEM_ROWS, ((item + 1) * ITEM_ROWS).min(rows));
        // SAFETY: an item owns its rows.
        let out = unsafe { out.slice(first * width, (last - first) * width) };
        for (row, values) in out.chunks_exact_mut(width).enumerate() {
            let at = (first + row) * width;
            let parts = coarse[at..at + width].iter().zip(&fine[at..at + width]);
            match job.bias {
                Some(bias) => {
                    for ((value, (coarse, fine)), bias) in values.iter_mut().zip(parts).zip(bias) {
                        *value = coarse + fine + bias;
                    }
                }
                None => {
                    for (value, (coarse, fine)) in values.iter_mut().zip(parts) {
                        *value = coarse + fine;
                    }
                }
            }
        }
    });
}
