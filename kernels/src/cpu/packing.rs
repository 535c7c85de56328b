//! How quantised weights lie in memory, and how a kernel takes them apart.
//!
//! Eight rows form a *group*, 32 inputs of a group form a *block*. A lane owns a row: a vector of 32
//! bytes is one *step*, four inputs of each of the eight rows. Steps `j` and `j + 4` share bytes, `j` in
//! the low nibbles; bits above four lie in planes of their own, one or two bits per step. A block is
//! its codes followed by its scales; formats with scales in two levels have a header every
//! eight blocks. Values are `scale * (code - offset)` (symmetric) or `scale * code + min` (affine).

use std::marker::PhantomData;

use super::lanes::Lanes;
use crate::formats::TensorType;

/// Rows of a group, one per lane.
pub(crate) const GROUP_ROWS: usize = 8;
/// Inputs of a block.
pub(crate) const BLOCK: usize = 32;
/// Steps of a block, four inputs each.
pub(crate) const STEPS: usize = 8;
/// Bytes of one step.
pub(crate) const STEP_BYTES: usize = 32;

/// The step at `index` of a run of steps; zeros when out of range.
#[inline(always)]
fn step_at(bytes: &[u8], index: usize) -> &[u8; STEP_BYTES] {
    bytes.get(index * STEP_BYTES..).and_then(|rest| rest.first_chunk()).unwrap_or(&[0; STEP_BYTES])
}

/// Eight f16 at byte `at`; zeros when out of range.
#[inline(always)]
fn halves_at(bytes: &[u8], at: usize) -> [u16; 8] {
    let raw: &[u8; 16] = bytes.get(at..).and_then(|rest| rest.first_chunk()).unwrap_or(&[0; 16]);
    std::array::from_fn(|i| u16::from_le_bytes([raw[2 * i], raw[2 * i + 1]]))
}

/// Eight bytes at byte `at`; zeros when out of range.
#[inline(always)]
fn eight_at(bytes: &[u8], at: usize) -> &[u8; 8] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).unwrap_or(&[0; 8])
}

/// How the codes of a block are stored.
pub(crate) trait Codes: Copy + Send + Sync + 'static {
    /// Bytes of a block's codes.
    const BYTES: usize;
    /// Bit planes above the nibbles.
    const PLANES: usize;
    /// Largest code.
    const MAX: i32;
    /// Whether a code is a signed byte.
    const SIGNED: bool;
    /// The steps of a block.
    fn steps<L: Lanes>(l: L, bytes: &[u8]) -> [L::B; STEPS];
}

/// Codes up to 15.
#[derive(Clone, Copy)]
pub(crate) struct Bits4;
/// Codes up to 31: nibbles and one plane.
#[derive(Clone, Copy)]
pub(crate) struct Bits5;
/// Codes up to 63: nibbles and two planes.
#[derive(Clone, Copy)]
pub(crate) struct Bits6;
/// Signed bytes.
#[derive(Clone, Copy)]
pub(crate) struct Bits8;

#[inline(always)]
fn nibble_steps<L: Lanes>(l: L, bytes: &[u8]) -> [L::B; STEPS] {
    let v = [
        l.load_bytes(step_at(bytes, 0)),
        l.load_bytes(step_at(bytes, 1)),
        l.load_bytes(step_at(bytes, 2)),
        l.load_bytes(step_at(bytes, 3)),
    ];
    [
        l.low_nibbles(v[0]),
        l.low_nibbles(v[1]),
        l.low_nibbles(v[2]),
        l.low_nibbles(v[3]),
        l.high_nibbles(v[0]),
        l.high_nibbles(v[1]),
        l.high_nibbles(v[2]),
        l.high_nibbles(v[3]),
    ]
}

impl Codes for Bits4 {
    const BYTES: usize = 4 * STEP_BYTES;
    const PLANES: usize = 0;
    const MAX: i32 = 15;
    const SIGNED: bool = false;

