//! `scale`: `x *= factor`, element by element; `scale_channels`: with a factor for each channel.

use super::lanes::{Kernel, Lanes};

/// Multiplies `x` by `factor`.
pub(super) struct Scale<'a> {
    /// Changed in place.
    pub(super) x: &'a mut [f32],
    /// The factor.
    pub(super) factor: f32,
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        for x in self.x.iter_mut() {
            *x *= self.factor;
        }
    }
}

/// Multiplies every row of `x` by `factors`.
pub(super) struct ScaleChannels<'a> {
    /// Whole rows, changed in place.
    pub(super) x: &'a mut [f32],
    /// A factor for each channel.
    pub(super) factors: &'a [f32],
}

impl Kernel for ScaleChannels<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        for row in self.x.chunks_exact_mut(self.factors.len().max(1)) {
            for (x, factor) in row.iter_mut().zip(self.factors) {
                *x *= factor;
            }
        }
    }
}
