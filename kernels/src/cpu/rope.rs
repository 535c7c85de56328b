//! `rope`: rotary position embedding, and its table of sines and cosines.
//!
//! The table is computed in f64 by a portable library, so it holds the same bits on every machine.

use super::buffer::Buffer;
use super::lanes::{Kernel, Lanes};
use super::workers::{Disjoint, Workers};
use crate::backend::RopePairing;
use crate::error::KernelError;

/// Most positions of a table.
const MAX_POSITIONS: usize = 1 << 22;

/// Cosines and sines per position: `dims / 2` of each.
pub struct CpuRope {
    pub(super) dims: usize,
    pub(super) positions: usize,
    table: Buffer<f32>,
}

impl CpuRope {
    pub(super) fn new(
        workers: &Workers,
        base: f32,
        dims: usize,
        positions: usize,
    ) -> Result<Self, KernelError> {
        let refused = || KernelError::Size { what: "rope table".to_string(), rows: positions, cols: dims };
        if dims == 0 || !dims.is_multiple_of(2) || !(base.is_finite() && base > 0.0) {
            return Err(refused());
        }
        if positions == 0 || positions > MAX_POSITIONS {
            return Err(refused());
        }
        let len = positions.checked_mul(dims).ok_or_else(refused)?;
        let mut table = Buffer::zeroed("rope table", len)?;
        let half = dims / 2;
        let frequencies: Vec<f64> =
            (0..half).map(|i| libm::pow(f64::from(base), -2.0 * i as f64 / dims as f64)).collect();
        let shared = Disjoint::new(&mut table);
        let chunk = 256;
        workers.run(positions.div_ceil(chunk), &|item| {
            for position in item * chunk..((item + 1) * chunk).min(positions) {
                // SAFETY: a position belongs to one item.
                let (cosines, sines) = unsafe {
                    (shared.slice(position * dims, half), shared.slice(position * dims + half, half))
                };
                for ((frequency, cos), sin) in frequencies.iter().zip(cosines).zip(sines) {
                    let (s, c) = libm::sincos(position as f64 * frequency);
                    (*cos, *sin) = (c as f32, s as f32);
                }
            }
        });
        Ok(Self { dims, positions, table })
    }

    /// All factors, for a device that keeps its own copy: per position the cosines, then the sines.
    pub(crate) fn values_of(base: f32, dims: usize, positions: usize) -> Result<Buffer<f32>, KernelError> {
        Ok(Self::new(&Workers::new(1)?, base, dims, positions)?.table)
    }

    /// Cosines and sines of a position.
    fn at(&self, position: usize) -> (&[f32], &[f32]) {
        self.table[position * self.dims..][..self.dims].split_at(self.dims / 2)
    }
}

/// Rotates the heads of some rows.
pub(super) struct Rotate<'a> {
    /// Rows of `heads * dims` channels, one per position.
    pub(super) x: &'a mut [f32],
    /// Factors; `dims` channels of each head turn.
    pub(super) rope: &'a CpuRope,
    /// Which channels form a pair.
    pub(super) pairing: RopePairing,
    /// Position of each row, inside the table.
    pub(super) positions: &'a [u32],
}

#[inline(always)]
fn turn(a: &mut f32, b: &mut f32, cos: f32, sin: f32) {
    let (x, y) = (*a, *b);
    *a = x.mul_add(cos, -(y * sin));
    *b = x.mul_add(sin, y * cos);
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        let dims = self.rope.dims;
        let width = self.x.len() / self.positions.len().max(1);
        for (row, &position) in self.x.chunks_exact_mut(width.max(1)).zip(self.positions) {
            let (cosines, sines) = self.rope.at(position as usize);
            for head in row.chunks_exact_mut(dims) {
                match self.pairing {
                    RopePairing::Halves => {
                        let (first, second) = head.split_at_mut(dims / 2);
                        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
                            turn(a, b, *cos, *sin);
                        }
                    }
                    RopePairing::Adjacent => {
                        for (([a, b], cos), sin) in
                            head.as_chunks_mut::<2>().0.iter_mut().zip(cosines).zip(sines)
                        {
                            turn(a, b, *cos, *sin);
                        }
                    }
                }
            }
        }
    }
}
