//! The one-way switch that stops acknowledgements after a failed write or fsync.
//!
//! Owns the first reason and nothing else. It is never reset: only a new open, with recovery, clears it.

use std::sync::{Arc, OnceLock};

/// Shared by every part that acknowledges work.
#[derive(Debug, Clone, Default)]
pub(crate) struct Poison(Arc<OnceLock<String>>);

impl Poison {
    /// Records `reason` unless an earlier one is there, and returns the reason that holds.
    pub(crate) fn set(&self, reason: String) -> String {
        let mut fresh = false;
        let held = self.0.get_or_init(|| {
            fresh = true;
            reason
        });
        if fresh {
            tracing::error!(reason = %held, "store poisoned: nothing more is acknowledged");
        }
        held.clone()
    }

    /// The reason, once poisoned.
    pub(crate) fn get(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}
