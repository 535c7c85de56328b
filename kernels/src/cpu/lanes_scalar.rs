//! [`Lanes`] in plain Rust, for any processor. Slow where the target has no fused multiply-add.
//!
//! The larger operations stay calls: unrolled into the kernels they would cost minutes to compile.

use super::lanes::{LANES, Lanes, Two};

/// Plain Rust lanes.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Lanes for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type H = [i32; LANES];
    type B = [u8; 32];
    type Wide = Two<Self>;

    const WHOLE: bool = true;

    #[inline(always)]
    fn wide(self) -> Two<Self> {
        Two(self)
    }

    #[inline(always)]
    fn splat(self, v: f32) -> Self::F {
        [v; LANES]
    }

    #[inline(always)]
    fn load(self, v: &[f32; LANES]) -> Self::F {
        *v
    }

    #[inline(always)]
    fn store(self, v: Self::F, out: &mut [f32; LANES]) {
        *out = v;
    }

    #[inline(never)]
    fn load_f16(self, v: &[u16; LANES]) -> Self::F {
        v.map(|bits| half::f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    fn load_bf16(self, v: &[u16; LANES]) -> Self::F {
        v.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    fn load_u8(self, v: &[u8; LANES]) -> Self::F {
        v.map(f32::from)
    }

    #[inline(always)]
    fn load_i8(self, v: &[u8; LANES]) -> Self::F {
        v.map(|byte| f32::from(byte as i8))
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }

    #[inline(never)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(never)]
    fn keep_first(self, v: Self::F, count: usize, other: f32) -> Self::F {
        std::array::from_fn(|i| if i < count { v[i] } else { other })
    }

    #[inline(never)]
    fn pow2(self, shifted: Self::F) -> Self::F {
        shifted.map(|v| f32::from_bits((v.to_bits() << 23).wrapping_add(127 << 23)))
    }

    #[inline(always)]
    fn splat_i32(self, v: i32) -> Self::I {
        [v; LANES]
    }

    #[inline(never)]
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(never)]
    fn to_f32(self, v: Self::I) -> Self::F {
        v.map(|v| v as f32)
    }

    #[inline(always)]
    fn load_bytes(self, v: &[u8; 32]) -> Self::B {
        *v
    }

    #[inline(always)]
    fn store_bytes(self, v: Self::B, out: &mut [u8; 32]) {
        *out = v;
    }

    #[inline(never)]
    fn low_nibbles(self, v: Self::B) -> Self::B {
        v.map(|byte| byte & 15)
    }

    #[inline(never)]
    fn high_nibbles(self, v: Self::B) -> Self::B {
        v.map(|byte| byte >> 4)
    }

    #[inline(never)]
    fn with_bit<const STEP: i32>(self, v: Self::B, plane: Self::B) -> Self::B {
        std::array::from_fn(|i| v[i] | (((plane[i] >> STEP) & 1) << 4))
    }

    #[inline(never)]
    fn with_bit_pair<const STEP: i32>(self, v: Self::B, plane: Self::B) -> Self::B {
        std::array::from_fn(|i| v[i] | (((plane[i] >> (2 * STEP)) & 3) << 4))
    }

    #[inline(never)]
    fn splat_quad(self, v: &[u8; 4]) -> Self::B {
        std::array::from_fn(|i| v[i % 4])
    }

    #[inline(never)]
    fn signed_codes(self, v: Self::B) -> Self::B {
        v.map(|byte| byte ^ 0x80)
    }

    #[inline(always)]
    fn start(self, word: u32) -> Self::H {
        [word as i32; LANES]
    }

    #[inline(never)]
    fn add_dot<const SIGNED: bool>(self, sums: Self::H, codes: Self::B, values: Self::B) -> Self::H {
        std::array::from_fn(|lane| {
            let four = lane * 4..lane * 4 + 4;
            let products = codes[four.clone()].iter().zip(&values[four]);
            sums[lane] + products.map(|(&code, &value)| i32::from(code) * i32::from(value as i8)).sum::<i32>()
        })
    }

    #[inline(always)]
    fn pin(self, v: Self::H) -> Self::H {
        v
    }

    #[inline(always)]
    fn total(self, v: Self::H) -> Self::I {
        v
    }

    #[inline(always)]
    fn prefetch(self, _base: &[u8], _offset: usize) {}
}
