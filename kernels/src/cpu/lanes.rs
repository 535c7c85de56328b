//! Eight rows, keys or channels at a time: the vector operations every kernel is written in.
//!
//! A kernel is one generic function over [`Lanes`]; a lane owns one output and walks its sum in
//! scalar order. Each operation is exact or correctly rounded and lanes never mix, so an
//! implementation of this trait cannot change a bit of a result. This folder alone knows intrinsics.

use super::Isa;
use super::lanes_scalar::Scalar;

/// Lanes of a vector.
pub(crate) const LANES: usize = 8;

/// Eight lanes of f32 (`F`), of i32 (`I`), of two i16 (`H`) and of four bytes (`B`).
///
/// A value of an implementing type is a proof that the processor has the instructions.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// Eight f32.
    type F: Copy;
    /// Eight i32.
    type I: Copy;
    /// Sixteen i16, two to a lane.
    type H: Copy;
    /// Thirty-two bytes, four to a lane.
    type B: Copy;

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
    /// Sums of two neighbouring products of unsigned `codes` and signed `values`. The caller keeps sums within i16.
    fn dot_unsigned(self, codes: Self::B, values: Self::B) -> Self::H;
    /// Sums of two neighbouring products of signed `codes` and signed `values` (`-127..=127`).
    fn dot_signed(self, codes: Self::B, values: Self::B) -> Self::H;
    /// Zero in all lanes.
    fn zero_i16(self) -> Self::H;
    /// The low and the high i16 of `v` in all lanes.
    fn splat_i16_pair(self, v: u32) -> Self::H;
    /// `a + b`, wrapping around.
    fn add_i16(self, a: Self::H, b: Self::H) -> Self::H;
    /// `v`, computed before what follows: keeps the compiler from walking a tile row by row, which needs
    /// more registers than there are.
    fn pin_i16(self, v: Self::H) -> Self::H;
    /// Adds the two i16 of each lane.
    fn sum_pairs(self, v: Self::H) -> Self::I;

    /// Asks for the cache line at `base + offset` ahead of its use; never faults.
    fn prefetch(self, base: &[u8], offset: usize);
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
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 => kernel.run(Scalar),
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
            let int = |h: L::H| l.to_f32(l.add_i32(l.splat_i32(-77), l.sum_pairs(h)));
            put(int(l.dot_signed(codes, values)));
            put(int(l.add_i16(l.splat_i16_pair(0x8123_7fff), l.dot_signed(codes, values))));
            let low = l.low_nibbles(codes);
            let high = l.high_nibbles(codes);
            put(int(l.add_i16(l.dot_unsigned(low, values), l.dot_unsigned(high, values))));
            put(int(l.dot_unsigned(l.with_bit::<0>(low, codes), values)));
            put(int(l.dot_unsigned(l.with_bit::<7>(low, codes), values)));
            put(int(l.dot_unsigned(l.with_bit_pair::<0>(low, codes), values)));
            put(int(l.dot_unsigned(l.with_bit_pair::<3>(high, codes), values)));
            put(int(l.dot_unsigned(low, l.splat_quad(self.values.first_chunk().unwrap()))));
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
            assert_eq!(dispatch(Isa::Scalar, make()), dispatch(super::super::best_isa(), make()));
        }
    }
}
