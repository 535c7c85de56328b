//! What every session shares: store, scheduler, tokenizer, frames, limits.

use std::sync::Arc;

use store::{Clock, Store};

use kernels::backend::KvType;

use super::spec::{ConstraintSpec, GenerateOptions, KvCodec, Role, Sampling, SegmentKind};
use crate::engine::sampler::SamplingParams;
use crate::error::Error;
use crate::kv::contract::{Contract, cell_layout};
use crate::models::constraint::{Constraint, ConstraintFactory};
use crate::models::template::{ChatTemplate, Frames};
use crate::models::tokenizer::{Piece, Tokenizer};
use crate::scheduler::Scheduler;

/// Bounds of the session layer (I8).
#[derive(Clone, Debug)]
pub struct SessionLimits {
    /// Sessions that may exist.
    pub sessions: usize,
    /// Turns that may wait for one session.
    pub queued_turns: usize,
    /// Keys of an agent's state.
    pub state_keys: usize,
    /// Bytes of one value of it.
    pub state_value_bytes: usize,
    /// Bytes of one message given to a session.
    pub message_bytes: usize,
    /// Most tokens the model may write in one message when nobody says.
    pub default_max_tokens: u32,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            sessions: 10_000,
            queued_turns: 16,
            state_keys: 64,
            state_value_bytes: 16 << 10,
            message_bytes: 1 << 20,
            default_max_tokens: 512,
        }
    }
}

/// What every session shares.
pub struct SessionHost {
    /// Journal, segments and cells.
    pub store: Store,
    /// The engine's thread.
    pub scheduler: Scheduler,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's chat template.
    pub template: ChatTemplate,
    /// What the template puts around messages.
    pub frames: Frames,
    /// Makes constraints.
    pub constraints: ConstraintFactory,
    /// The present contract.
    pub contract: Contract,
    /// Alias or path of the model.
    pub model: String,
    /// Most tokens of a session.
    pub context_length: usize,
    /// Bounds.
    pub limits: SessionLimits,
    /// Wall and monotonic time.
    pub clock: Arc<dyn Clock>,
}

impl SessionHost {
    /// Refuses a codec that the runtime's KV cannot be packed with: those with a loss are made for f16.
    pub(super) fn check_codec(&self, codec: KvCodec) -> Result<(), Error> {
        if codec.lossy().is_none() || self.contract.kv_layout == cell_layout(KvType::F16) {
            return Ok(());
        }
        Err(Error::invalid(
            "kv_codec_unsupported",
            format!(
                "KV is packed from f16, and this runtime keeps it as {}: leave kv_codec out, or start with --kv-type f16",
                self.contract.kv_layout
            ),
        ))
    }

    /// Token ids of a whole message with its frame. The first message of a session also gets what the
    /// template puts before it, such as a default system message.
    pub(super) fn encode_message(&self, role: Role, text: &str, first: bool) -> Result<Vec<u32>, Error> {
        if text.len() > self.limits.message_bytes {
            return Err(Error::invalid(
                "message_too_large",
                format!(
                    "the message has {} bytes; {} are allowed in one message",
                    text.len(),
                    self.limits.message_bytes
                ),
            ));
        }
        let refused = |error: crate::models::template::TemplateError| Error::internal(error);
        if first {
            let system = (role == Role::System).then_some(text);
            let opening = self.frames.opening(&self.template, system, &[]).map_err(refused)?;
            let mut pieces = opening.pieces();
            if role != Role::System {
                pieces.extend([
                    Piece::Frame(self.frames.before(role)),
                    Piece::Text(text),
                    Piece::Frame(self.frames.after(role)),
                ]);
            }
            return self.tokenizer.encode_pieces(&pieces).map_err(Error::internal);
        }
        self.frames.encode_message(&self.tokenizer, role, text).map_err(refused)
    }

    /// Token ids that make the model write a message beginning with `prefix`.
    pub(super) fn encode_opening(&self, prefix: &str) -> Result<Vec<u32>, Error> {
        let prompt = Piece::Frame(self.frames.generation_prompt());
        let (call, rest) = self.split_tool_call(prefix);
        let mut pieces = vec![prompt];
        pieces.extend(call.map(Piece::Frame));
        if !rest.is_empty() {
            pieces.push(Piece::Text(rest));
        }
        self.tokenizer.encode_pieces(&pieces).map_err(Error::internal)
    }

    /// Token ids that close a message of the model.
    pub(super) fn encode_closing(&self, options: &GenerateOptions) -> Result<Vec<u32>, Error> {
        let mut pieces = Vec::new();
        if options.kind == SegmentKind::ToolCall
            && self.split_tool_call(&options.prefix).0.is_some()
            && let Some(frame) = self.frames.tool_call()
        {
            pieces.push(Piece::Frame(&frame.close));
        }
        pieces.push(Piece::Frame(self.frames.after(Role::Assistant)));
        self.tokenizer.encode_pieces(&pieces).map_err(Error::internal)
    }

    /// Splits off the text by which the model's template opens a tool call.
    fn split_tool_call<'a>(&'a self, prefix: &'a str) -> (Option<&'a str>, &'a str) {
        let open = self.frames.tool_call().map(|frame| frame.open.as_str());
        match open.and_then(|open| Some((open, prefix.strip_prefix(open)?))) {
            Some((open, rest)) => (Some(open), rest),
            None => (None, prefix),
        }
    }

    /// The constraint of a message.
    pub(super) fn constraint(&self, spec: &ConstraintSpec) -> Result<Option<Constraint>, Error> {
        let made = match spec {
            ConstraintSpec::None => return Ok(None),
            ConstraintSpec::JsonSchema(schema) => self.constraints.json_schema(schema),
            ConstraintSpec::Regex(pattern) => self.constraints.regex(pattern),
        };
        made.map(Some).map_err(|error| Error::invalid("constraint_invalid", error.to_string()))
    }

    /// Refuses a history that no longer fits the context.
    pub(super) fn check_context(&self, tokens: usize) -> Result<(), Error> {
        if tokens < self.context_length {
            return Ok(());
        }
        Err(Error::invalid(
            "context_length_exceeded",
            format!(
                "the session would have {tokens} tokens and the model's context holds {}: send a shorter message \
                 or start a new session",
                self.context_length
            ),
        ))
    }
}

/// Every field set; unset ones are greedy.
///
/// # Errors
/// Names the field that is out of range.
pub fn sampling_params(sampling: &Sampling) -> Result<SamplingParams, Error> {
    let base = SamplingParams::default();
    let params = SamplingParams {
        temperature: sampling.temperature.unwrap_or(base.temperature),
        top_k: sampling.top_k.map_or(base.top_k, |k| k as usize),
        top_p: sampling.top_p.unwrap_or(base.top_p),
        min_p: sampling.min_p.unwrap_or(base.min_p),
        repetition_penalty: sampling.repetition_penalty.unwrap_or(base.repetition_penalty),
        seed: sampling.seed.unwrap_or(base.seed),
    };
    let checks = [
        ("temperature", params.temperature, 0.0..=10.0),
        ("top_p", params.top_p, f32::MIN_POSITIVE..=1.0),
        ("min_p", params.min_p, 0.0..=1.0),
        ("repetition_penalty", params.repetition_penalty, 0.01..=10.0),
    ];
    for (name, value, range) in checks {
        if !range.contains(&value) {
            return Err(Error::invalid(
                "invalid_request",
                format!("{name} is {value}: give a value from {} to {}", range.start(), range.end()),
            ));
        }
    }
    Ok(params)
}
