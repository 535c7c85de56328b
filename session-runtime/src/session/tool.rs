//! Tools as a session sees them: what a call may change, and how it ended.

use serde::{Deserialize, Serialize};

/// What a call may change in the world; it decides what happens to an interrupted call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Nothing; the result depends on the input alone.
    Pure,
    /// Nothing; the result depends on the world.
    Read,
    /// Something, but doing it twice is doing it once.
    Idempotent,
    /// Something; never repeated unasked.
    #[default]
    Effect,
}

impl Effect {
    /// Whether an interrupted call may run again.
    pub fn may_run_again(self) -> bool {
        self != Self::Effect
    }
}

/// How a call failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ToolFailure {
    /// `invalid_input`, `not_found`, `denied`, `limit`, `cancelled`, `unavailable` or `failed`.
    pub kind: String,
    /// Stable code.
    pub code: String,
    /// One sentence.
    pub message: String,
    /// Whether the same call can succeed later.
    pub retryable: bool,
}

/// How a call ended: the text for the model, or the failure.
pub type ToolOutcome = Result<String, ToolFailure>;

/// What to do for a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolStart {
    /// Nothing: the call ended before an interruption, thus.
    Recorded(ToolOutcome),
    /// Run it.
    Run {
        /// Id of the call, the same when it runs again.
        call_id: String,
        /// Whether it may have run before.
        again: bool,
    },
}
