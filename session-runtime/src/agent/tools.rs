//! What a tool is, whether a component or a part of the embedding application, and what surrounds each call:
//! the check of the input, the wall deadline, the check of the result. Knows no wasmtime.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::mpsc;

use super::failure::{MESSAGE_BYTES, guest_code, scrub, tool_failure};
use super::limits::GuestLimits;
use super::policy::Policy;
use super::schema;
use crate::session::tool::{Effect, ToolFailure};

/// Where a tool or an agent comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestKind {
    /// A WebAssembly component.
    Wasm,
    /// Code of the embedding application.
    Native,
}

/// A tool as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolInfo {
    /// Name; for a component that could not be loaded, its file's name.
    pub name: String,
    /// For the model and for people.
    pub description: String,
    /// JSON Schema of the input, root type `object`.
    pub input_schema: Value,
    /// JSON Schema of the output.
    pub output_schema: Value,
    /// What a call may change in the world.
    pub effect: Effect,
    /// What it asks for beyond log and clock, such as `files`.
    pub wants: Vec<String>,
    /// BLAKE3 of the component, hexadecimal; absent for native tools.
    pub digest: Option<String>,
    /// Component or native.
    pub kind: GuestKind,
    /// How long a call usually takes, milliseconds, where the tool says so: the idle policy may believe it.
    pub expected_ms: Option<u64>,
    /// The property of the input that says how many seconds a call takes.
    pub expected_seconds_of: Option<String>,
    /// Why it cannot be used.
    pub error: Option<String>,
}

impl ToolInfo {
    /// A native tool that takes any JSON object and gives text.
    pub fn native(name: &str, description: &str, effect: Effect) -> Self {
        Self {
            name: name.to_owned(),
            description: description.to_owned(),
            input_schema: serde_json::json!({ "type": "object" }),
            output_schema: Value::Bool(true),
            effect,
            wants: Vec::new(),
            digest: None,
            kind: GuestKind::Native,
            expected_ms: None,
            expected_seconds_of: None,
            error: None,
        }
    }

    /// As this one, with how long a call usually takes.
    #[must_use]
    pub fn expecting(mut self, time: Duration) -> Self {
        self.expected_ms = Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// Milliseconds that a call with this input is expected to take: what its input says, else what the tool says of all.
    pub fn expected(&self, input: &str) -> Option<u64> {
        let said = self.expected_seconds_of.as_ref().and_then(|property| {
            let input: Value = serde_json::from_str(input).ok()?;
            let time = Duration::try_from_secs_f64(input.get(property)?.as_f64()?).ok()?;
            u64::try_from(time.as_millis()).ok()
        });
        said.or(self.expected_ms)
    }
}

/// An agent as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AgentInfo {
    /// Name; for a component that could not be loaded, its file's name.
    pub name: String,
    /// For people.
    pub description: String,
    /// JSON Schema of the parameters a session may give.
    pub params_schema: Value,
    /// BLAKE3 of the component, hexadecimal.
    pub digest: Option<String>,
    /// Always a component.
    pub kind: GuestKind,
    /// Why it cannot be used.
    pub error: Option<String>,
}

/// What a tool gave back: a JSON document, and the same for reading.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolOutput {
    /// JSON document; for native tools, the text as a JSON string.
    pub json: String,
    /// What the agent is shown.
    pub text: String,
}

/// How far a long call is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Units done.
    pub done: u64,
    /// Units in all; 0 when unknown.
    pub total: u64,
    /// For people.
    pub message: String,
}

/// Where progress goes. Sending never waits: what does not fit is dropped, the next report is newer.
pub type ProgressSink = mpsc::Sender<Progress>;

/// Facts of one call, and what it may reach.
#[derive(Clone)]
pub struct ToolContext {
    call_id: String,
    session_id: String,
    again: bool,
    deadline: Instant,
    policy: Arc<Policy>,
    progress: Option<ProgressSink>,
}

