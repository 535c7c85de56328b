//! `gate = act(gate) * up`, element by element, for activations of the form `act(g) = g / (1 + e^x(g))`.

use std::marker::PhantomData;

use super::exp::exp;
use super::lanes::{Kernel, LANES, Lanes};

/// An activation, by its exponent.
pub(super) trait Activation {
    /// `x(g)`.
    fn exponent<L: Lanes>(l: L, g: L::F) -> L::F;
}

/// Gates `up` with `gate`, of equal length.
pub(super) struct Gated<'a, A> {
    gate: &'a mut [f32],
    up: &'a [f32],
    activation: PhantomData<A>,
}

impl<'a, A: Activation> Gated<'a, A> {
    /// `gate` is changed in place.
    pub(super) fn new(gate: &'a mut [f32], up: &'a [f32]) -> Self {
        Self { gate, up, activation: PhantomData }
    }
}

#[inline(always)]
fn eight<L: Lanes, A: Activation>(l: L, gate: &mut [f32; LANES], up: &[f32; LANES]) {
    let g = l.load(gate);
    let below = l.add(l.splat(1.0), exp(l, A::exponent(l, g)));
    l.store(l.mul(l.div(g, below), l.load(up)), gate);
}

impl<A: Activation> Kernel for Gated<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (gates, gate_rest) = self.gate.as_chunks_mut();
        let (ups, up_rest) = self.up.as_chunks();
        for (gate, up) in gates.iter_mut().zip(ups) {
            eight::<L, A>(l, gate, up);
        }
        let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
        gate[..gate_rest.len()].copy_from_slice(gate_rest);
        up[..up_rest.len()].copy_from_slice(up_rest);
        eight::<L, A>(l, &mut gate, &up);
        gate_rest.copy_from_slice(&gate[..gate_rest.len()]);
    }
}
