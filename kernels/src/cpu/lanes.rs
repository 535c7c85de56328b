//! Eight or sixteen rows, keys or channels at a time: the vector operations every kernel is written in.
//!
//! A kernel is one generic function over [`Lanes`]; a lane owns one output and walks its sum in
//! scalar order. Each operation is exact or correctly rounded and lanes never mix, so an
//! implementation of this trait cannot change a bit of a result. This folder alone knows intrinsics.

use super::Isa;
use super::lanes_scalar::Scalar;

/// Lanes of a vector.
pub(crate) const LANES: usize = 8;

/// Eight lanes of f32 (`F`), of i32 (`I`), of running integer sums (`H`) and of four bytes (`B`).
///
/// A value of an implementing type is a proof that the processor has the instructions.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// Eight f32.
    type F: Copy;
    /// Eight i32.
    type I: Copy;
    /// Integer sums of products: an i32 to a lane where [`Lanes::WHOLE`], else two i16.
    type H: Copy;
    /// Thirty-two bytes, four to a lane.
    type B: Copy;
    /// Two vectors walked as one.
    type Wide: Wide;

    /// Whether `H` holds the sum of any number of products; if not, the caller keeps runs short.
    const WHOLE: bool;

    /// The operations on two vectors at once.
    fn wide(self) -> Self::Wide;

    /// `v` in all lanes.
    fn splat(self, v: f32) -> Self::F;
    /// Reads eight values.
    fn load(self, v: &[f32; LANES]) -> Self::F;
    /// Writes eight values.
    fn store(self, v: Self::F, out: &mut [f32; LANES]);
    /// Reads eight f16.
    fn load_f16(self, v: &[u16; LANES]) -> Self::F;
    /// Reads eight bf16.
    fn load_bf16(self, v: &[u16; LANES]) -> Self::F;
    /// Reads eight unsigned bytes.
    fn load_u8(self, v: &[u8; LANES]) -> Self::F;
    /// Reads eight signed bytes.
    fn load_i8(self, v: &[u8; LANES]) -> Self::F;
    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a` where `a > b`, else `b` (so `b` where either is NaN).
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a` where `a < b`, else `b` (so `b` where either is NaN).
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `v` in the first `count` lanes, `other` in the rest.
    fn keep_first(self, v: Self::F, count: usize, other: f32) -> Self::F;
    /// `2^n` from the float `1.5 * 2^23 + n`, for `n` in `-126..=127`.
    fn pow2(self, shifted: Self::F) -> Self::F;

    /// `v` in all lanes.
    fn splat_i32(self, v: i32) -> Self::I;
    /// `a + b`.
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I;
    /// Rounds to f32.
    fn to_f32(self, v: Self::I) -> Self::F;

    /// Reads 32 bytes.
    fn load_bytes(self, v: &[u8; 32]) -> Self::B;
    /// Writes 32 bytes.
    fn store_bytes(self, v: Self::B, out: &mut [u8; 32]);
    /// The low four bits of every byte.
    fn low_nibbles(self, v: Self::B) -> Self::B;
    /// The high four bits of every byte.
    fn high_nibbles(self, v: Self::B) -> Self::B;
    /// Adds bit `STEP` of every byte of `plane` to `v` as bit 4.
    fn with_bit<const STEP: i32>(self, v: Self::B, plane: Self::B) -> Self::B;
    /// Adds bits `2 * STEP` and `2 * STEP + 1` of every byte of `plane` to `v` as bits 4 and 5 (`STEP < 4`).
    fn with_bit_pair<const STEP: i32>(self, v: Self::B, plane: Self::B) -> Self::B;
    /// The same four bytes in all lanes.
    fn splat_quad(self, v: &[u8; 4]) -> Self::B;
    /// Signed bytes as [`Lanes::add_dot`] takes them: where `WHOLE`, 128 is added to each.
    fn signed_codes(self, v: Self::B) -> Self::B;
    /// Sums that start at `word`: one i32 where `WHOLE`, else two i16, the first in the low half.
    fn start(self, word: u32) -> Self::H;
    /// Adds the products of `codes` and signed `values` (`-127..=127`). Codes are unsigned; with `SIGNED` they come
    /// from [`Lanes::signed_codes`].
    fn add_dot<const SIGNED: bool>(self, sums: Self::H, codes: Self::B, values: Self::B) -> Self::H;
    /// `v`, computed before what follows: keeps the compiler from walking a tile row by row, which needs
    /// more registers than there are.
    fn pin(self, v: Self::H) -> Self::H;
    /// The sum of each lane.
    fn total(self, v: Self::H) -> Self::I;

    /// Asks for the cache line at `base + offset` ahead of its use; never faults.
    fn prefetch(self, base: &[u8], offset: usize);
}

/// Sixteen lanes: what a panel of activations is multiplied in. Each operation is that of [`Lanes`] on both halves.
pub(crate) trait Wide: Copy {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen i32.
    type I: Copy;
    /// Sixteen running sums.
    type H: Copy;
    /// Sixty-four bytes, four to a lane.
    type B: Copy;

