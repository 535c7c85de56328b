//! [`Lanes`] on AVX-512 with VNNI: vectors of eight as on AVX2, but 32 registers and sums of four products in one
//! instruction; [`Wide`] in vectors of sixteen.

use std::arch::asm;
use std::arch::x86_64::*;

use super::lanes::{Kernel, LANES, Lanes, Wide};
use super::lanes_avx2::Avx2;

/// Proof that the processor has AVX-512 (F, BW, VL, VNNI) and what [`Avx2`] needs.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(Avx2);

impl Avx512 {
    /// The proof, where the processor has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        Avx2::detect().filter(|_| found).map(Self)
    }

    /// Runs a kernel compiled for the instructions.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
        fn compiled<K: Kernel>(lanes: Avx512, kernel: K) -> K::Output {
            kernel.run(lanes)
        }
        // SAFETY: `self` exists only where `detect` found the features.
        unsafe { compiled(self, kernel) }
    }
}

/// Wraps calls of register-only intrinsics and of loads from references of the right size.
macro_rules! with_avx512 {
    ($($body:tt)*) => {
        // SAFETY: a value of `Avx512` exists only where the features were detected, and memory is
        // reached only through references to arrays of the width read or written, unaligned.
        unsafe { $($body)* }
    };
}

/// An empty instruction sequence that needs `v` in a register.
#[target_feature(enable = "avx512f,avx512vl")]
#[inline]
fn pin(v: __m256i) -> __m256i {
    let mut v = v;
    // SAFETY: no instructions.
    unsafe { asm!("/* {0} */", inout(ymm_reg) v, options(nomem, nostack, preserves_flags)) };
    v
}

/// As [`pin`], for sixteen lanes.
#[target_feature(enable = "avx512f")]
#[inline]
fn pin_wide(v: __m512i) -> __m512i {
    let mut v = v;
    // SAFETY: no instructions.
    unsafe { asm!("/* {0} */", inout(zmm_reg) v, options(nomem, nostack, preserves_flags)) };
    v
}

/// Operations that are those of [`Avx2`].
macro_rules! as_avx2 {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(
            #[inline(always)]
            fn $name(self, $($arg: $type),*) $(-> $result)? {
                self.0.$name($($arg),*)
            }
        )*
    };
}

impl Lanes for Avx512 {
    type F = __m256;
    type I = __m256i;
    type H = __m256i;
    type B = __m256i;
    type Wide = Self;

    const WHOLE: bool = true;

    as_avx2! {
        fn splat(v: f32) -> __m256;
        fn load(v: &[f32; LANES]) -> __m256;
        fn store(v: __m256, out: &mut [f32; LANES]);
        fn load_f16(v: &[u16; LANES]) -> __m256;
        fn load_bf16(v: &[u16; LANES]) -> __m256;
        fn load_u8(v: &[u8; LANES]) -> __m256;
        fn load_i8(v: &[u8; LANES]) -> __m256;
        fn add(a: __m256, b: __m256) -> __m256;
        fn sub(a: __m256, b: __m256) -> __m256;
        fn mul(a: __m256, b: __m256) -> __m256;
        fn div(a: __m256, b: __m256) -> __m256;
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256;
        fn max(a: __m256, b: __m256) -> __m256;
        fn min(a: __m256, b: __m256) -> __m256;
        fn keep_first(v: __m256, count: usize, other: f32) -> __m256;
        fn pow2(shifted: __m256) -> __m256;
        fn splat_i32(v: i32) -> __m256i;
        fn add_i32(a: __m256i, b: __m256i) -> __m256i;
        fn to_f32(v: __m256i) -> __m256;
        fn load_bytes(v: &[u8; 32]) -> __m256i;
        fn store_bytes(v: __m256i, out: &mut [u8; 32]);
        fn low_nibbles(v: __m256i) -> __m256i;
        fn high_nibbles(v: __m256i) -> __m256i;
        fn splat_quad(v: &[u8; 4]) -> __m256i;
        fn prefetch(base: &[u8], offset: usize);
    }

    #[inline(always)]
    fn wide(self) -> Self {
        self
    }

    #[inline(always)]
    fn with_bit<const STEP: i32>(self, v: __m256i, plane: __m256i) -> __m256i {
        self.0.with_bit::<STEP>(v, plane)
    }

    #[inline(always)]
    fn with_bit_pair<const STEP: i32>(self, v: __m256i, plane: __m256i) -> __m256i {
        self.0.with_bit_pair::<STEP>(v, plane)
    }

    #[inline(always)]
    fn signed_codes(self, v: __m256i) -> __m256i {
        with_avx512!(_mm256_xor_si256(v, _mm256_set1_epi8(-128)))
    }

    #[inline(always)]
    fn start(self, word: u32) -> __m256i {
        with_avx512!(_mm256_set1_epi32(word as i32))
    }

    #[inline(always)]
    fn add_dot<const SIGNED: bool>(self, sums: __m256i, codes: __m256i, values: __m256i) -> __m256i {
        with_avx512!(_mm256_dpbusd_epi32(sums, codes, values))
    }

    #[inline(always)]
    fn pin(self, v: __m256i) -> __m256i {
        with_avx512!(pin(v))
    }

    #[inline(always)]
    fn total(self, v: __m256i) -> __m256i {
        v
    }
}

impl Wide for Avx512 {
    type F = __m512;
    type I = __m512i;
    type H = __m512i;
    type B = __m512i;

    const TILES: usize = 2;
    const PAIRS: usize = 12;

    #[inline(always)]
    fn splat(self, v: f32) -> __m512 {
        with_avx512!(_mm512_set1_ps(v))
    }

    #[inline(always)]
    fn load(self, v: &[[f32; LANES]; 2]) -> __m512 {
        with_avx512!(_mm512_loadu_ps(v.as_ptr().cast()))
    }

    #[inline(always)]
    fn store(self, v: __m512, out: &mut [[f32; LANES]; 2]) {
        with_avx512!(_mm512_storeu_ps(out.as_mut_ptr().cast(), v));
    }

    #[inline(always)]
    fn load_f16(self, v: &[[u16; LANES]; 2]) -> __m512 {
        with_avx512!(_mm512_cvtph_ps(_mm256_loadu_si256(v.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_i8(self, v: &[[u8; LANES]; 2]) -> __m512 {
        with_avx512!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(v.as_ptr().cast()))))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        with_avx512!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        with_avx512!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        with_avx512!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn zero_i32(self) -> __m512i {
        with_avx512!(_mm512_setzero_si512())
    }

    #[inline(always)]
    fn add_i32(self, a: __m512i, b: __m512i) -> __m512i {
        with_avx512!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn to_f32(self, v: __m512i) -> __m512 {
        with_avx512!(_mm512_cvtepi32_ps(v))
    }

    #[inline(always)]
    fn load_bytes(self, v: &[[u8; 32]; 2]) -> __m512i {
        with_avx512!(_mm512_loadu_si512(v.as_ptr().cast()))
    }

    #[inline(always)]
    fn start(self, word: u32) -> __m512i {
        with_avx512!(_mm512_set1_epi32(word as i32))
    }

    #[inline(always)]
    fn add_dot<const SIGNED: bool>(self, sums: __m512i, codes: __m512i, values: &[u8; 4]) -> __m512i {
        with_avx512!(_mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(i32::from_le_bytes(*values))))
    }

    #[inline(always)]
    fn pin(self, v: __m512i) -> __m512i {
        with_avx512!(pin_wide(v))
    }

    #[inline(always)]
    fn total(self, v: __m512i) -> __m512i {
        v
    }
}
