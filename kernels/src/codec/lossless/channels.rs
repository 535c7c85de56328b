//! Channels made alike: what is known of a channel is taken from its elements, so that those of all channels together are uneven
//! enough for a compressor that sees one byte at a time. Any pattern of bits comes back, NaN included.
//!
//! A channel is kept in one of two ways, whichever leaves less. *Scaled*: the exponent counts down from the channel's largest, and
//! the sign is told against the more frequent one. *Near*: the distance, in steps between neighbouring numbers, from the middle
//! of the channel, even above and odd below it; for channels that are large in every token, as the biases of keys make them.

/// An IEEE format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Float {
    /// Bytes of an element.
    pub width: usize,
    mantissa: u32,
}

impl Float {
    pub(super) const F16: Self = Self { width: 2, mantissa: 10 };
    pub(super) const F32: Self = Self { width: 4, mantissa: 23 };

    fn sign(self) -> u32 {
        1 << (8 * self.width - 1)
    }

    /// Every bit of an element.
    fn mask(self) -> u32 {
        self.sign() | (self.sign() - 1)
    }

    fn exponents(self) -> u32 {
        (self.sign() >> self.mantissa) - 1
    }

    fn exponent(self, element: u32) -> u32 {
        element >> self.mantissa & self.exponents()
    }

    /// The element's place in the order of numbers.
    fn place(self, element: u32) -> u32 {
        if element & self.sign() == 0 { element | self.sign() } else { !element & self.mask() }
    }

    fn at_place(self, place: u32) -> u32 {
        if place & self.sign() == 0 { !place & self.mask() } else { place & !self.sign() }
    }

    /// Bits of a channel's parameter: half of an element's.
    fn parameter_bits(self) -> u32 {
        4 * self.width as u32
    }
}

/// What is known of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// By the largest exponent, and whether most elements are negative.
    Scaled { exponent: u32, negative: bool },
    /// By the upper half of the bits of the middle's place.
    Near { middle: u32 },
}

/// Mean distance from the middle, in parts of an element's mantissa, below which a channel is near it: beyond, the exponent says
/// as much. Measured on the keys of the named models.
const NEAR: u32 = 2;

impl Channel {
    /// The better way for a channel's elements.
    pub(super) fn of(float: Float, elements: &[u32]) -> Self {
        let count = elements.len() as u64;
        let places: u64 = elements.iter().map(|element| u64::from(float.place(*element))).sum();
        let middle = (places / count.max(1)) as u32 >> float.parameter_bits();
        let near = Self::Near { middle };
        let far: u64 = elements.iter().map(|element| u64::from(near.apart(float, *element) >> 1)).sum();
        if far < count * u64::from(NEAR << float.mantissa) {
            return near;
        }
        let negative =
            elements.iter().filter(|element| **element & float.sign() != 0).count() > elements.len() / 2;
        let exponent = elements.iter().map(|element| float.exponent(*element)).max().unwrap_or(0);
        Self::Scaled { exponent, negative }
    }

    /// What is left of an element.
    pub(super) fn apart(self, float: Float, element: u32) -> u32 {
        match self {
            Self::Scaled { exponent, negative } => {
                let below = exponent.wrapping_sub(float.exponent(element)) & float.exponents();
                let sign = (element ^ if negative { float.sign() } else { 0 }) & float.sign();
                sign | below << float.mantissa | element & ((1 << float.mantissa) - 1)
            }
            Self::Near { middle } => {
                let distance =
                    float.place(element).wrapping_sub(Self::place_of(float, middle)) & float.mask();
                // Distances below the middle are those of the upper half.
                if distance & float.sign() == 0 { distance << 1 } else { (!distance & float.mask()) << 1 | 1 }
            }
        }
    }

    /// The inverse of [`Self::apart`].
    pub(super) fn together(self, float: Float, left: u32) -> u32 {
        match self {
            // Both are their own inverses.
            Self::Scaled { .. } => self.apart(float, left),
            Self::Near { middle } => {
                let distance = if left & 1 == 0 { left >> 1 } else { !(left >> 1) & float.mask() };
                float.at_place(Self::place_of(float, middle).wrapping_add(distance) & float.mask())
            }
        }
    }

    fn place_of(float: Float, middle: u32) -> u32 {
        (middle << float.parameter_bits() | 1 << (float.parameter_bits() - 1)) & float.mask()
    }

    /// As it is stored: whether it is near, and a parameter of half an element's bits.
    pub(super) fn parts(self, float: Float) -> (bool, u32) {
        match self {
            Self::Scaled { exponent, negative } => {
                (false, exponent | u32::from(negative) << (float.parameter_bits() - 1))
            }
            Self::Near { middle } => (true, middle),
        }
    }

    /// The channel that is stored so.
    pub(super) fn from_parts(float: Float, near: bool, parameter: u32) -> Self {
        if near {
            return Self::Near { middle: parameter };
        }
        let negative = parameter >> (float.parameter_bits() - 1) & 1 == 1;
        Self::Scaled { exponent: parameter & float.exponents(), negative }
    }
}
