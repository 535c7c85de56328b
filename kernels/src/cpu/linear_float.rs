//! The float half of [`super::linear`]: f32, f16 and bf16 weights times f32 activations.
//!
//! A row's sum is one chain of fused multiply-adds in input order. Several groups and rows of `x` are
//! walked together only to keep the multipliers busy.

use std::ops::Range;

use super::lanes::{Kernel, LANES, Lanes};
use super::linear::{Product, finish};
use super::matrix::Data;
use super::quantise::{TILE, tiles};
use super::workers::Disjoint;

/// Groups walked together, in one or two steps.
const WIDE: usize = 4;

/// Some groups of a float matrix for some rows of `x`.
pub(super) struct FloatJob<'a> {
    pub(super) job: &'a Product<'a>,
    pub(super) out: &'a Disjoint<'a, f32>,
    pub(super) groups: Range<usize>,
    pub(super) rows: Range<usize>,
}

impl Kernel for FloatJob<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        match &self.job.matrix.data {
            Data::F32(weights) => self.walk(l, weights, |v| l.load(v)),
            Data::F16(weights) => self.walk(l, weights, |v| l.load_f16(v)),
            Data::BF16(weights) => self.walk(l, weights, |v| l.load_bf16(v)),
            Data::Quantised { .. } => {}
        }
    }
}

impl FloatJob<'_> {
    #[inline(always)]
    fn walk<L: Lanes, E>(&self, l: L, weights: &[E], load: impl Fn(&[E; LANES]) -> L::F + Copy) {
        let mut group = self.groups.start;
        while group < self.groups.end {
            let wide = group + WIDE <= self.groups.end;
            for tile in tiles(self.rows.start, self.rows.end) {
                let full = tile.rows == TILE;
                match (full, wide) {
                    (true, true) => {
                        self.tile::<L, E, 2, TILE>(l, weights, load, group, tile.first);
                        self.tile::<L, E, 2, TILE>(l, weights, load, group + 2, tile.first);
                    }
                    (true, false) => self.tile::<L, E, 1, TILE>(l, weights, load, group, tile.first),
                    (false, _) => {
                        for row in tile.first..tile.first + tile.rows {
                            if wide {
                                self.tile::<L, E, WIDE, 1>(l, weights, load, group, row);
                            } else {
                                self.tile::<L, E, 1, 1>(l, weights, load, group, row);
                            }
                        }
                    }
                }
            }
            group += if wide { WIDE } else { 1 };
        }
    }

    #[inline(always)]
    fn tile<L: Lanes, E, const G: usize, const T: usize>(
        &self,
        l: L,
        weights: &[E],
        load: impl Fn(&[E; LANES]) -> L::F,
        group: usize,
        row: usize,
    ) {
        let cols = self.job.matrix.cols;
        let streams: [&[[E; LANES]]; G] =
            std::array::from_fn(|g| weights[(group + g) * cols * LANES..][..cols * LANES].as_chunks().0);
        let x: [&[f32]; T] = std::array::from_fn(|t| &self.job.x[(row + t) * cols..][..cols]);
        let mut sums = [[l.splat(0.0); T]; G];
        for k in 0..cols {
            let mut values = [l.splat(0.0); T];
            for t in 0..T {
                values[t] = l.splat(x[t][k]);
            }
            for g in 0..G {
                let weight = load(&streams[g][k]);
                for t in 0..T {
                    sums[g][t] = l.fma(weight, values[t], sums[g][t]);
                }
            }
        }
        for (g, sums) in sums.iter().enumerate() {
            for (t, &sum) in sums.iter().enumerate() {
                finish(l, self.job, self.out, group + g, row + t, sum);
            }
        }
    }
}
