//! What a trace says. A record is one thing that came to the scheduler (a command, an answer of the disk tier, or its own
//! turn), what it was told by its surroundings meanwhile (times, whether the disk has a cell, tokens), and what became of
//! KV. The scheduler decides by nothing else, so that the first two give the third again.
//!
//! Words (states, reasons, modes) are text and numbers are of variable length: none of these types is anyone else's, so
//! that a change elsewhere does not change the format. `TRACE.md` describes it.

use serde::{Deserialize, Serialize};

/// A session, by the order in which sessions became known.
pub(in crate::scheduler) type SessionNumber = u32;

/// What a trace begins with: what the scheduler was made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceHeader {
    /// Version of the software that wrote it.
    pub program: String,
    /// Alias or path of the model.
    pub model: String,
    /// Digest of the contract, in hexadecimal digits.
    pub contract: String,
    /// The model's KV.
    pub shape: TracedShape,
    /// What the scheduler was told to do.
    pub options: TracedOptions,
    /// The device, in its own words.
    pub device: String,
    /// Costs that an earlier process had measured, as JSON.
    pub costs: Option<Vec<u8>>,
    /// Nanoseconds of the monotonic clock when the scheduler began.
    pub began_ns: u64,
}

/// The shape of KV, and of the device that holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedShape {
    /// Layers.
    pub layers: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// How K and V are stored: `f16`, `f32`, `int8`.
    pub kv_type: String,
    /// Layers that attend to the last tokens only, and to how many.
    pub windows: Vec<(u32, u64)>,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages of the device.
    pub pages: u64,
    /// Most rows of a step.
    pub step_rows: u32,
}

/// The scheduler's options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedOptions {
    /// The idle policy.
    pub idle_policy: String,
    /// How restores choose.
    pub restore_mode: String,
    /// Idle time after which KV leaves the device, milliseconds.
    pub idle_ttl_ms: u64,
    /// Most tokens of a session.
    pub context_length: u64,
    /// Whether sealed chunks are saved when a session becomes idle.
    pub save_when_idle: bool,
    /// When next tokens are guessed.
    pub speculation: String,
    /// Whether sessions share beginnings.
    pub share_prefixes: bool,
    /// Bytes of cells that host memory may hold.
    pub host_budget_bytes: u64,
    /// Seconds that a step may be predicted to take while sessions wait.
    pub step_seconds: f64,
    /// How much of each tier the tenants may take that have a quota of their own.
    pub quotas: Vec<(String, TracedQuota)>,
    /// How much of each tier each other tenant may take.
    pub others: TracedQuota,
}

/// Bytes that a tenant may have on each tier; none: as many as the tier has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedQuota {
    /// On the device.
    pub device_bytes: Option<u64>,
    /// In host memory.
    pub host_bytes: Option<u64>,
    /// On disk.
    pub disk_bytes: Option<u64>,
}

/// One thing that came to the scheduler, and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::scheduler) struct Record {
    /// When, in nanoseconds since the record before.
    pub after_ns: u64,
    /// What came.
    pub cause: Cause,
    /// What the scheduler was told.
    pub told: Told,
    /// What it made of it.
    pub effects: Vec<Effect>,
}

/// What the scheduler was told by its surroundings, each kind in the order in which it asked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::scheduler) struct Told {
    /// Times it read, in nanoseconds since the one before; the first since the record's.
    pub times_ns: Vec<u64>,
    /// Whether the disk has a cell: how often it asked, and the answers, eight to a byte.
    pub asked: u32,
    /// See `asked`.
    pub has: Vec<u8>,
    /// What the disk is throttled to, where that is not what it last was.
    pub disk_limit: Option<Option<u64>>,
    /// How the host tier is made slow or faulty, where that is not what it last was.
    pub host: Option<HostSettings>,
    /// For whose message tokens were guessed, how many, and how many of them proved right.
    pub guess: Option<(SessionNumber, u32, u32)>,
    /// Tokens of messages.
    pub tokens: Vec<(SessionNumber, Taken)>,
    /// Sessions whose restores nobody waits for any more.
    pub unwanted: Vec<SessionNumber>,
    /// Bytes of cells that were packed without loss.
    pub packed: Vec<u32>,
}

