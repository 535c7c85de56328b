//! Channels made alike: the largest exponent of a channel and its more frequent sign are taken out of its elements, so that those of
//! all channels together are uneven enough for a compressor that sees one byte at a time. Any pattern of bits comes back, NaN
//! included.
//!
//! Measured on keys and values of the named models, and left out for gaining nothing or less than it costs: the difference or the
//! exclusive-or with the token before (also one turned on by rotary embedding), the distance from the channel's middle, channels one
//! after the other instead of tokens.

/// IEEE numbers of `WIDTH` bytes: f16 or f32, in the low bytes of a u32.
pub(super) struct Float<const WIDTH: usize>;

impl<const WIDTH: usize> Float<WIDTH> {
    const SIGN: u32 = 1 << (8 * WIDTH - 1);
    /// Bits of the mantissa.
    const MANTISSA: u32 = if WIDTH == 2 { 10 } else { 23 };
    /// The exponent's bits.
    const EXPONENT: u32 = Self::SIGN - (1 << Self::MANTISSA);
    /// Where a channel's parameter, half as long as an element, has the sign.
    const PARAMETER_SIGN: u32 = 1 << (4 * WIDTH - 1);

    /// The elements of a block.
    pub(super) fn read(block: &[u8]) -> Vec<u32> {
        let (elements, _) = block.as_chunks::<WIDTH>();
        elements
            .iter()
            .map(|bytes| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
            .collect()
    }

    /// The inverse of [`Self::read`].
    pub(super) fn write(elements: &[u32], block: &mut [u8]) {
        let (places, _) = block.as_chunks_mut::<WIDTH>();
        for (place, element) in places.iter_mut().zip(elements) {
            let bytes = element.to_le_bytes();
            place.copy_from_slice(&bytes[..WIDTH]);
        }
    }

    /// What is taken out of each channel of `[tokens][channels]`: the exponent, and the sign in the highest bit of half an
    /// element.
    pub(super) fn parameters(channels: usize, elements: &[u32]) -> Vec<u32> {
        let mut highest = vec![0; channels];
        let mut negative = vec![0_u32; channels];
        let rows = elements.chunks_exact(channels.max(1));
        let tokens = rows.len() as u32;
        for row in rows {
            for ((element, highest), negative) in row.iter().zip(&mut highest).zip(&mut negative) {
                *highest = (*highest).max(element & Self::EXPONENT);
                *negative += u32::from(element & Self::SIGN != 0);
            }
        }
        let parameter = |(highest, negative): (&u32, &u32)| {
            highest >> Self::MANTISSA | if negative * 2 > tokens { Self::PARAMETER_SIGN } else { 0 }
        };
        highest.iter().zip(&negative).map(parameter).collect()
    }

    /// Takes the parameters out, or puts them back: the exponent counts down from the channel's, the sign is told against it.
    pub(super) fn turn(parameters: &[u32], elements: &mut [u32]) {
        let highest: Vec<u32> =
            parameters.iter().map(|bits| (bits << Self::MANTISSA) & Self::EXPONENT).collect();
        let sign = |bits: &u32| if bits & Self::PARAMETER_SIGN == 0 { 0 } else { Self::SIGN };
        let signs: Vec<u32> = parameters.iter().map(sign).collect();
        for row in elements.chunks_exact_mut(parameters.len().max(1)) {
            for ((element, highest), sign) in row.iter_mut().zip(&highest).zip(&signs) {
                let below = highest.wrapping_sub(*element & Self::EXPONENT) & Self::EXPONENT;
                *element = (*element & !Self::EXPONENT | below) ^ sign;
            }
        }
    }
}
