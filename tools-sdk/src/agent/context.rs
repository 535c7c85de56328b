//! The session's KV: where it is, and what the last restore did.

use crate::sys;

/// Where the session's KV is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvState {
    /// There is none yet.
    None,
    /// In use.
    Active,
    /// On the device, not in use.
    Idle,
    /// Off the device.
    Evicted,
    /// On its way back.
    Restoring,
    /// Back, not yet used.
    Restored,
    /// Made under another contract.
    Stale,
    /// Gone; the tokens bring it back.
    Lost,
}

/// The session's KV now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Where it is.
    pub state: KvState,
    /// Tokens of the session.
    pub tokens: u32,
    /// Of these, with KV on the device.
    pub resident_tokens: u32,
    /// Most tokens the model can hold.
    pub context_length: u32,
}

/// What a restore loaded from one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierLoads {
    /// Tokens whose every layer was loaded, with this tier the lowest that one of their cells came from.
    pub tokens: u32,
    /// Cells.
    pub cells: u32,
    /// Bytes moved, cells included that were computed again in the end.
    pub bytes: u64,
}

/// What a restore did. A cell is one layer of one chunk of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct RestoreReport {
    /// Tokens on the device afterwards.
    pub tokens: u32,
    /// Of these, still there before.
    pub tokens_resident: u32,
    /// Tokens whose every layer was loaded.
    pub tokens_loaded: u32,
    /// Tokens of which some layers were loaded and some computed again.
    pub tokens_mixed: u32,
    /// Tokens whose every layer was computed again.
    pub tokens_recomputed: u32,
    /// Cells read from a tier.
    pub cells_loaded: u32,
    /// Cells computed again.
    pub cells_recomputed: u32,
    /// Cells that were found and not used.
    pub cells_refused: u32,
    /// What came from host memory.
    pub from_host: TierLoads,
    /// What came from disk.
    pub from_disk: TierLoads,
    /// How long it took.
    pub milliseconds: f64,
}

/// The session's KV now.
pub fn status() -> Status {
    sys::context_status()
}

/// What the last restore of this session did; `None` before the first.
pub fn last_restore() -> Option<RestoreReport> {
    sys::context_last_restore()
}