    /// Tiles of activations that the registers have room for.
    const TILES: usize;
    /// (row, head) pairs of attention that they have room for.
    const PAIRS: usize;

    /// `v` in all lanes.
    fn splat(self, v: f32) -> Self::F;
    /// Reads sixteen values.
    fn load(self, v: &[[f32; LANES]; 2]) -> Self::F;
    /// Writes sixteen values.
    fn store(self, v: Self::F, out: &mut [[f32; LANES]; 2]);
    /// Reads sixteen f16.
    fn load_f16(self, v: &[[u16; LANES]; 2]) -> Self::F;
    /// Reads sixteen signed bytes.
    fn load_i8(self, v: &[[u8; LANES]; 2]) -> Self::F;
    /// As [`Lanes::max`].
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Zeros.
    fn zero_i32(self) -> Self::I;
    /// `a + b`.
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I;
    /// Rounds to f32.
    fn to_f32(self, v: Self::I) -> Self::F;
    /// Reads 64 bytes.
    fn load_bytes(self, v: &[[u8; 32]; 2]) -> Self::B;
    /// As [`Lanes::start`].
    fn start(self, word: u32) -> Self::H;
    /// As [`Lanes::add_dot`], with the same four values in all lanes.
    fn add_dot<const SIGNED: bool>(self, sums: Self::H, codes: Self::B, values: &[u8; 4]) -> Self::H;
    /// As [`Lanes::pin`].
    fn pin(self, v: Self::H) -> Self::H;
    /// As [`Lanes::total`].
    fn total(self, v: Self::H) -> Self::I;
}

/// [`Wide`] out of two vectors.
#[derive(Clone, Copy)]
pub(crate) struct Two<L>(pub(crate) L);

impl<L: Lanes> Wide for Two<L> {
    type F = [L::F; 2];
    type I = [L::I; 2];
    type H = [L::H; 2];
    type B = [L::B; 2];

    const TILES: usize = 1;
    const PAIRS: usize = 6;

    #[inline(always)]
    fn splat(self, v: f32) -> Self::F {
        [self.0.splat(v); 2]
    }

    #[inline(always)]
    fn load(self, v: &[[f32; LANES]; 2]) -> Self::F {
        [self.0.load(&v[0]), self.0.load(&v[1])]
    }

    #[inline(always)]
    fn store(self, v: Self::F, out: &mut [[f32; LANES]; 2]) {
        self.0.store(v[0], &mut out[0]);
        self.0.store(v[1], &mut out[1]);
    }

    #[inline(always)]
    fn load_f16(self, v: &[[u16; LANES]; 2]) -> Self::F {
        [self.0.load_f16(&v[0]), self.0.load_f16(&v[1])]
    }

    #[inline(always)]
    fn load_i8(self, v: &[[u8; LANES]; 2]) -> Self::F {
        [self.0.load_i8(&v[0]), self.0.load_i8(&v[1])]
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        [self.0.max(a[0], b[0]), self.0.max(a[1], b[1])]
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        [self.0.mul(a[0], b[0]), self.0.mul(a[1], b[1])]
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        [self.0.fma(a[0], b[0], c[0]), self.0.fma(a[1], b[1], c[1])]
    }

    #[inline(always)]
    fn zero_i32(self) -> Self::I {
        [self.0.splat_i32(0); 2]
    }

    #[inline(always)]
    fn add_i32(self, a: Self::I, b: Self::I) -> Self::I {
        [self.0.add_i32(a[0], b[0]), self.0.add_i32(a[1], b[1])]
    }

    #[inline(always)]
    fn to_f32(self, v: Self::I) -> Self::F {
        [self.0.to_f32(v[0]), self.0.to_f32(v[1])]
    }

    #[inline(always)]
    fn load_bytes(self, v: &[[u8; 32]; 2]) -> Self::B {
        [self.0.load_bytes(&v[0]), self.0.load_bytes(&v[1])]
    }

    #[inline(always)]
    fn start(self, word: u32) -> Self::H {
        [self.0.start(word); 2]
    }

    #[inline(always)]
    fn add_dot<const SIGNED: bool>(self, sums: Self::H, codes: Self::B, values: &[u8; 4]) -> Self::H {
        let values = self.0.splat_quad(values);
        [
            self.0.add_dot::<SIGNED>(sums[0], codes[0], values),
            self.0.add_dot::<SIGNED>(sums[1], codes[1], values),
        ]
    }

    #[inline(always)]
    fn pin(self, v: Self::H) -> Self::H {
        [self.0.pin(v[0]), self.0.pin(v[1])]
    }

    #[inline(always)]
    fn total(self, v: Self::H) -> Self::I {
        [self.0.total(v[0]), self.0.total(v[1])]
    }
}