impl ToolContext {
    pub(super) fn new(
        call_id: &str,
        session_id: &str,
        policy: Arc<Policy>,
        time: Duration,
        progress: Option<ProgressSink>,
    ) -> Self {
        Self {
            call_id: call_id.to_owned(),
            session_id: session_id.to_owned(),
            again: false,
            deadline: Instant::now() + time,
            policy,
            progress,
        }
    }

    #[must_use]
    pub(super) fn again(mut self, again: bool) -> Self {
        self.again = again;
        self
    }

    /// The call's id: the same when the call runs again after a crash, so it can serve as an idempotency key.
    pub fn call_id(&self) -> &str {
        &self.call_id
    }

    /// The session that calls.
    pub fn session_id(&self) -> &str {
        &self.session_id
    }

    /// Whether an earlier run of this very call was interrupted.
    pub fn is_again(&self) -> bool {
        self.again
    }

    /// Time left before the host gives the call up.
    pub fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// What the call may reach of the world.
    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// Reports how far the call is.
    pub fn progress(&self, done: u64, total: u64, message: &str) {
        if let Some(sink) = &self.progress {
            // A full queue means that a newer report is coming anyway.
            let _ = sink.try_send(Progress { done, total, message: scrub(message, 512) });
        }
    }
}

/// A tool that is part of the embedding application. It runs in this process, outside the sandbox.
#[async_trait::async_trait]
pub trait NativeTool: Send + Sync {
    /// What the tool is. Asked once, when it is registered.
    fn info(&self) -> ToolInfo;

    /// Runs one call. `input` is a JSON object that fits the input schema. The text is what the agent sees.
    async fn call(&self, input: &str, cx: ToolContext) -> Result<String, ToolFailure>;
}

/// Something that runs calls: both kinds of tool, behind the same checks.
#[async_trait::async_trait]
pub(super) trait Callable: Send + Sync {
    async fn run(&self, input: &str, cx: ToolContext) -> Result<ToolOutput, ToolFailure>;
}

pub(super) struct Native(pub(super) Arc<dyn NativeTool>);

#[async_trait::async_trait]
impl Callable for Native {
    async fn run(&self, input: &str, cx: ToolContext) -> Result<ToolOutput, ToolFailure> {
        let text = self.0.call(input, cx).await?;
        Ok(ToolOutput { json: Value::String(text.clone()).to_string(), text })
    }
}

/// Checks the input, runs the call within its deadline, checks the result.
pub(super) async fn call(
    info: &ToolInfo,
    tool: &dyn Callable,
    input: &str,
    cx: ToolContext,
    limits: &GuestLimits,
) -> Result<ToolOutput, ToolFailure> {
    check_input(info, input, limits)?;
    let remaining = cx.remaining();
    let run = AssertUnwindSafe(tool.run(input, cx)).catch_unwind();
    let name = &info.name;
    let outcome = match tokio::time::timeout(remaining, run).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => Err(tool_failure("failed", "panic", format!("tool '{name}' panicked in the host"))),
        Err(_) => {
            let ms = limits.call_deadline_ms;
            let message =
                format!("tool '{name}' was stopped: it ran past its {ms} ms (limits.call_deadline_ms)");
            Err(tool_failure("limit", "deadline", message))
        }
    };
    match outcome {
        Ok(output) => check_output(info, output, limits),
        Err(failure) => Err(clean(failure)),
    }
}

fn check_input(info: &ToolInfo, input: &str, limits: &GuestLimits) -> Result<(), ToolFailure> {
    let name = &info.name;
    let bad =
        |why: String| tool_failure("invalid_input", "invalid_input", format!("input of '{name}': {why}"));
    if input.len() as u64 > limits.input_bytes {
        return Err(bad(format!("{} bytes, more than the limit of {}", input.len(), limits.input_bytes)));
    }
    let value: Value =
        serde_json::from_str(input).map_err(|error| bad(format!("no JSON document: {error}")))?;
    if !value.is_object() {
        return Err(bad("must be a JSON object".to_owned()));
    }
    schema::check(&info.input_schema, &value).map_err(bad)
}

