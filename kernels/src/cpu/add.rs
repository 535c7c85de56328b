//! `add`: `x += y`, element by element.

use super::lanes::{Kernel, Lanes};

/// Adds `y` to `x`, of equal length.
pub(super) struct Add<'a> {
    /// Changed in place.
    pub(super) x: &'a mut [f32],
    /// Added.
    pub(super) y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }
}