/// How the host tier is made slow or faulty.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::scheduler) struct HostSettings {
    /// Bytes a second.
    pub bytes_per_s: Option<u64>,
    /// Nanoseconds added to each read.
    pub latency_ns: u64,
    /// The fault, and for delayed reads the nanoseconds.
    pub fault: String,
    /// See `fault`.
    pub delay_ns: u64,
}

/// What the next token of a message was. A token is a pseudonym: equal where the token and all before it are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::scheduler) enum Taken {
    /// A token after which the message goes on.
    Token(u32),
    /// A token after which nobody listened.
    Unheard(u32),
    /// The last token.
    Last(u32),
    /// The message ended before a token.
    End,
    /// The message was over before its first token.
    Over,
    /// The next token could not be chosen.
    Failed,
}

/// What came to the scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::scheduler) enum Cause {
    /// Its loop came round.
    Turn,
    /// A session became known. It has the next number.
    Open {
        id: String,
        /// Whose it is; none of the sessions that name no tenant.
        tenant: Option<String>,
        tokens: Vec<u32>,
        /// The fields in which the contract of its saved cells differs; none, where it has saved nothing.
        saved_under: Option<Vec<String>>,
        idle_ttl_ms: Option<u64>,
        codec: String,
        /// Whether it takes KV near what would be computed.
        reuse: String,
        /// The layout of its saved cells.
        layout: Option<String>,
    },
    /// Tokens were added to a history.
    Append { session: SessionNumber, tokens: Vec<u32> },
    /// A message began. So many of its tokens stand in the history already.
    Generate { session: SessionNumber, sampled: u32 },
    /// A message was cancelled.
    Cancel { session: SessionNumber },
    /// A session rests; with the tool that runs, and the milliseconds it says that it takes.
    Rest { session: SessionNumber, tool: Option<(String, Option<u64>)> },
    /// An eviction was asked for.
    Evict { session: SessionNumber },
    /// A restore was asked for.
    Restore { session: SessionNumber, mode: String },
    /// A session was forked. The fork has the next number.
    Fork { source: SessionNumber, id: String },
    /// Tokens were taken out. What follows them has the pseudonyms `tail` from then on; none, where it was refused, or where
    /// what follows keeps its KV and with it its pseudonyms.
    Cut { session: SessionNumber, start: u64, end: u64, tail: Option<Vec<u32>> },
    /// A session was forgotten.
    Close { session: SessionNumber },
    /// The disk answered for the oldest chunk that it was to save, with the reason where it did not.
    Saved { refused: Option<String> },
    /// The disk answered for the oldest chunk that it was to load: bytes of the cells it gave (so many cells of so many bytes
    /// each, in the order of layers), the layers it did not, and its seconds.
    Loaded { given: Vec<(u32, u64)>, refused: Vec<(u32, String)>, seconds: f64 },
    /// The scheduler stopped.
    Stop,
}

/// What became of KV.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::scheduler) enum Effect {
    /// A session's KV changed state.
    Moved { session: SessionNumber, from: String, to: String, reason: String, tokens: u64, bytes: u64 },
    /// A restore ended.
    Restored { session: SessionNumber, restored: Restored },
    /// The history before a message is on the device; of its tokens, `cached` were not computed for it.
    Started { session: SessionNumber, input: u64, cached: u64 },
    /// Cells are on disk.
    Saved { bytes: u64 },
    /// KV was moved to earlier positions.
    Relocated { session: SessionNumber, start: u64, cut: u64, tokens: u64 },
}

/// What a restore did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::scheduler) struct Restored {
    pub resident: u64,
    pub mixed: u64,
    pub recomputed: u64,
    pub host: Loads,
    pub disk: Loads,
    /// Cells recomputed.
    pub cells_recomputed: u64,
    /// Microseconds taken.
    pub us: u64,
}

/// What a restore loaded from a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::scheduler) struct Loads {
    pub tokens: u64,
    pub cells: u64,
    pub bytes: u64,
}