    #[inline(always)]
    fn steps<L: Lanes>(l: L, bytes: &[u8]) -> [L::B; STEPS] {
        nibble_steps(l, bytes)
    }
}

impl Codes for Bits5 {
    const BYTES: usize = 5 * STEP_BYTES;
    const PLANES: usize = 1;
    const MAX: i32 = 31;
    const SIGNED: bool = false;

    #[inline(always)]
    fn steps<L: Lanes>(l: L, bytes: &[u8]) -> [L::B; STEPS] {
        let v = nibble_steps(l, bytes);
        let plane = l.load_bytes(step_at(bytes, 4));
        [
            l.with_bit::<0>(v[0], plane),
            l.with_bit::<1>(v[1], plane),
            l.with_bit::<2>(v[2], plane),
            l.with_bit::<3>(v[3], plane),
            l.with_bit::<4>(v[4], plane),
            l.with_bit::<5>(v[5], plane),
            l.with_bit::<6>(v[6], plane),
            l.with_bit::<7>(v[7], plane),
        ]
    }
}

impl Codes for Bits6 {
    const BYTES: usize = 6 * STEP_BYTES;
    const PLANES: usize = 2;
    const MAX: i32 = 63;
    const SIGNED: bool = false;

    #[inline(always)]
    fn steps<L: Lanes>(l: L, bytes: &[u8]) -> [L::B; STEPS] {
        let v = nibble_steps(l, bytes);
        let (first, second) = (l.load_bytes(step_at(bytes, 4)), l.load_bytes(step_at(bytes, 5)));
        [
            l.with_bit_pair::<0>(v[0], first),
            l.with_bit_pair::<1>(v[1], first),
            l.with_bit_pair::<2>(v[2], first),
            l.with_bit_pair::<3>(v[3], first),
            l.with_bit_pair::<0>(v[4], second),
            l.with_bit_pair::<1>(v[5], second),
            l.with_bit_pair::<2>(v[6], second),
            l.with_bit_pair::<3>(v[7], second),
        ]
    }
}

impl Codes for Bits8 {
    const BYTES: usize = 8 * STEP_BYTES;
    const PLANES: usize = 0;
    const MAX: i32 = 128;
    const SIGNED: bool = true;

    #[inline(always)]
    fn steps<L: Lanes>(l: L, bytes: &[u8]) -> [L::B; STEPS] {
        let mut steps = [l.signed_codes(l.load_bytes(step_at(bytes, 0))); STEPS];
        for (j, step) in steps.iter_mut().enumerate().skip(1) {
            *step = l.signed_codes(l.load_bytes(step_at(bytes, j)));
        }
        steps
    }
}

/// How the scales of a block are stored. `header` is that of the span, `bytes` those of the block.
pub(crate) trait Scales: Copy + Send + Sync + 'static {
    /// Bytes per block.
    const BYTES: usize;
    /// Bytes per span.
    const HEADER: usize;
    /// Blocks of a span.
    const SPAN: usize;
    /// Scales per row of a block.
    const SUBS: usize;
    /// Whether there is a minimum.
    const AFFINE: bool;
    /// The scale of each row, for each part of the block (the second is unused with one part).
    fn scales<L: Lanes>(l: L, header: &[u8], bytes: &[u8]) -> [L::F; 2];
    /// The minimum of each row.
    fn minima<L: Lanes>(l: L, header: &[u8], bytes: &[u8]) -> L::F;
}

/// One f16 scale.
#[derive(Clone, Copy)]
pub(crate) struct Scale;
/// An f16 scale and an f16 minimum.
#[derive(Clone, Copy)]
pub(crate) struct ScaleMin;
/// 8-bit multiples of f16 scale and (negative) minimum units kept per span.
#[derive(Clone, Copy)]
pub(crate) struct SpanScaleMin;
/// Two signed 8-bit multiples of an f16 scale unit kept per span.
#[derive(Clone, Copy)]
pub(crate) struct SpanScalePair;

