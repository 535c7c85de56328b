//! `rms_norm`: `x / sqrt(mean(x^2) + eps) * weight`, row by row; `head_norm`: the same, head by head.
//!
//! The sum of squares is kept in 16 partial sums by channel modulo 16 and merged in one order, so it
//! is the same on every instruction set.

use super::lanes::{Kernel, LANES, Lanes};

/// Normalises some rows.
pub(super) struct RmsNorm<'a> {
    /// Rows of `weight.len()` channels.
    pub(super) x: &'a [f32],
    /// One factor per channel.
    pub(super) weight: &'a [f32],
    /// Added to the mean square.
    pub(super) eps: f32,
    /// As many rows as `x`.
    pub(super) out: &'a mut [f32],
}

#[inline(always)]
fn sum_of_squares<L: Lanes>(l: L, x: &[f32]) -> f32 {
    let mut sums = [l.splat(0.0); 2];
    let (chunks, rest) = x.as_chunks::<{ 2 * LANES }>();
    let mut tail = [0.0; 2 * LANES];
    tail[..rest.len()].copy_from_slice(rest);
    for chunk in chunks.iter().chain([&tail]) {
        for (sum, half) in sums.iter_mut().zip(chunk.as_chunks().0) {
            let v = l.load(half);
            *sum = l.fma(v, v, *sum);
        }
    }
    let mut partial = [[0.0; LANES]; 2];
    l.store(sums[0], &mut partial[0]);
    l.store(sums[1], &mut partial[1]);
    partial.iter().flatten().sum()
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let cols = self.weight.len();
        for (x, out) in self.x.chunks_exact(cols).zip(self.out.chunks_exact_mut(cols)) {
            let factor = 1.0 / (sum_of_squares(l, x) / cols as f32 + self.eps).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(x).zip(self.weight) {
                *out = (x * factor) * weight;
            }
        }
    }
}

/// Normalises runs of `weight.len()` channels in place.
pub(super) struct HeadNorm<'a> {
    /// Runs, one after another.
    pub(super) x: &'a mut [f32],
    /// One factor per channel of a run.
    pub(super) weight: &'a [f32],
    /// Added to the mean square.
    pub(super) eps: f32,
}

impl Kernel for HeadNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let cols = self.weight.len();
        for x in self.x.chunks_exact_mut(cols) {
            let factor = 1.0 / (sum_of_squares(l, x) / cols as f32 + self.eps).sqrt();
            for (x, weight) in x.iter_mut().zip(self.weight) {
                *x = (*x * factor) * weight;
            }
        }
    }
}
