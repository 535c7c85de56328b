//! Bodies of the native routes, and how they become the domain's own types.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::extract::Fields;
use super::problem::Problem;
use crate::kv::state::KvState;
use crate::restore::plan::RestoreMode;
use crate::session::spec::{
    ConstraintSpec, FileGrant, KvCodec, KvReuse, OnBusy, Sampling, SessionSpec, TurnRequest,
};
use crate::session::view::{KvTransition, KvView, SessionStatus, SessionView, TurnView};

/// Most stop texts of a turn.
const MAX_STOPS: usize = 16;

/// What to do when a session of the given id exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum IfExists {
    /// Answer with the conflict `session_exists`.
    #[default]
    Reject,
    /// Answer with the existing session, unchanged.
    Return,
}

/// A new session. Every member is optional.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub(super) struct CreateSession {
    /// The client's own id: at most 64 characters of letters, digits, `_`, `-` and `.`.
    pub(super) id: Option<String>,
    pub(super) if_exists: IfExists,
    /// The tenant that the session's KV counts for: at most 64 characters of letters, digits, `_`, `-` and `.`.
    pub(super) tenant: Option<String>,
    /// The loaded model; another one is refused.
    pub(super) model: Option<String>,
    /// Agent by name; without one the session is a plain chat.
    pub(super) agent: Option<String>,
    /// Tools the session may call, by name.
    pub(super) tools: Vec<String>,
    /// Parameters of the agent.
    #[schema(value_type = Object)]
    pub(super) params: Map<String, Value>,
    /// Directories of the host that the session's tools may use; absolute paths.
    pub(super) grants: Vec<FileGrant>,
    /// System message of a plain chat.
    pub(super) instructions: Option<String>,
    /// Defaults for the session's turns.
    pub(super) sampling: Sampling,
    pub(super) title: Option<String>,
    #[schema(value_type = Object)]
    pub(super) metadata: Map<String, Value>,
    /// Seconds of idleness after which the KV may leave the device unasked.
    pub(super) idle_ttl_seconds: Option<u64>,
    /// How the KV is packed once it leaves the device; `int8` and `int4` lose something for good, `raw` and `lossless` nothing.
    pub(super) kv_codec: KvCodec,
    /// `approximate` keeps what follows a cut segment, moved to its new positions, and KV of another device, rounding or type of element;
    /// the session then goes on near where it would have. `exact` computes it again.
    pub(super) kv_reuse: KvReuse,
}

impl Fields for CreateSession {
    const KNOWN: &'static [&'static str] = &[
        "id",
        "if_exists",
        "tenant",
        "model",
        "agent",
        "tools",
        "params",
        "grants",
        "instructions",
        "sampling",
        "title",
        "metadata",
        "idle_ttl_seconds",
        "kv_codec",
        "kv_reuse",
    ];
    const REFUSED: &'static [(&'static str, &'static str)] = &[
        ("ttl", "use 'idle_ttl_seconds' for the KV; sessions themselves do not expire"),
        ("kv", "KV is saved when the session goes idle; use 'idle_ttl_seconds'"),
        ("budget", "limit each turn with 'max_tokens'"),
        ("initial_events", "send the first message as a turn"),
        ("parent_session_id", "use POST /v1/sessions/{id}/fork"),
        ("ephemeral", "delete the session with DELETE /v1/sessions/{id}"),
    ];
    const MAY_BE_EMPTY: bool = true;
}

impl CreateSession {
    /// The domain's own form.
    pub(super) fn into_spec(self) -> Result<SessionSpec, Problem> {
        check_sampling(&self.sampling, "sampling.")?;
        for (place, grant) in self.grants.iter().enumerate() {
            if !std::path::Path::new(&grant.path).is_absolute() {
                let param = format!("grants[{place}].path");
                let detail = format!("'{param}' is '{}'; it must be an absolute path", grant.path);
                return Err(Problem::invalid(param, detail));
            }
        }
        Ok(SessionSpec {
            id: self.id,
            tenant: self.tenant,
            agent: self.agent,
            tools: self.tools,
            params: self.params,
            grants: self.grants,
            instructions: self.instructions,
            sampling: self.sampling,
            title: self.title,
            metadata: self.metadata,
            idle_ttl_seconds: self.idle_ttl_seconds,
            kv_codec: self.kv_codec,
            kv_reuse: self.kv_reuse,
            ephemeral: false,
        })
    }
}

/// Texts that end a message: one, or a list.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(untagged)]
pub(super) enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Stop {
    /// At most `MAX_STOPS` texts, none empty.
    pub(super) fn into_list(stop: Option<Self>) -> Result<Vec<String>, Problem> {
        let list = match stop {
            None => Vec::new(),
            Some(Self::One(text)) => vec![text],
            Some(Self::Many(list)) => list,
        };
        if list.len() > MAX_STOPS || list.iter().any(String::is_empty) {
            let detail = format!("'stop' must be at most {MAX_STOPS} texts, none of them empty");
            return Err(Problem::invalid("stop", detail));
        }
        Ok(list)
    }
}