impl Scales for Scale {
    const BYTES: usize = 16;
    const HEADER: usize = 0;
    const SPAN: usize = 1;
    const SUBS: usize = 1;
    const AFFINE: bool = false;

    #[inline(always)]
    fn scales<L: Lanes>(l: L, _header: &[u8], bytes: &[u8]) -> [L::F; 2] {
        [l.load_f16(&halves_at(bytes, 0)); 2]
    }

    #[inline(always)]
    fn minima<L: Lanes>(l: L, _header: &[u8], _bytes: &[u8]) -> L::F {
        l.splat(0.0)
    }
}

impl Scales for ScaleMin {
    const BYTES: usize = 32;
    const HEADER: usize = 0;
    const SPAN: usize = 1;
    const SUBS: usize = 1;
    const AFFINE: bool = true;

    #[inline(always)]
    fn scales<L: Lanes>(l: L, _header: &[u8], bytes: &[u8]) -> [L::F; 2] {
        [l.load_f16(&halves_at(bytes, 0)); 2]
    }

    #[inline(always)]
    fn minima<L: Lanes>(l: L, _header: &[u8], bytes: &[u8]) -> L::F {
        l.load_f16(&halves_at(bytes, 16))
    }
}

impl Scales for SpanScaleMin {
    const BYTES: usize = 16;
    const HEADER: usize = 32;
    const SPAN: usize = 8;
    const SUBS: usize = 1;
    const AFFINE: bool = true;

    #[inline(always)]
    fn scales<L: Lanes>(l: L, header: &[u8], bytes: &[u8]) -> [L::F; 2] {
        [l.mul(l.load_f16(&halves_at(header, 0)), l.load_u8(eight_at(bytes, 0))); 2]
    }

    #[inline(always)]
    fn minima<L: Lanes>(l: L, header: &[u8], bytes: &[u8]) -> L::F {
        l.mul(l.load_f16(&halves_at(header, 16)), l.load_u8(eight_at(bytes, 8)))
    }
}

impl Scales for SpanScalePair {
    const BYTES: usize = 16;
    const HEADER: usize = 16;
    const SPAN: usize = 8;
    const SUBS: usize = 2;
    const AFFINE: bool = false;

    #[inline(always)]
    fn scales<L: Lanes>(l: L, header: &[u8], bytes: &[u8]) -> [L::F; 2] {
        let unit = l.load_f16(&halves_at(header, 0));
        [l.mul(unit, l.load_i8(eight_at(bytes, 0))), l.mul(unit, l.load_i8(eight_at(bytes, 8)))]
    }

    #[inline(always)]
    fn minima<L: Lanes>(l: L, _header: &[u8], _bytes: &[u8]) -> L::F {
        l.splat(0.0)
    }
}

/// A storage format of packed weights, known at compile time.
pub(crate) trait Packing: Copy + Send + Sync + 'static {
    /// Its codes.
    type Codes: Codes;
    /// Its scales.
    type Scales: Scales;
    /// What is subtracted from a code of a symmetric format.
    const OFFSET: i32;
    /// Steps of a part of the block whose products fit one i16 sum: two products a step, of at most
    /// `MAX * 127` each. With an offset only the sum of `code - OFFSET` has to fit, because i16 sums wrap
    /// around and start at minus `OFFSET` times the sum of the activations.
    const SHORT_RUN: usize = {
        let largest = if Self::OFFSET == 0 { Self::Codes::MAX } else { Self::OFFSET };
        let (fit, part) = (32_767 / (2 * 127 * largest), STEPS / Self::Scales::SUBS);
        let mut run = part;
        while run > fit as usize {
            run /= 2;
        }
        assert!(Self::OFFSET == 0 || run == part, "a symmetric format needs one run");
        run
    };
    /// Words of metadata per row and block of activations, see [`super::quantise::Sums::words`].
    const WORDS: usize = if Self::Scales::AFFINE { 2 } else { 1 + Self::Scales::SUBS };
    /// Steps that are summed before they are widened: all of a part where sums are i32.
    #[inline(always)]
    fn run<L: Lanes>() -> usize {
        if L::WHOLE { STEPS / Self::Scales::SUBS } else { Self::SHORT_RUN }
    }
    /// Sizes for code that does not compute.
    const LAYOUT: Layout = Layout {
        code_bytes: Self::Codes::BYTES,
        planes: Self::Codes::PLANES,
        signed: Self::Codes::SIGNED,
        scale_bytes: Self::Scales::BYTES,
        header: Self::Scales::HEADER,
        span: Self::Scales::SPAN,
        subs: Self::Scales::SUBS,
        affine: Self::Scales::AFFINE,
        offset: Self::OFFSET,
    };
}