/// A computation over lanes. `run` must be `#[inline(always)]`, and so must what it calls with lanes.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;
    /// Runs on one instruction set.
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Runs a kernel on an instruction set. An [`Isa`] is only accepted where the processor was found
/// to have it, see [`Isa::is_available`].
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa {
        Isa::Scalar => kernel.run(Scalar),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => match super::lanes_avx2::Avx2::detect() {
            Some(lanes) => lanes.run(kernel),
            None => kernel.run(Scalar),
        },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => match super::lanes_avx512::Avx512::detect() {
            Some(lanes) => lanes.run(kernel),
            None => kernel.run(Scalar),
        },
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 => kernel.run(Scalar),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation on the same random bits, results as bits.
    struct Probe {
        floats: [[f32; 8]; 3],
        halves: [u16; 8],
        codes: [u8; 32],
        values: [u8; 32],
    }

    impl Kernel for Probe {
        type Output = Vec<u32>;

        #[inline(always)]
        fn run<L: Lanes>(self, l: L) -> Vec<u32> {
            let mut out = Vec::new();
            let mut put = |v: L::F| {
                let mut t = [0.0; 8];
                l.store(v, &mut t);
                out.extend(t.map(f32::to_bits));
            };
            let [a, b, c] = self.floats.map(|v| l.load(&v));
            put(l.add(a, b));
            put(l.sub(a, b));
            put(l.mul(a, b));
            put(l.div(a, b));
            put(l.fma(a, b, c));
            put(l.max(a, b));
            put(l.min(a, b));
            for count in 0..=8 {
                put(l.keep_first(a, count, -1.0));
            }
            put(l.load_f16(&self.halves));
            put(l.load_bf16(&self.halves));
            let eight = self.codes.first_chunk().unwrap();
            put(l.load_u8(eight));
            put(l.load_i8(eight));
            put(l.pow2(l.add(l.splat(12_582_912.0), l.splat(-126.0))));
            put(l.pow2(l.add(l.splat(12_582_912.0), l.splat(127.0))));
            let (codes, values) = (l.load_bytes(&self.codes), l.load_bytes(&self.values));
            let int = |h: L::H| l.to_f32(l.add_i32(l.splat_i32(-77), l.total(h)));
            let zero = l.start(0);
            // `signed_codes` adds 128 to every code where sums are whole: taken off again by where the sum starts.
            let quads = self.values.as_chunks::<4>().0;
            let sum: i32 = quads[0].iter().map(|v| i32::from(*v as i8)).sum();
            let start = if L::WHOLE { l.start((-128 * sum) as u32) } else { zero };
            let splat = l.splat_quad(&quads[0]);
            put(int(l.add_dot::<true>(start, l.signed_codes(codes), splat)));
            let low = l.low_nibbles(codes);
            let high = l.high_nibbles(codes);
            put(int(l.add_dot::<false>(l.add_dot::<false>(zero, low, values), high, values)));
            put(int(l.add_dot::<false>(zero, l.with_bit::<0>(low, codes), values)));
            put(int(l.add_dot::<false>(zero, l.with_bit::<7>(low, codes), values)));
            put(int(l.add_dot::<false>(zero, l.with_bit_pair::<0>(low, codes), values)));
            put(int(l.add_dot::<false>(zero, l.with_bit_pair::<3>(high, codes), values)));
            put(int(l.add_dot::<false>(zero, low, splat)));
            let w = l.wide();
            let [a, b, c] = self.floats.map(|v| w.load(&[v, v.map(|v| v * 2.0)]));
            let mut put = |v: <L::Wide as Wide>::F| {
                let mut t = [[0.0; 8]; 2];
                w.store(v, &mut t);
                out.extend(t.into_iter().flatten().map(f32::to_bits));
            };
            put(w.mul(a, b));
            put(w.max(a, b));
            put(w.load_f16(&[self.halves, self.halves.map(|v| v ^ 0x8001)]));
            put(w.load_i8(&[*eight, eight.map(|v| v ^ 0x55)]));
            put(w.fma(a, w.splat(0.3), c));
            let both = w.load_bytes(&[self.codes.map(|v| v & 63), self.codes.map(|v| v >> 2)]);
            let sums = w.pin(w.add_dot::<false>(w.start(0), both, &quads[1]));
            put(w.to_f32(w.add_i32(w.zero_i32(), w.total(sums))));
            out
        }
    }

    #[test]
    fn i1_every_lane_operation_gives_the_same_bits_on_every_instruction_set() {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        for _ in 0..200 {
            let floats = [(); 3].map(|()| [(); 8].map(|()| (next() as f32 / 1e9 - 1.0) * 3.0));
            let halves = [(); 8].map(|()| (next() as u16) & 0xbbff);
            let codes = [(); 32].map(|()| next() as u8);
            let values = [(); 32].map(|()| ((next() % 255) as i32 - 127) as u8);
            let make = || Probe { floats, halves, codes, values };
            for isa in Isa::available() {
                assert_eq!(dispatch(Isa::Scalar, make()), dispatch(isa, make()), "{}", isa.name());
            }
        }
    }
}
