//! Turning keys back to position 0 and forth again.

use super::CellShape;
use crate::backend::RopePairing;

/// Sines and cosines of a cell's positions: `[tokens][head_dim / 2]` pairs; one token's are those of all.
pub(crate) struct Rotation {
    factors: Vec<[f32; 2]>,
    head_dim: usize,
    pairing: RopePairing,
}

impl Rotation {
    pub(crate) fn new(shape: &CellShape) -> Self {
        let pairs = shape.head_dim / 2;
        let (base, dims) = (f64::from(shape.rope_base), shape.head_dim as f64);
        let frequencies: Vec<f64> = (0..pairs).map(|i| libm::pow(base, -2.0 * i as f64 / dims)).collect();
        let factors = (shape.start..shape.start + shape.tokens)
            .flat_map(|position| frequencies.iter().map(move |frequency| position as f64 * frequency))
            .map(|angle| {
                let (sin, cos) = libm::sincos(angle);
                [sin as f32, cos as f32]
            })
            .collect();
        Self { factors, head_dim: shape.head_dim, pairing: shape.rope_pairing }
    }

    /// Sine and cosine of each pair of channels of each token.
    pub(crate) fn factors(&self) -> &[[f32; 2]] {
        &self.factors
    }

    /// Turns each token's keys from its position to 0.
    pub(super) fn back(&self, keys: &mut [f32]) {
        self.turn(keys, -1.0);
    }

    /// Turns each token's keys from 0 to its position.
    pub(super) fn forth(&self, keys: &mut [f32]) {
        self.turn(keys, 1.0);
    }

    fn turn(&self, keys: &mut [f32], direction: f32) {
        let pairs = self.head_dim / 2;
        for (key, factors) in
            keys.chunks_exact_mut(self.head_dim).zip(self.factors.chunks_exact(pairs.max(1)).cycle())
        {
            let mut rotate = |a: usize, b: usize, [sin, cos]: [f32; 2]| {
                let (x, y, sin) = (key[a], key[b], direction * sin);
                (key[a], key[b]) = (x * cos - y * sin, x * sin + y * cos);
            };
            for (pair, factors) in factors.iter().enumerate() {
                match self.pairing {
                    RopePairing::Adjacent => rotate(2 * pair, 2 * pair + 1, *factors),
                    RopePairing::Halves => rotate(pair, pair + pairs, *factors),
                }
            }
        }
    }
}
