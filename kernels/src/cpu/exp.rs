//! The one `exp` of all kernels, lane by lane.

use super::lanes::Lanes;

/// Arguments are clamped to where the result is a normal number (and its double below is finite).
const LOW: f32 = -87.0;
const HIGH: f32 = 88.0;
/// `1.5 * 2^23`: adding it rounds to the nearest integer, kept in the low bits.
const SHIFT: f32 = 12_582_912.0;
/// `ln 2` in two parts, the first with few bits so that its multiples are exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Minimax coefficients of `(e^r - 1 - r) / r^2` on `|r| <= ln 2 / 2` (Remez; relative error of `e^r` 3e-9).
const C: [f32; 5] = [0.499_999_94, 0.166_665_21, 0.041_668_39, 0.008_368_745, 0.001_381_454];

/// `e^x`, within two units in the last place on `-87..=88` and clamped outside.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(l: L, x: L::F) -> L::F {
    let x = l.min(l.max(x, l.splat(LOW)), l.splat(HIGH));
    let shifted = l.fma(x, l.splat(std::f32::consts::LOG2_E), l.splat(SHIFT));
    let n = l.sub(shifted, l.splat(SHIFT));
    let r = l.fma(n, l.splat(-LN2_LOW), l.fma(n, l.splat(-LN2_HIGH), x));
    let mut q = l.splat(C[4]);
    for c in [C[3], C[2], C[1], C[0]] {
        q = l.fma(q, r, l.splat(c));
    }
    let p = l.fma(l.mul(r, r), q, l.add(r, l.splat(1.0)));
    l.mul(p, l.pow2(shifted))
}

#[cfg(test)]
mod tests {
    use super::super::lanes::{Kernel, dispatch};
    use super::super::{Isa, best_isa};
    use super::*;

    struct Exp([f32; 8]);

    impl Kernel for Exp {
        type Output = [f32; 8];

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) -> [f32; 8] {
            let mut out = [0.0; 8];
            l.store(exp(l, l.load(&self.0)), &mut out);
            out
        }
    }

    #[test]
    fn i1_exp_is_accurate_and_the_same_everywhere() {
        assert_eq!(LN2_HIGH.to_bits(), 0x3f31_8000, "0.693359375, nine bits");
        let mut worst = 0.0f64;
        for i in 0..100_000 {
            let base = -87.0 + 175.0 * i as f32 / 100_000.0;
            let x: [f32; 8] = std::array::from_fn(|j| base + j as f32 * 1e-4);
            let got = dispatch(best_isa(), Exp(x));
            if i % 50 == 0 {
                assert_eq!(dispatch(Isa::Scalar, Exp(x)).map(f32::to_bits), got.map(f32::to_bits));
            }
            for (x, got) in x.iter().zip(got) {
                let want = f64::from(*x).exp();
                if *x <= 88.0 {
                    worst = worst.max((f64::from(got) - want).abs() / want);
                }
            }
        }
        assert!(worst < 1.5e-7, "relative error {worst:e}");
        let edges = dispatch(
            best_isa(),
            Exp([0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY, -200.0, 200.0, 1e9, -1e9]),
        );
        assert_eq!(&edges[..2], &[1.0, 1.0]);
        assert!(edges.iter().all(|v| v.is_finite() && *v > 0.0));
    }
}
