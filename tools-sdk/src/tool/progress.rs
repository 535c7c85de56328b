//! Telling the session how far a long call is.

use crate::sys;

/// Reports `done` of `total` units (any unit) and a short line; `total` 0 means unknown.
pub fn report(done: u64, total: u64, message: &str) {
    sys::progress(done, total, message);
}