/// What the model's text must match.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case", tag = "type")]
pub(super) enum ResponseFormat {
    /// Anything.
    Text,
    /// Any JSON object.
    JsonObject,
    /// A JSON document valid under a schema.
    JsonSchema { json_schema: NamedSchema },
    /// A regular expression over the whole text.
    Regex { pattern: String },
}

/// A JSON schema as OpenAI clients send it.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(super) struct NamedSchema {
    /// For people.
    #[serde(default, rename = "name")]
    pub(super) _name: Option<String>,
    #[schema(value_type = Object)]
    pub(super) schema: Value,
}

impl ResponseFormat {
    /// The domain's own form.
    pub(super) fn into_constraint(format: Option<Self>) -> ConstraintSpec {
        match format {
            None | Some(Self::Text) => ConstraintSpec::None,
            Some(Self::JsonObject) => ConstraintSpec::JsonSchema(r#"{"type":"object"}"#.to_owned()),
            Some(Self::JsonSchema { json_schema }) => {
                ConstraintSpec::JsonSchema(json_schema.schema.to_string())
            }
            Some(Self::Regex { pattern }) => ConstraintSpec::Regex(pattern),
        }
    }
}

/// A new turn.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(super) struct CreateTurn {
    /// What the user says.
    pub(super) input: String,
    /// The client's own id; the same id again answers with the same turn and runs nothing twice.
    pub(super) turn_id: Option<String>,
    /// Answer with the turn's events as they happen (also: `accept: text/event-stream`).
    #[serde(default)]
    pub(super) stream: bool,
    /// Answer 202 at once; follow the turn at `location`.
    #[serde(default)]
    pub(super) background: bool,
    /// `reject` (default) or `enqueue`.
    #[serde(default)]
    pub(super) on_busy: Option<String>,
    /// Only `continue`: a turn goes on when its client leaves.
    #[serde(default)]
    pub(super) on_disconnect: Option<String>,
    pub(super) temperature: Option<f32>,
    pub(super) top_k: Option<u32>,
    pub(super) top_p: Option<f32>,
    pub(super) min_p: Option<f32>,
    pub(super) repetition_penalty: Option<f32>,
    pub(super) seed: Option<u64>,
    /// Most tokens one message of the model may have.
    pub(super) max_tokens: Option<u32>,
    pub(super) stop: Option<Stop>,
    pub(super) response_format: Option<ResponseFormat>,
}

impl Fields for CreateTurn {
    const KNOWN: &'static [&'static str] = &[
        "input",
        "turn_id",
        "stream",
        "background",
        "on_busy",
        "on_disconnect",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "seed",
        "max_tokens",
        "stop",
        "response_format",
    ];
    const REFUSED: &'static [(&'static str, &'static str)] = &[
        ("expected_revision", "name the turn with 'turn_id' to run it once"),
        ("tool_choice", "the agent decides when a tool is called"),
        ("tools", "tools are named when the session is created"),
        ("instructions", "instructions are given when the session is created"),
        ("model", "a session keeps the model it was created with"),
    ];
}

impl CreateTurn {
    /// The domain's own form.
    pub(super) fn into_request(self) -> Result<TurnRequest, Problem> {
        if self.stream && self.background {
            return Err(Problem::invalid("background", "'background' and 'stream' exclude each other"));
        }
        let on_busy = match self.on_busy.as_deref() {
            None | Some("reject") => OnBusy::Reject,
            Some("enqueue") => OnBusy::Enqueue,
            Some(word @ ("interrupt" | "rollback")) => {
                let detail =
                    format!("'on_busy' cannot be '{word}': use 'reject' or 'enqueue', or cancel the turn");
                return Err(Problem::unsupported("on_busy", detail));
            }
            Some(word) => {
                let detail = format!("'on_busy' is '{word}'; it must be 'reject' or 'enqueue'");
                return Err(Problem::invalid("on_busy", detail));
            }
        };
        if self.on_disconnect.as_deref().is_some_and(|word| word != "continue") {
            let detail =
                "'on_disconnect' can only be 'continue': cancel a turn with POST .../turns/{turn}/cancel";
            return Err(Problem::unsupported("on_disconnect", detail));
        }
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        };
        check_sampling(&sampling, "")?;
        check_max_tokens("max_tokens", self.max_tokens)?;
        Ok(TurnRequest {
            turn_id: self.turn_id,
            input: self.input,
            on_busy,
            sampling,
            max_tokens: self.max_tokens,
            stop: Stop::into_list(self.stop)?,
            constraint: ResponseFormat::into_constraint(self.response_format),
        })
    }
}

