//! `geglu`: `gate = gelu(gate) * up`, element by element, with the tanh form of GELU.
//!
//! `(1 + tanh(u)) / 2 = 1 / (1 + e^(-2u))`, so one `exp` is all it needs.

use super::gate::Activation;
use super::lanes::Lanes;

/// `-2 * sqrt(2 / pi)`.
const OUTER: f32 = -1.595_769_2;
/// Weight of the cube.
const CUBE: f32 = 0.044_715;

/// GELU.
pub(super) struct Gelu;

impl Activation for Gelu {
    #[inline(always)]
    fn exponent<L: Lanes>(l: L, g: L::F) -> L::F {
        let inner = l.mul(g, l.fma(l.mul(g, g), l.splat(CUBE), l.splat(1.0)));
        l.mul(inner, l.splat(OUTER))
    }
}