fn check_output(
    info: &ToolInfo,
    output: ToolOutput,
    limits: &GuestLimits,
) -> Result<ToolOutput, ToolFailure> {
    let name = &info.name;
    let bytes = output.json.len().max(output.text.len()) as u64;
    if bytes > limits.output_bytes {
        let message =
            format!("tool '{name}' gave {bytes} bytes, more than the limit of {}", limits.output_bytes);
        return Err(tool_failure("limit", "output_too_large", message));
    }
    if let Err(error) = serde_json::from_str::<serde::de::IgnoredAny>(&output.json) {
        let message = format!("tool '{name}' gave a result that is no JSON document: {error}");
        return Err(tool_failure("failed", "output_invalid", message));
    }
    Ok(output)
}

// A failure is a guest's text too.
fn clean(failure: ToolFailure) -> ToolFailure {
    const KINDS: [&str; 7] =
        ["invalid_input", "not_found", "denied", "limit", "cancelled", "unavailable", "failed"];
    let kind = if KINDS.contains(&failure.kind.as_str()) { failure.kind } else { "failed".to_owned() };
    ToolFailure {
        kind,
        code: guest_code(&failure.code),
        message: scrub(&failure.message, MESSAGE_BYTES),
        retryable: failure.retryable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Echo;

    #[async_trait::async_trait]
    impl NativeTool for Echo {
        fn info(&self) -> ToolInfo {
            ToolInfo::native("echo", "Gives its input back.", Effect::Pure)
        }

        async fn call(&self, input: &str, cx: ToolContext) -> Result<String, ToolFailure> {
            match input {
                r#"{"do":"panic"}"# => panic!("on purpose"),
                r#"{"do":"hang"}"# => std::future::pending().await,
                r#"{"do":"fail"}"# => Err(tool_failure("odd", "Odd Code", "a\u{1b}b")),
                r#"{"do":"flood"}"# => Ok("x".repeat(1000)),
                _ => {
                    cx.progress(1, 2, "half");
                    Ok(input.to_owned())
                }
            }
        }
    }

    async fn run(input: &str, progress: Option<ProgressSink>) -> Result<ToolOutput, ToolFailure> {
        let limits = GuestLimits { output_bytes: 100, call_deadline_ms: 50, ..Default::default() };
        let policy = Arc::new(Policy::nothing(&limits));
        let cx = ToolContext::new("call_1", "sess_1", policy, Duration::from_millis(50), progress);
        let mut info = Echo.info();
        info.input_schema = serde_json::json!({"type": "object", "properties": {"n": {"type": "integer"}}});
        call(&info, &Native(Arc::new(Echo)), input, cx, &limits).await
    }

    #[tokio::test]
    async fn a_native_tool_runs_behind_the_same_checks() {
        let (sink, mut reports) = mpsc::channel(1);
        let output = run(r#"{"n":1}"#, Some(sink)).await.unwrap();
        assert_eq!(output.text, r#"{"n":1}"#);
        assert_eq!(output.json, r#""{\"n\":1}""#);
        assert_eq!(reports.recv().await.unwrap(), Progress { done: 1, total: 2, message: "half".into() });
        let failure = run(r#"{"n":"one"}"#, None).await.unwrap_err();
        assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("invalid_input", "invalid_input"));
        assert_eq!(failure.message, "input of 'echo': property 'n' must be of type integer, not string");
        for bad in ["", "[1]", "{", "nonsense"] {
            assert_eq!(run(bad, None).await.unwrap_err().code, "invalid_input");
        }
    }

    #[tokio::test]
    async fn i8_a_native_tool_that_misbehaves_ends_in_a_typed_failure() {
        for (input, kind, code) in [
            (r#"{"do":"panic"}"#, "failed", "panic"),
            (r#"{"do":"hang"}"#, "limit", "deadline"),
            (r#"{"do":"flood"}"#, "limit", "output_too_large"),
            (r#"{"do":"fail"}"#, "failed", "failed"),
        ] {
            let failure = run(input, None).await.unwrap_err();
            assert_eq!((failure.kind.as_str(), failure.code.as_str()), (kind, code), "{input}");
            assert!(!failure.message.contains('\u{1b}'));
        }
    }
}
