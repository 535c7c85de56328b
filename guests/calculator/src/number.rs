//! Exact rational numbers, roots to a stated number of digits, and their decimal form.

use num_bigint::{BigInt, Sign};
use num_integer::Integer;
use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};

/// Most bits of a numerator or denominator: about 4,900 decimal digits.
pub(crate) const MAX_BITS: u64 = 16_384;
/// Significant decimal digits carried of a root that is not rational.
const ROOT_DIGITS: u32 = 240;

/// Why an operation has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    DivisionByZero,
    TooLarge,
    NegativeRoot,
    FractionalExponent,
}

/// A number, and whether it is the true value or carries a rounded root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Number {
    value: BigRational,
    exact: bool,
}

impl Number {
    /// `digits` read as an integer, divided by ten to the number of `decimals`. `digits` has only 0-9.
    pub(crate) fn from_digits(digits: &str, decimals: u32) -> Result<Self, Failure> {
        let numerator = BigInt::parse_bytes(digits.as_bytes(), 10).ok_or(Failure::TooLarge)?;
        bounded(BigRational::new(numerator, ten_to(decimals)), true)
    }

    pub(crate) fn negate(&self) -> Self {
        Self { value: -self.value.clone(), exact: self.exact }
    }

    pub(crate) fn abs(&self) -> Self {
        Self { value: self.value.abs(), exact: self.exact }
    }

    pub(crate) fn add(&self, other: &Self) -> Result<Self, Failure> {
        bounded(&self.value + &other.value, self.exact && other.exact)
    }

    pub(crate) fn subtract(&self, other: &Self) -> Result<Self, Failure> {
        bounded(&self.value - &other.value, self.exact && other.exact)
    }

    pub(crate) fn multiply(&self, other: &Self) -> Result<Self, Failure> {
        bounded(&self.value * &other.value, self.exact && other.exact)
    }

    pub(crate) fn divide(&self, other: &Self) -> Result<Self, Failure> {
        if other.value.is_zero() {
            return Err(Failure::DivisionByZero);
        }
        bounded(&self.value / &other.value, self.exact && other.exact)
    }

    /// Whole exponents, and halves as roots of whole powers.
    pub(crate) fn power(&self, exponent: &Self) -> Result<Self, Failure> {
        let two = BigInt::from(2);
        let (base, whole) = if exponent.value.is_integer() {
            (self.clone(), exponent.value.to_integer())
        } else if exponent.value.denom() == &two {
            (self.square_root()?, exponent.value.numer().clone())
        } else {
            return Err(Failure::FractionalExponent);
        };
        let base = Self { value: base.value, exact: base.exact && exponent.exact };
        base.whole_power(&whole)
    }

    fn whole_power(&self, exponent: &BigInt) -> Result<Self, Failure> {
        if self.value.is_zero() {
            return match exponent.sign() {
                Sign::Minus => Err(Failure::DivisionByZero),
                Sign::NoSign => Ok(Self { value: BigRational::one(), exact: self.exact }),
                Sign::Plus => Ok(self.clone()),
            };
        }
        if self.value.abs().is_one() {
            let value = if exponent.is_even() { BigRational::one() } else { self.value.clone() };
            return Ok(Self { value, exact: self.exact });
        }
        // A number other than 0, 1 and -1 has two bits or more on one side, so an exponent beyond the bound
        // on bits is too large whatever the base.
        let power =
            exponent.to_i64().filter(|power| power.unsigned_abs() <= MAX_BITS).ok_or(Failure::TooLarge)?;
        let bits = self.value.numer().bits().max(self.value.denom().bits());
        if (bits - 1).saturating_mul(power.unsigned_abs()) > MAX_BITS {
            return Err(Failure::TooLarge);
        }
        let power = i32::try_from(power).map_err(|_| Failure::TooLarge)?;
        bounded(self.value.pow(power), self.exact)
    }

    /// Exact for the square of a rational number, to [`ROOT_DIGITS`] digits otherwise.
    pub(crate) fn square_root(&self) -> Result<Self, Failure> {
        if self.value.is_negative() {
            return Err(Failure::NegativeRoot);
        }
        let (numerator, denominator) = (self.value.numer().sqrt(), self.value.denom().sqrt());
        if &numerator * &numerator == *self.value.numer()
            && &denominator * &denominator == *self.value.denom()
        {
            return bounded(BigRational::new(numerator, denominator), self.exact);
        }
        // sqrt(n/d) = sqrt(n*d)/d, with n*d scaled by an even power of ten so that its root has enough digits.
        let product = self.value.numer() * self.value.denom();
        let scale = ten_to(ROOT_DIGITS);
        let root = (product * &scale * &scale).sqrt();
        bounded(BigRational::new(root, scale * self.value.denom()), false)
    }

    /// Half away from zero, to `decimals` places; negative places round to tens, hundreds and so on.
    pub(crate) fn round(&self, decimals: i32) -> Result<Self, Failure> {
        let scale = ten_to(decimals.unsigned_abs());
        let scale = BigRational::from_integer(scale);
        let rounded = if decimals >= 0 {
            (&self.value * &scale).round() / scale
        } else {
            (&self.value / &scale).round() * scale
        };
        bounded(rounded, self.exact)
    }

    /// The value as a small whole number.
    pub(crate) fn to_small_integer(&self) -> Option<i32> {
        if self.value.is_integer() { self.value.to_integer().to_i32() } else { None }
    }

    pub(crate) fn is_less_than(&self, other: &Self) -> bool {
        self.value < other.value
    }

    /// Decimal digits with `decimals` places, rounded half away from zero, and whether they are the true value.
    /// `shorten` leaves out zeros at the end.
    pub(crate) fn to_decimal(&self, decimals: u32, shorten: bool) -> (String, bool) {
        let scaled = &self.value * BigRational::from_integer(ten_to(decimals));
        let exact = self.exact && scaled.is_integer();
        let rounded = scaled.round().to_integer();
        let places = decimals as usize;
        let digits = rounded.abs().to_string();
        let digits = format!("{digits:0>width$}", width = places + 1);
        let (whole, fraction) = digits.split_at(digits.len() - places);
        let fraction = if shorten { fraction.trim_end_matches('0') } else { fraction };
        let sign = if rounded.is_negative() { "-" } else { "" };
        let point = if fraction.is_empty() { "" } else { "." };
        (format!("{sign}{whole}{point}{fraction}"), exact)
    }
}

fn ten_to(power: u32) -> BigInt {
    BigInt::from(10).pow(power)
}

fn bounded(value: BigRational, exact: bool) -> Result<Number, Failure> {
    if value.numer().bits().max(value.denom().bits()) > MAX_BITS {
        return Err(Failure::TooLarge);
    }
    Ok(Number { value, exact })
}