/// Checks the ranges of sampling parameters; `path` precedes the field's name in the failure.
pub(super) fn check_sampling(sampling: &Sampling, path: &str) -> Result<(), Problem> {
    let ranges = [
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0),
    ];
    for (name, value, low, high) in ranges {
        if value.is_some_and(|value| !(low..=high).contains(&value)) {
            let param = format!("{path}{name}");
            let detail = format!("'{param}' must be from {low} to {high}");
            return Err(Problem::invalid(param, detail));
        }
    }
    Ok(())
}

/// Refuses a limit of zero tokens.
pub(super) fn check_max_tokens(param: &str, value: Option<u32>) -> Result<(), Problem> {
    match value {
        Some(0) => Err(Problem::invalid(param, format!("'{param}' must be at least 1"))),
        _ => Ok(()),
    }
}

/// Options of a fork.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub(super) struct ForkSession {
    /// Id of the new session.
    pub(super) id: Option<String>,
    /// Title of the new session.
    pub(super) title: Option<String>,
}

impl Fields for ForkSession {
    const KNOWN: &'static [&'static str] = &["id", "title"];
    const REFUSED: &'static [(&'static str, &'static str)] =
        &[("from", "a fork starts at the end of the history"), ("include_kv", "a fork always shares the KV")];
    const MAY_BE_EMPTY: bool = true;
}

/// Options of an eviction: none yet.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub(super) struct Evict {}

impl Fields for Evict {
    const KNOWN: &'static [&'static str] = &[];
    const REFUSED: &'static [(&'static str, &'static str)] = &[
        ("to_tier", "KV goes to disk"),
        ("ttl", "set 'idle_ttl_seconds' when the session is created"),
        ("wait", "the answer always waits for the eviction"),
    ];
    const MAY_BE_EMPTY: bool = true;
}

/// Options of a restore.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub(super) struct Restore {
    /// `planned` (default), `load`, `recompute`, `alternate` or `cut:N` (the lowest N layers are recomputed).
    pub(super) mode: Option<String>,
}

impl Fields for Restore {
    const KNOWN: &'static [&'static str] = &["mode"];
    const REFUSED: &'static [(&'static str, &'static str)] = &[
        ("wait", "the answer always waits for the restore"),
        ("ttl", "see 'idle_ttl_seconds' of the session"),
    ];
    const MAY_BE_EMPTY: bool = true;
}

impl Restore {
    /// The domain's own form.
    pub(super) fn mode(&self) -> Result<RestoreMode, Problem> {
        let text = self.mode.as_deref().unwrap_or("planned");
        text.parse().map_err(|error: String| Problem::invalid("mode", error))
    }
}

/// An empty body, or `{}`.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(default)]
pub(super) struct Empty {}

impl Fields for Empty {
    const KNOWN: &'static [&'static str] = &[];
    const MAY_BE_EMPTY: bool = true;
}

/// Query of the list of sessions.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ListSessions {
    /// Only sessions of this status.
    pub(super) status: Option<SessionStatus>,
    /// Only sessions whose KV is in this state.
    pub(super) kv_state: Option<KvState>,
    /// Only sessions of this agent.
    pub(super) agent: Option<String>,
    /// `desc` (newest first, default) or `asc`.
    #[serde(default)]
    pub(super) order: super::page::Order,
    /// Cursor: the last id of the page before.
    pub(super) after: Option<String>,
    /// From 1 to 1000; default 100.
    pub(super) limit: Option<u32>,
}

/// A session.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct SessionObject {
    /// Always `session`.
    object: &'static str,
    #[serde(flatten)]
    pub(super) view: SessionView,
}

impl SessionObject {
    pub(super) fn new(view: SessionView) -> Self {
        Self { object: "session", view }
    }
}

/// A turn.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct TurnObject {
    /// Always `turn`.
    object: &'static str,
    #[serde(flatten)]
    pub(super) view: TurnView,
}

impl From<TurnView> for TurnObject {
    fn from(view: TurnView) -> Self {
        Self { object: "turn", view }
    }
}

/// What was deleted.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Deleted {
    pub(super) id: String,
    /// Always `session.deleted`.
    pub(super) object: &'static str,
    pub(super) deleted: bool,
}

/// A change of KV state with its place in the log.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct TransitionObject {
    /// Sequence number of the event `kv.transition`.
    pub(super) seq: u64,
    /// Milliseconds since the Unix epoch.
    pub(super) time_ms: u64,
    #[serde(flatten)]
    pub(super) transition: KvTransition,
}

/// What an eviction did.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Evicted {
    #[serde(flatten)]
    pub(super) transition: KvTransition,
    /// The KV afterwards.
    pub(super) kv: KvView,
}

/// What a restore did.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Restored {
    /// How it was asked for.
    pub(super) mode: String,
    #[serde(flatten)]
    pub(super) report: crate::restore::report::RestoreReport,
    /// The KV afterwards.
    pub(super) kv: KvView,
}
