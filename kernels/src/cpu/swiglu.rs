//! `swiglu`: `gate = silu(gate) * up`, element by element, with `silu(g) = g / (1 + e^-g)`.

use super::exp::exp;
use super::lanes::{Kernel, LANES, Lanes};

/// Gates `up` with `gate`, of equal length.
pub(super) struct SwiGlu<'a> {
    /// Changed in place.
    pub(super) gate: &'a mut [f32],
    /// Gated.
    pub(super) up: &'a [f32],
}

#[inline(always)]
fn eight<L: Lanes>(l: L, gate: &mut [f32; LANES], up: &[f32; LANES]) {
    let g = l.load(gate);
    let below = l.add(l.splat(1.0), exp(l, l.sub(l.splat(0.0), g)));
    l.store(l.mul(l.div(g, below), l.load(up)), gate);
}

impl Kernel for SwiGlu<'_> {
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
