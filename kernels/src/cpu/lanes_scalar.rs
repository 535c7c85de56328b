//! [`Lanes`] in plain Rust, for any processor. Slow where the target has no fused multiply-add.
//!
//! The larger operations stay calls: unrolled into the kernels they would cost minutes to compile.

use super::lanes::{LANES, Lanes};

/// Plain Rust lanes.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
fn pair_dot(a: [i32; 32], b: [u8; 32]) -> [i16; 16] {
    std::array::from_fn(|i| {
        let (j, k) = (2 * i, 2 * i + 1);
        (a[j] * i32::from(b[j] as i8) + a[k] * i32::from(b[k] as i8)) as i16
    })
}

impl Lanes for Scalar {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type H = [i16; 16];
    type B = [u8; 32];

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
    fn dot_unsigned(self, codes: Self::B, values: Self::B) -> Self::H {
        pair_dot(codes.map(i32::from), values)
    }

    #[inline(never)]
    fn dot_signed(self, codes: Self::B, values: Self::B) -> Self::H {
        pair_dot(codes.map(|code| i32::from(code as i8)), values)
    }

    #[inline(always)]
    fn zero_i16(self) -> Self::H {
        [0; 16]
    }

    #[inline(always)]
    fn splat_i16_pair(self, v: u32) -> Self::H {
        std::array::from_fn(|i| (v >> (16 * (i % 2))) as i16)
    }

    #[inline(never)]
    fn add_i16(self, a: Self::H, b: Self::H) -> Self::H {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn pin_i16(self, v: Self::H) -> Self::H {
        v
    }

    #[inline(never)]
    fn sum_pairs(self, v: Self::H) -> Self::I {
        std::array::from_fn(|i| i32::from(v[2 * i]) + i32::from(v[2 * i + 1]))
    }

    #[inline(always)]
    fn prefetch(self, _base: &[u8], _offset: usize) {}
}