/// Codes `C` with scales `S`.
#[derive(Clone, Copy)]
pub(crate) struct Packed<C, S, const OFFSET: i32>(PhantomData<(C, S)>);

impl<C: Codes, S: Scales, const OFFSET: i32> Packing for Packed<C, S, OFFSET> {
    type Codes = C;
    type Scales = S;
    const OFFSET: i32 = OFFSET;
}

/// The sizes of a packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bytes of the codes of a block.
    pub(crate) code_bytes: usize,
    /// Bit planes above the nibbles.
    pub(crate) planes: usize,
    /// Whether a code is a signed byte.
    pub(crate) signed: bool,
    /// Bytes of the scales of a block.
    pub(crate) scale_bytes: usize,
    /// Bytes of the header of a span.
    pub(crate) header: usize,
    /// Blocks of a span.
    pub(crate) span: usize,
    /// Scales per row of a block.
    pub(crate) subs: usize,
    /// Whether there are minima.
    pub(crate) affine: bool,
    /// Offset of a symmetric format.
    pub(crate) offset: i32,
}

impl Layout {
    /// Bytes of a block.
    pub(crate) const fn block_bytes(&self) -> usize {
        self.code_bytes + self.scale_bytes
    }

    /// Bytes of a span: header, then blocks.
    pub(crate) const fn span_bytes(&self) -> usize {
        self.header + self.span * self.block_bytes()
    }

    /// Bytes of a group with `cols` inputs, a whole number of spans.
    pub(crate) const fn group_bytes(&self, cols: usize) -> usize {
        cols / (BLOCK * self.span) * self.span_bytes()
    }
}

/// Evaluates `$body` with the type `$P` set to the packing of a quantised format.
macro_rules! with_packing {
    ($format:expr, $P:ident => $body:expr, else $other:expr) => {{
        use crate::cpu::packing::{
            Bits4, Bits5, Bits6, Bits8, Packed, Scale, ScaleMin, SpanScaleMin, SpanScalePair,
        };
        use crate::formats::TensorType;
        match $format {
            TensorType::Q4_0 => {
                type $P = Packed<Bits4, Scale, 8>;
                $body
            }
            TensorType::Q4_1 => {
                type $P = Packed<Bits4, ScaleMin, 0>;
                $body
            }
            TensorType::Q5_0 => {
                type $P = Packed<Bits5, Scale, 16>;
                $body
            }
            TensorType::Q5_1 => {
                type $P = Packed<Bits5, ScaleMin, 0>;
                $body
            }
            TensorType::Q8_0 => {
                type $P = Packed<Bits8, Scale, 0>;
                $body
            }
            TensorType::Q4_K => {
                type $P = Packed<Bits4, SpanScaleMin, 0>;
                $body
            }
            TensorType::Q5_K => {
                type $P = Packed<Bits5, SpanScaleMin, 0>;
                $body
            }
            TensorType::Q6_K => {
                type $P = Packed<Bits6, SpanScalePair, 32>;
                $body
            }
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => $other,
        }
    }};
}
pub(crate) use with_packing;

/// The sizes of the packing of a quantised format, none for floats.
pub(crate) fn layout_of(format: TensorType) -> Option<Layout> {
    with_packing!(format, P => Some(<P as Packing>::LAYOUT), else None)
}
