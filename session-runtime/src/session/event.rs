//! The events of a session's journal. The journal is the source of truth: a session is what folding
//! its events gives. Events hold deltas, never whole transcripts.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::record::SegmentRecord;
use super::spec::{Finish, GenerateOptions, Retention, Role, SegmentKind, SessionSpec, TurnRequest};
use super::tool::{Effect, ToolFailure};
use super::view::{KvTransition, Relocation, TurnError, TurnStatus, Usage};
use crate::error::Error;
use crate::kv::contract::Contract;
use crate::restore::report::RestoreReport;

/// One event. The serialised form is `{"type": ..., "data": {...}}`; the journal keeps the type as the
/// record's kind and the data as its payload.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", content = "data")]
#[expect(missing_docs, reason = "the members are named as in the API documentation")]
pub enum SessionEvent {
    /// A session begins.
    #[serde(rename = "session.created")]
    Created { spec: Box<SessionSpec>, model: String, contract: Box<Contract> },
    /// A session begins with another one's history.
    #[serde(rename = "session.forked")]
    Forked {
        parent: String,
        spec: Box<SessionSpec>,
        model: String,
        contract: Box<Contract>,
        tokens: Vec<u32>,
        segments: Vec<SegmentRecord>,
        state: Map<String, Value>,
        agent_started: bool,
        turns: u32,
    },
    /// The KV was rebuilt under the runtime's present contract, which may be that of another model.
    #[serde(rename = "session.contract")]
    ContractChanged {
        contract: Box<Contract>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        model: Option<String>,
    },
    /// A turn waits behind another one.
    #[serde(rename = "turn.queued")]
    TurnQueued { turn: String, request: Box<TurnRequest> },
    /// A turn begins.
    #[serde(rename = "turn.started")]
    TurnStarted { turn: String, number: u32, input: String, request: Box<TurnRequest> },
    /// A turn ended.
    #[serde(rename = "turn.finished")]
    TurnFinished {
        turn: String,
        status: TurnStatus,
        /// Why the last message of the model ended, if there was one.
        #[serde(default)]
        finish: Option<Finish>,
        error: Option<TurnError>,
        usage: Usage,
    },
    /// A whole message was appended.
    #[serde(rename = "segment.appended")]
    SegmentAppended {
        call: Option<u64>,
        turn: Option<String>,
        segment: String,
        role: Role,
        kind: SegmentKind,
        retention: Retention,
        start: u64,
        ids: Vec<u32>,
        text: String,
    },
    /// A message of the model begins; `ids` are its frame and its given prefix.
    #[serde(rename = "generation.started")]
    GenerationStarted {
        call: u64,
        turn: String,
        segment: String,
        kind: SegmentKind,
        retention: Retention,
        options: Box<GenerateOptions>,
        start: u64,
        ids: Vec<u32>,
        text: String,
    },
    /// Tokens were sampled.
    #[serde(rename = "generation.tokens")]
    GenerationTokens { turn: String, segment: String, kind: SegmentKind, ids: Vec<u32>, text: String },
    /// A message of the model ended; `ids` close its frame.
    #[serde(rename = "generation.finished")]
    GenerationFinished {
        call: u64,
        turn: String,
        segment: String,
        finish: Finish,
        ids: Vec<u32>,
        usage: Usage,
        /// What ended it, when it could not go on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<Box<Error>>,
    },
    /// A tool is about to be called: its intent, before any effect.
    #[serde(rename = "tool.started")]
    ToolStarted { call: u64, turn: String, call_id: String, tool: String, input: String, effect: Effect },
    /// How far a tool is.
    #[serde(rename = "tool.progress")]
    ToolProgress { turn: String, call_id: String, done: u64, total: u64, message: String },
    /// A tool ended.
    #[serde(rename = "tool.finished")]
    ToolFinished {
        call: u64,
        turn: String,
        call_id: String,
        tool: String,
        ok: bool,
        text: Option<String>,
        error: Option<ToolFailure>,
    },
    /// A host call whose result must be the same on replay.
    #[serde(rename = "host.call")]
    HostCall { call: u64, turn: String, name: String, args_digest: String, result: Value },
    /// A call was refused: on record because what refused it may not hold any more on replay.
    #[serde(rename = "call.refused")]
    CallRefused { call: u64, turn: String, name: String, error: Box<Error> },
    /// The agent's state changed.
    #[serde(rename = "state.set")]
    StateSet { call: u64, turn: String, key: String, value: Option<String> },
    /// A segment is to be kept differently.
    #[serde(rename = "segment.retention")]
    SegmentRetention { call: u64, turn: String, segment: String, retention: Retention },
    /// A segment was removed from the history.
    #[serde(rename = "segment.cut")]
    SegmentCut { segment: String, start: u64, end: u64, reason: String },
    /// The agent's `start` ended well.
    #[serde(rename = "agent.started")]
    AgentStarted { turn: String },
    /// The agent said something to the operator.
    #[serde(rename = "agent.log")]
    AgentLog { turn: String, level: String, message: String },
    /// The KV changed state.
    #[serde(rename = "kv.transition")]
    KvTransition(KvTransition),
    /// A restore ended.
    #[serde(rename = "kv.restore")]
    KvRestore(Box<RestoreReport>),
    /// What follows a cut was moved instead of computed again.
    #[serde(rename = "kv.relocated")]
    KvRelocated(Relocation),
}

impl SessionEvent {
    /// Kind and payload for the journal.
    ///
    /// # Errors
    /// The event cannot be written as JSON.
    pub fn encode(&self) -> Result<(String, Vec<u8>), Error> {
        let mut value = serde_json::to_value(self)?;
        let kind = value["type"].as_str().unwrap_or_default().to_owned();
        let payload = serde_json::to_vec(&value["data"].take())?;
        Ok((kind, payload))
    }

    /// The event of a journal record.
    ///
    /// # Errors
    /// A kind or payload that this version does not know.
    pub fn decode(kind: &str, payload: &[u8]) -> Result<Self, Error> {
        let data: Value = serde_json::from_slice(payload)?;
        serde_json::from_value(serde_json::json!({ "type": kind, "data": data })).map_err(Error::from)
    }

    /// The number of the turn's call that this event records, if it does.
    pub fn call(&self) -> Option<u64> {
        match self {
            Self::SegmentAppended { call, .. } => *call,
            Self::GenerationStarted { call, .. }
            | Self::GenerationFinished { call, .. }
            | Self::ToolStarted { call, .. }
            | Self::ToolFinished { call, .. }
            | Self::HostCall { call, .. }
            | Self::CallRefused { call, .. }
            | Self::StateSet { call, .. }
            | Self::SegmentRetention { call, .. } => Some(*call),
            _ => None,
        }
    }
}
