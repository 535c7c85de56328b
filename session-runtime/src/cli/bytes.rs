//! Amounts of bytes as people write and read them.

use std::fmt;
use std::str::FromStr;

/// An amount of bytes, written as `4096`, `256MiB`, `1.5GiB` or `10MB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) u64);

const UNITS: [(&str, u64); 9] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
];

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not an amount of bytes: write 4096, 256MiB, 1.5GiB or 10MB");
        let lower = text.trim().to_ascii_lowercase();
        let unit = UNITS.iter().find_map(|(unit, factor)| Some((lower.strip_suffix(unit)?, *factor)));
        let (number, factor) = unit.unwrap_or((&lower, 1));
        let number = number.trim();
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(factor).map(Self).ok_or_else(wrong);
        }
        match number.parse::<f64>() {
            Ok(part)
                if part.is_finite()
                    && part >= 0.0
                    && number.bytes().all(|b| b.is_ascii_digit() || b == b'.') =>
            {
                let bytes = part * factor as f64;
                // Above this a double no longer names single bytes.
                if bytes <= 9e15 { Ok(Self(bytes as u64)) } else { Err(wrong()) }
            }
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, factor) in [("TiB", 1_u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
            if self.0 >= factor {
                return write!(out, "{:.1} {unit}", self.0 as f64 / factor as f64);
            }
        }
        write!(out, "{} B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_exactly() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("17b", 17),
            ("256MiB", 268_435_456),
            ("256 mib", 268_435_456),
            ("1.5GiB", 1_610_612_736),
            ("10MB", 10_000_000),
            ("3kb", 3000),
        ] {
            assert_eq!(text.parse::<Bytes>(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_not_an_amount_is_refused() {
        for text in ["", "MiB", "-1", "1e3", "inf", "nan", "12 apples", "99999999999999TiB", "1.5.2KiB"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn amounts_are_shown_in_the_largest_unit() {
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes(268_435_456).to_string(), "256.0 MiB");
    }
}
