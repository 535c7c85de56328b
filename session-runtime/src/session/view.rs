//! What a client sees of sessions, turns and KV.

use serde::Serialize;
use serde_json::{Map, Value};

use super::spec::{Retention, SegmentKind, SessionSpec};
use crate::restore::report::RestoreReport;
pub use crate::scheduler::{KvTransition, KvView, Relocation};

/// Where a session stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SessionStatus {
    /// Waiting for a turn.
    #[default]
    Idle,
    /// A turn runs.
    Running,
    /// A turn cannot go on without a person: see the turn's error.
    RequiresAction,
}

/// Counts of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize, utoipa::ToSchema)]
pub struct Usage {
    /// Length of the history that each message of the model began from, summed over the messages: a turn of
    /// three messages counts its early tokens three times, as a client pays for three requests.
    pub input_tokens: u64,
    /// Of these, tokens whose KV was on the device or came back from a tier, rather than being computed for
    /// that message.
    pub cached_tokens: u64,
    /// Tokens sampled, those of thoughts and tool calls included.
    pub output_tokens: u64,
    /// Of these, tokens of reasoning segments.
    pub reasoning_tokens: u64,
}

impl Usage {
    /// Adds another count.
    pub fn add(&mut self, other: &Usage) {
        self.input_tokens += other.input_tokens;
        self.cached_tokens += other.cached_tokens;
        self.output_tokens += other.output_tokens;
        self.reasoning_tokens += other.reasoning_tokens;
    }
}

/// A session as clients see it.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
pub struct SessionView {
    /// Id.
    pub id: String,
    /// Where it stands.
    pub status: SessionStatus,
    /// Model under which its KV was last computed: an alias or a path.
    pub model: String,
    /// Title, agent, tools, parameters as given.
    pub spec: SessionSpec,
    /// Milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// Last event.
    pub updated_ms: u64,
    /// Session it was forked from.
    pub parent: Option<String>,
    /// Turns begun.
    pub turns: u32,
    /// Tokens in the history.
    pub tokens: u64,
    /// Sequence number of the last durable event.
    pub last_event: u64,
    /// Sums over all turns.
    pub usage: Usage,
    /// State of the KV.
    pub kv: KvView,
}

/// How a turn stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TurnStatus {
    /// Waiting behind another turn.
    Queued,
    /// Running.
    Running,
    /// Ended well.
    Completed,
    /// Ended with an error.
    Failed,
    /// Stopped on request.
    Cancelled,
    /// Stopped until a person decides.
    RequiresAction,
}

/// A turn as clients see it.
#[derive(Clone, Debug, Serialize, utoipa::ToSchema)]
pub struct TurnView {
    /// Id.
    pub id: String,
    /// The session.
    pub session: String,
    /// From 1.
    pub number: u32,
    /// How it stands.
    pub status: TurnStatus,
    /// The answer's text so far.
    pub output_text: String,
    /// Why the last message ended.
    pub finish: Option<super::spec::Finish>,
    /// Counts.
    pub usage: Usage,
    /// What went wrong.
    pub error: Option<TurnError>,
    /// Sequence number of the turn's first event.
    pub first_event: u64,
    /// The restores this turn caused.
    pub restores: Vec<RestoreReport>,
}

/// Why a turn failed.
#[derive(Clone, Debug, PartialEq, Serialize, serde::Deserialize, utoipa::ToSchema)]
pub struct TurnError {
    /// Stable code.
    pub code: String,
    /// One sentence.
    pub message: String,
    /// Whether the same request can succeed later. Turns that ended before it was told lack it.
    #[serde(default)]
    pub retryable: bool,
}

/// A segment as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize, utoipa::ToSchema)]
pub struct SegmentView {
    /// Id.
    pub id: String,
    /// What it holds.
    pub kind: SegmentKind,
    /// First token index.
    pub start: u64,
    /// One past the last token index.
    pub end: u64,
    /// How long it is kept.
    pub retention: Retention,
    /// When it expires, milliseconds since the Unix epoch.
    pub expires_ms: Option<u64>,
    /// Its text.
    pub text: String,
}

/// One durable event of a session.
#[derive(Clone, Debug, PartialEq, Serialize, utoipa::ToSchema)]
pub struct Event {
    /// From 1, without gaps.
    pub seq: u64,
    /// Such as `turn.started`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// The session.
    pub session: String,
    /// The event's own members.
    pub data: Map<String, Value>,
}
