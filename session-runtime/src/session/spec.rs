//! What a client may say about a session and a turn.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use crate::kv::codec::KvCodec;
pub use crate::kv::reuse::KvReuse;
pub use crate::models::template::Role;
pub use crate::scheduler::Finish;

/// What a segment holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SegmentKind {
    /// Instructions.
    System,
    /// What the user said.
    User,
    /// The model's thinking.
    Reasoning,
    /// A call of a tool, as the model wrote it.
    ToolCall,
    /// What the tool gave back.
    ToolResult,
    /// What the model told the user.
    Answer,
    /// A summary of earlier segments.
    Summary,
}

impl SegmentKind {
    /// The word used in the API and in the store.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Reasoning => "reasoning",
            Self::ToolCall => "tool_call",
            Self::ToolResult => "tool_result",
            Self::Answer => "answer",
            Self::Summary => "summary",
        }
    }
}

/// How long a segment is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case", tag = "policy")]
pub enum Retention {
    /// As long as the session.
    #[default]
    Keep,
    /// Cut when the turn ends.
    DropAfterTurn,
    /// Cut this many seconds after it was written.
    Expire {
        /// Time to live in seconds.
        ttl_seconds: u64,
    },
}

/// How the next token is chosen. Unset fields take the session's, then the runtime's defaults (greedy).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Keep the k likeliest; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set whose probability reaches p.
    pub top_p: Option<f32>,
    /// Drop tokens below p times the likeliest one's probability.
    pub min_p: Option<f32>,
    /// Divides (or multiplies, when negative) the logits of recent tokens; 1 is off.
    pub repetition_penalty: Option<f32>,
    /// Key of the counter-based generator: the token at a position depends on (seed, position) alone.
    pub seed: Option<u64>,
}

impl Sampling {
    /// `self` where set, else `fallback`.
    #[must_use]
    pub fn or(&self, fallback: &Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.or(fallback.temperature),
            top_k: self.top_k.or(fallback.top_k),
            top_p: self.top_p.or(fallback.top_p),
            min_p: self.min_p.or(fallback.min_p),
            repetition_penalty: self.repetition_penalty.or(fallback.repetition_penalty),
            seed: self.seed.or(fallback.seed),
        }
    }
}

/// A new session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub struct SessionSpec {
    /// The client's own id; a fresh one when absent.
    pub id: Option<String>,
    /// The tenant it belongs to, whose quota and share its KV counts against; without one, the tenant of all that name none.
    pub tenant: Option<String>,
    /// Name of the agent guest; without one the session is a plain chat.
    pub agent: Option<String>,
    /// Tools the session may call, by name. Default: none.
    pub tools: Vec<String>,
    /// Parameters of the agent, a JSON object.
    pub params: Map<String, Value>,
    /// Directories that the session's tools may read, by grant name.
    pub grants: Vec<FileGrant>,
    /// System message of a plain chat; absent: the model's own default.
    pub instructions: Option<String>,
    /// Defaults for the session's turns.
    pub sampling: Sampling,
    /// For people.
    pub title: Option<String>,
    /// The client's own labels.
    pub metadata: Map<String, Value>,
    /// Seconds of idleness after which the KV may leave the device unasked; unset: the runtime's default.
    pub idle_ttl_seconds: Option<u64>,
    /// How the KV is packed once it leaves the device.
    pub kv_codec: KvCodec,
    /// Whether the session takes KV near what would be computed for its own, where that saves computing it.
    pub kv_reuse: KvReuse,
    /// Whether the session is deleted when its turn ends (used by stateless routes).
    pub ephemeral: bool,
}

/// A directory a session's tools may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct FileGrant {
    /// The name guests see.
    pub name: String,
    /// The directory on the host.
    pub path: String,
    /// Whether guests may write; read-only by default.
    #[serde(default)]
    pub writable: bool,
}

/// What to do when the session already runs a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnBusy {
    /// Answer with a typed conflict.
    #[default]
    Reject,
    /// Wait for a place in a bounded queue.
    Enqueue,
}

/// What the model's text must match.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case", tag = "type", content = "value")]
pub enum ConstraintSpec {
    /// Anything.
    #[default]
    None,
    /// A JSON document valid under this schema.
    JsonSchema(String),
    /// A regular expression over the whole text.
    Regex(String),
}

/// One request to a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub struct TurnRequest {
    /// The client's own id; the same id again returns the same turn and runs nothing twice.
    pub turn_id: Option<String>,
    /// What the user says.
    pub input: String,
    /// What to do when a turn is running.
    pub on_busy: OnBusy,
    /// Overrides of the session's sampling.
    pub sampling: Sampling,
    /// Most tokens one message of the model may have.
    pub max_tokens: Option<u32>,
    /// Texts that end the model's message.
    pub stop: Vec<String>,
    /// For a plain chat: what the answer must match.
    pub constraint: ConstraintSpec,
}

/// How one message of the model is written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct GenerateOptions {
    /// What the message is.
    pub kind: SegmentKind,
    /// How long it is kept.
    pub retention: Retention,
    /// Most sampled tokens.
    pub max_tokens: u32,
    /// Overrides of the turn's sampling.
    pub sampling: Sampling,
    /// Texts that end the message; the text itself is not shown.
    pub stop: Vec<String>,
    /// What the text after `prefix` must match.
    pub constraint: ConstraintSpec,
    /// Text the message begins with, given rather than sampled.
    pub prefix: String,
}

/// A piece of a message of the model.
#[derive(Clone, Debug, PartialEq)]
pub enum Chunk {
    /// More text.
    Text(String),
    /// The end.
    Done(Finish),
}
