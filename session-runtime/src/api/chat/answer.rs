//! The answers of a chat completion in OpenAI's own shapes, with one extra member, `session_runtime`.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Value, json};

use crate::restore::report::RestoreReport;
use crate::session::spec::Finish;
use crate::session::view::{KvView, TurnView, Usage};

/// A finished answer.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(in crate::api) struct ChatCompletion {
    id: String,
    /// Always `chat.completion`.
    object: &'static str,
    /// Seconds since the Unix epoch.
    created: u64,
    model: String,
    choices: Vec<Choice>,
    usage: ChatUsage,
    session_runtime: Extra,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Choice {
    index: u32,
    message: AssistantMessage,
    /// `stop` or `length`.
    finish_reason: &'static str,
    logprobs: Option<bool>,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
struct AssistantMessage {
    role: &'static str,
    content: String,
    refusal: Option<String>,
}

/// Counts of tokens as OpenAI clients read them.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct ChatUsage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
struct PromptDetails {
    /// Tokens whose KV was reused.
    cached_tokens: u64,
}

#[derive(Debug, Serialize, utoipa::ToSchema)]
struct CompletionDetails {
    reasoning_tokens: u64,
}

/// What only this server knows.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct Extra {
    session_id: String,
    turn_id: String,
    /// Where the session's KV is; absent for a session that ends with the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<KvView>,
    /// The restores this turn caused.
    restores: Vec<RestoreReport>,
}

impl From<&Usage> for ChatUsage {
    fn from(usage: &Usage) -> Self {
        Self {
            prompt_tokens: usage.input_tokens,
            completion_tokens: usage.output_tokens,
            total_tokens: usage.input_tokens + usage.output_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: CompletionDetails { reasoning_tokens: usage.reasoning_tokens },
        }
    }
}

/// OpenAI's word for the end of a message.
pub(super) fn finish_reason(finish: Option<Finish>) -> &'static str {
    match finish {
        Some(Finish::MaxTokens) => "length",
        _ => "stop",
    }
}

/// Seconds since the Unix epoch.
pub(super) fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The id of the completion a turn made.
pub(super) fn completion_id(turn: &str) -> String {
    format!("chatcmpl-{turn}")
}

/// The answer of a finished turn.
pub(super) fn completion(model: String, turn: TurnView, kv: Option<KvView>) -> ChatCompletion {
    let message = AssistantMessage { role: "assistant", content: turn.output_text.clone(), refusal: None };
    let choice = Choice { index: 0, message, finish_reason: finish_reason(turn.finish), logprobs: None };
    ChatCompletion {
        id: completion_id(&turn.id),
        object: "chat.completion",
        created: now_seconds(),
        model,
        choices: vec![choice],
        usage: ChatUsage::from(&turn.usage),
        session_runtime: Extra { session_id: turn.session, turn_id: turn.id, kv, restores: turn.restores },
    }
}

/// Makes the chunks of one streamed answer.
#[derive(Debug)]
pub(super) struct Chunks {
    id: String,
    created: u64,
    model: String,
    include_usage: bool,
}

impl Chunks {
    pub(super) fn new(turn: &str, model: String, include_usage: bool) -> Self {
        Self { id: completion_id(turn), created: now_seconds(), model, include_usage }
    }

    fn chunk(&self, choices: Value) -> Value {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn delta(&self, delta: Value, finish_reason: Option<&str>) -> Value {
        self.chunk(json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason}]))
    }

    /// The first chunk: who speaks, and for which session.
    pub(super) fn role(&self, session: &str, turn: &str) -> Value {
        let mut chunk = self.delta(json!({"role": "assistant", "content": ""}), None);
        chunk["session_runtime"] = json!({"session_id": session, "turn_id": turn});
        chunk
    }

    /// More of the answer.
    pub(super) fn content(&self, text: &str) -> Value {
        self.delta(json!({"content": text}), None)
    }

    /// More of the reasoning, under the name other servers use.
    pub(super) fn reasoning(&self, text: &str) -> Value {
        self.delta(json!({"reasoning_content": text}), None)
    }

    /// The chunk that ends the choice.
    pub(super) fn finish(&self, finish: Option<Finish>) -> Value {
        self.delta(json!({}), Some(finish_reason(finish)))
    }

    /// The last chunk, where the client asked for it.
    pub(super) fn usage(&self, usage: &Usage) -> Option<Value> {
        if !self.include_usage {
            return None;
        }
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = serde_json::to_value(ChatUsage::from(usage)).ok()?;
        Some(chunk)
    }
}
