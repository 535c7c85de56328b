//! `swiglu`: `gate = silu(gate) * up`, element by element, with `silu(g) = g / (1 + e^-g)`.

use super::gate::Activation;
use super::lanes::Lanes;

/// SiLU.
pub(super) struct Silu;

impl Activation for Silu {
    #[inline(always)]
    fn exponent<L: Lanes>(l: L, g: L::F) -> L::F {
        l.sub(l.splat(0.0), g)
    }
}
