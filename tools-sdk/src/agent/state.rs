//! A small map that outlives turns.

use crate::{Error, sys};

/// The value under `key`.
pub fn get(key: &str) -> Option<String> {
    sys::state_get(key)
}

/// Puts a value under `key`.
///
/// # Errors
/// [`crate::ErrorKind::Limit`] when the map or the value is too large.
pub fn set(key: &str, value: &str) -> Result<(), Error> {
    sys::state_set(key, value)
}

/// Forgets `key`.
pub fn delete(key: &str) {
    sys::state_delete(key);
}
