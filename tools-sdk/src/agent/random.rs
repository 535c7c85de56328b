//! Randomness from the host, journaled, so a replay draws the same.

use crate::sys;

/// 64 random bits.
pub fn get_u64() -> u64 {
    sys::random_u64()
}
