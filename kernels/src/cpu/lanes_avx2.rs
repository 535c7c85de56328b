//! [`Lanes`] on AVX2 with FMA and F16C.

use std::arch::asm;
use std::arch::x86_64::*;

use super::lanes::{Kernel, LANES, Lanes, Two};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The proof, where the processor has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }

    /// Runs a kernel compiled for the instructions.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<K: Kernel>(lanes: Avx2, kernel: K) -> K::Output {
            kernel.run(lanes)
        }
        // SAFETY: `self` exists only where `detect` found the features.
        unsafe { compiled(self, kernel) }
    }
}

/// Wraps calls of register-only intrinsics and of loads from references of the right size.
macro_rules! with_avx2 {
    ($($body:tt)*) => {
        // SAFETY: a value of `Avx2` exists only where the features were detected, and memory is
        // reached only through references to arrays of the width read or written, unaligned.
        unsafe { $($body)* }
    };
}

/// An empty instruction sequence that needs `v` in a register.
#[target_feature(enable = "avx2")]
#[inline]
fn pin(v: __m256i) -> __m256i {
    let mut v = v;
    // SAFETY: no instructions.
    unsafe { asm!("/* {0} */", inout(ymm_reg) v, options(nomem, nostack, preserves_flags)) };
    v
}

impl Lanes for Avx2 {
    type F = __m256;
    type I = __m256i;
    type H = __m256i;
    type B = __m256i;
    type Wide = Two<Self>;

    const WHOLE: bool = false;

    #[inline(always)]
    fn wide(self) -> Two<Self> {
        Two(self)
    }

    #[inline(always)]
    fn splat(self, v: f32) -> __m256 {
        with_avx2!(_mm256_set1_ps(v))
    }

    #[inline(always)]
    fn load(self, v: &[f32; LANES]) -> __m256 {
        with_avx2!(_mm256_loadu_ps(v.as_ptr()))
    }

    #[inline(always)]
    fn store(self, v: __m256, out: &mut [f32; LANES]) {
        with_avx2!(_mm256_storeu_ps(out.as_mut_ptr(), v));
    }

    #[inline(always)]
    fn load_f16(self, v: &[u16; LANES]) -> __m256 {
        with_avx2!(_mm256_cvtph_ps(_mm_loadu_si128(v.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16(self, v: &[u16; LANES]) -> __m256 {
        with_avx2!({
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(v.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn load_u8(self, v: &[u8; LANES]) -> __m256 {
        with_avx2!(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(v.as_ptr().cast()))))
    }

    #[inline(always)]
    fn load_i8(self, v: &[u8; LANES]) -> __m256 {
        with_avx2!(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(v.as_ptr().cast()))))
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        with_avx2!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        with_avx2!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        with_avx2!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        with_avx2!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        with_avx2!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        with_avx2!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        with_avx2!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn keep_first(self, v: __m256, count: usize, other: f32) -> __m256 {
        with_avx2!({
            let index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(count.min(LANES) as i32), index);
            _mm256_blendv_ps(_mm256_set1_ps(other), v, _mm256_castsi256_ps(kept))
        })
    }

    #[inline(always)]
    fn pow2(self, shifted: __m256) -> __m256 {
        with_avx2!({
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
            _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)))
        })
    }

    #[inline(always)]
    fn splat_i32(self, v: i32) -> __m256i {
        with_avx2!(_mm256_set1_epi32(v))
    }

    #[inline(always)]
    fn add_i32(self, a: __m256i, b: __m256i) -> __m256i {
        with_avx2!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn to_f32(self, v: __m256i) -> __m256 {
        with_avx2!(_mm256_cvtepi32_ps(v))
    }

    #[inline(always)]
    fn load_bytes(self, v: &[u8; 32]) -> __m256i {
        with_avx2!(_mm256_loadu_si256(v.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_bytes(self, v: __m256i, out: &mut [u8; 32]) {
        with_avx2!(_mm256_storeu_si256(out.as_mut_ptr().cast(), v));
    }

    #[inline(always)]
    fn low_nibbles(self, v: __m256i) -> __m256i {
        with_avx2!(_mm256_and_si256(v, _mm256_set1_epi8(15)))
    }

    #[inline(always)]
    fn high_nibbles(self, v: __m256i) -> __m256i {
        with_avx2!(_mm256_and_si256(_mm256_srli_epi16::<4>(v), _mm256_set1_epi8(15)))
    }

    #[inline(always)]
    fn with_bit<const STEP: i32>(self, v: __m256i, plane: __m256i) -> __m256i {
        with_avx2!({
            let moved = match STEP {
                0 => _mm256_slli_epi16::<4>(plane),
                1 => _mm256_slli_epi16::<3>(plane),
                2 => _mm256_slli_epi16::<2>(plane),
                3 => _mm256_slli_epi16::<1>(plane),
                4 => plane,
                5 => _mm256_srli_epi16::<1>(plane),
                6 => _mm256_srli_epi16::<2>(plane),
                _ => _mm256_srli_epi16::<3>(plane),
            };
            _mm256_or_si256(v, _mm256_and_si256(moved, _mm256_set1_epi8(1 << 4)))
        })
    }

    #[inline(always)]
    fn with_bit_pair<const STEP: i32>(self, v: __m256i, plane: __m256i) -> __m256i {
        with_avx2!({
            let moved = match STEP {
                0 => _mm256_slli_epi16::<4>(plane),
                1 => _mm256_slli_epi16::<2>(plane),
                2 => plane,
                _ => _mm256_srli_epi16::<2>(plane),
            };
            _mm256_or_si256(v, _mm256_and_si256(moved, _mm256_set1_epi8(3 << 4)))
        })
    }

    #[inline(always)]
    fn splat_quad(self, v: &[u8; 4]) -> __m256i {
        with_avx2!(_mm256_set1_epi32(i32::from_le_bytes(*v)))
    }

    #[inline(always)]
    fn signed_codes(self, v: __m256i) -> __m256i {
        v
    }

    #[inline(always)]
    fn start(self, word: u32) -> __m256i {
        with_avx2!(_mm256_set1_epi32(word as i32))
    }

    #[inline(always)]
    fn add_dot<const SIGNED: bool>(self, sums: __m256i, codes: __m256i, values: __m256i) -> __m256i {
        with_avx2!({
            let products = if SIGNED {
                // |code| <= 128 as unsigned times +-value: a pair is at most 2 * 128 * 127 < 2^15.
                _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(values, codes))
            } else {
                _mm256_maddubs_epi16(codes, values)
            };
            _mm256_add_epi16(sums, products)
        })
    }

    #[inline(always)]
    fn pin(self, v: __m256i) -> __m256i {
        with_avx2!(pin(v))
    }

    #[inline(always)]
    fn total(self, v: __m256i) -> __m256i {
        with_avx2!(_mm256_madd_epi16(v, _mm256_set1_epi16(1)))
    }

    #[inline(always)]
    fn prefetch(self, base: &[u8], offset: usize) {
        // A prefetch reads nothing and faults nowhere, so the address may lie past the slice.
        with_avx2!(_mm_prefetch::<_MM_HINT_T0>(base.as_ptr().wrapping_add(offset).cast()));
    }
}
