//! `scale`: `x *= factor`, element by element.

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
