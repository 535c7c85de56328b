//! The host's clock. An agent's readings are journaled, so a replay sees the same times.

use crate::sys;

/// Milliseconds since the Unix epoch.
pub fn now_ms() -> u64 {
    sys::now_ms()
}

/// Pauses a tool's call for `duration` milliseconds.
///
/// # Errors
/// [`crate::ErrorKind::Limit`] when the call's deadline would pass first, [`crate::ErrorKind::Cancelled`] when
/// the call is stopped meanwhile.
#[cfg(any(feature = "tool", not(target_arch = "wasm32")))]
pub fn sleep_ms(duration: u64) -> Result<(), crate::Error> {
    sys::sleep_ms(duration)
}
