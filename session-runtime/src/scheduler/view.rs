//! What the scheduler tells of KV and messages; clients see it unchanged.

use serde::{Deserialize, Serialize};

use crate::kv::state::KvState;
use crate::restore::report::RestoreReport;

/// Why a message of the model ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended its turn.
    EndOfTurn,
    /// A stop text appeared.
    StopString,
    /// The limit on tokens, or the end of the context.
    MaxTokens,
    /// The constraint allows nothing more.
    ConstraintComplete,
    /// Someone cancelled the turn.
    Cancelled,
}

/// Where a session's KV is.
#[derive(Clone, Debug, PartialEq, Serialize, utoipa::ToSchema)]
pub struct KvView {
    /// State.
    pub state: KvState,
    /// Tokens in the history.
    pub tokens: u64,
    /// Tokens whose KV is on the device.
    pub resident_tokens: u64,
    /// Tokens, from the first, whose cells are on disk: sealed chunks, and what was unsealed when an eviction
    /// saved it.
    pub saved_tokens: u64,
    /// Tokens whose cells, as far as a restore needs them, are in host memory.
    pub host_tokens: u64,
    /// Bytes of the session's cells in host memory (cells shared with other sessions counted in each).
    pub host_bytes: u64,
    /// Bytes of the device pages the session's tables name (shared pages counted in each).
    pub device_bytes: u64,
    /// Pages shared with another session.
    pub shared_pages: u64,
    /// When the soft TTL ends, milliseconds since the Unix epoch; absent while active.
    pub idle_deadline_ms: Option<u64>,
    /// What the last restore did.
    pub last_restore: Option<RestoreReport>,
}

/// What host memory holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostView {
    /// Bytes of cells; cells that several sessions share are counted once.
    pub bytes: u64,
    /// The most there may be.
    pub budget: u64,
    /// Cells.
    pub cells: u64,
}

/// KV that was moved to earlier positions, because tokens before it were cut out: its values are as they were, its keys are turned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Relocation {
    /// Where tokens were cut out.
    pub start: u64,
    /// How many.
    pub cut: u64,
    /// Tokens that moved.
    pub tokens: u64,
    /// Time taken, milliseconds.
    pub ms: f64,
}

/// A change of KV state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct KvTransition {
    /// From.
    pub from: KvState,
    /// To.
    pub to: KvState,
    /// Why: `turn`, `tool_call`, `end_of_turn`, `pressure`, `command`, `ttl`, `idle`, `prefetch`, `restart`, `fork`,
    /// `cut`, `shared`, `cancelled`.
    pub reason: String,
    /// Tokens concerned.
    pub tokens: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Time taken, milliseconds.
    pub ms: f64,
}
