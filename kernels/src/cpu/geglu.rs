//! `geglu`: `gate = gelu(gate) * up`, element by element, with the tanh form of GELU.
//!
//! `(1 + tanh(u)) / 2 = 1 / (1 + e^(-2u))`, so one `exp` is all it needs.

use super::exp::exp;
use super::lanes::{Kernel, LANES, Lanes};

/// `-2 * sqrt(2 / pi)`.
const OUTER: f32 = -1.595_769_2;
/// Weight of the cube.
const CUBE: f32 = 0.044_715;

/// Gates `up` with `gate`, of equal length.
pub(super) struct GeGlu<'a> {
    /// Changed in place.
    pub(super) gate: &'a mut [f32],
    /// Gated.
    pub(super) up: &'a [f32],
}

#[inline(always)]
fn eight<L: Lanes>(l: L, gate: &mut [f32; LANES], up: &[f32; LANES]) {
    let g = l.load(gate);
    let square = l.mul(g, g);
    let inner = l.mul(g, l.fma(square, l.splat(CUBE), l.splat(1.0)));
    let below = l.add(l.splat(1.0), exp(l, l.mul(inner, l.splat(OUTER))));
    l.store(l.mul(l.div(g, below), l.load(up)), gate);
}

impl Kernel for GeGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (gates, gate_rest) = self.gate.as_chunks_mut();
        let (ups, up_rest) = self.up.as_chunks();
        for (gate, up) in gates.iter_mut().zip(ups) {
            eight(l, gate, up);
        }
        let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
        gate[..gate_rest.len()].copy_from_slice(gate_rest);
        up[..up_rest.len()].copy_from_slice(up_rest);
        eight(l, &mut gate, &up);
        gate_rest.copy_from_slice(&gate[..gate_rest.len()]);
    }
}
