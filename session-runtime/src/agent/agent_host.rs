//! The host functions of the agent world. Each maps to the turn's [`TurnScope`], which records it in the
//! journal; nothing here decides anything a replay would not decide again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use wasmtime::component::{Resource, ResourceTable};

use super::agent_convert as convert;
use super::bindings::agent::session_runtime::agent::{
    chat, clock, context, log, random, segments, session, state, tools, types,
};
use super::engine::Metered;
use super::failure::tool_failure;
use super::limits::{GuestLimits, Meter, Stop};
use super::registry::{Registry, ToolRequest};
use super::tool_host::now_ms;
use crate::error::{Error, ErrorKind};
use crate::kv::state::KvState;
use crate::restore::report::RestoreReport;
use crate::session::scope::TurnScope;
use crate::session::spec::{Chunk, Retention, SegmentKind};
use crate::session::tool::{Effect, ToolFailure, ToolOutcome, ToolStart};

/// Least time between two progress events of a call.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);

/// A message being written by the model, as the guest holds it.
#[allow(unreachable_pub, reason = "the generated bindings re-export it")]
pub struct Generation {
    segment: chat::Segment,
    done: bool,
}

/// Data of the store of one turn: it owns the turn's scope, and gives it back.
pub(super) struct AgentState {
    meter: Meter,
    pub(super) scope: TurnScope,
    registry: Arc<Registry>,
    table: ResourceTable,
    input_bytes: u64,
    /// Whether a generation has begun and not ended.
    generating: bool,
}

impl AgentState {
    pub(super) fn new(limits: &GuestLimits, scope: TurnScope, registry: Arc<Registry>) -> Self {
        let mut table = ResourceTable::new();
        table.set_max_capacity(1024);
        Self {
            meter: Meter::new(limits),
            scope,
            registry,
            table,
            input_bytes: limits.input_bytes,
            generating: false,
        }
    }

    /// Counts the call and gives the scope.
    fn enter(&mut self) -> wasmtime::Result<&mut TurnScope> {
        self.meter.host_call().map_err(wasmtime::Error::new)?;
        Ok(&mut self.scope)
    }

    /// Reads a message to its end after the guest has lost interest in it.
    pub(super) async fn finish_generation(&mut self) -> Result<(), Error> {
        while self.generating {
            match self.scope.next_chunk().await {
                Ok(Chunk::Text(_)) => {}
                Ok(Chunk::Done(_)) => self.generating = false,
                Err(error) => {
                    self.generating = false;
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

impl Metered for AgentState {
    fn meter(&mut self) -> &mut Meter {
        &mut self.meter
    }

    fn is_cancelled(&self) -> bool {
        self.scope.is_cancelled()
    }
}

/// Ends the guest with an error of the host.
fn stop(error: Error) -> wasmtime::Error {
    wasmtime::Error::new(Stop::Host(error))
}

/// Errors the guest can do something about go to the guest; the others end the turn as they are.
fn give(error: Error, cancelled: bool) -> wasmtime::Result<types::Error> {
    use types::ErrorKind as K;
    if matches!(&*error.code, "outcome_unknown" | "replay_divergence") {
        return Err(stop(error));
    }
    let kind = match error.kind {
        // Nothing more can be put on record, so the guest must not go on from it.
        ErrorKind::Internal | ErrorKind::Unavailable => return Err(stop(error)),
        _ if error.code == "cancelled" => K::Cancelled,
        ErrorKind::Conflict if cancelled => K::Cancelled,
        ErrorKind::InvalidInput => K::InvalidInput,
        ErrorKind::NotFound => K::NotFound,
        ErrorKind::Conflict => K::Failed,
        ErrorKind::Denied => K::Denied,
        ErrorKind::Limit => K::Limit,
    };
    Ok(types::Error {
        kind,
        code: error.code.into_owned(),
        message: error.message,
        retryable: error.retryable,
    })
}

fn refused(kind: types::ErrorKind, code: &str, message: String) -> types::Error {
    types::Error { kind, code: code.to_owned(), message, retryable: false }
}

async fn record(scope: &mut TurnScope, call: &str, value: Value) -> wasmtime::Result<Value> {
    scope.record(call, &Value::Null, async move || Ok(value)).await.map_err(stop)
}

impl types::Host for AgentState {}

impl session::Host for AgentState {
    async fn id(&mut self) -> wasmtime::Result<String> {
        Ok(self.enter()?.session_id().to_owned())
    }

    async fn params(&mut self) -> wasmtime::Result<String> {
        let params = self.enter()?.spec().params.clone();
        Ok(Value::Object(params).to_string())
    }

    async fn turn(&mut self) -> wasmtime::Result<u32> {
        Ok(self.enter()?.turn_number())
    }

    // Not recorded: an interrupted turn that someone had cancelled is not run again.
    async fn cancelled(&mut self) -> wasmtime::Result<bool> {
        Ok(self.enter()?.is_cancelled())
    }
}

impl chat::Host for AgentState {
    async fn append(
        &mut self,
        role: chat::Role,
        kind: chat::SegmentKind,
        retention: chat::Retention,
        text: String,
    ) -> wasmtime::Result<Result<chat::Segment, types::Error>> {
        let scope = self.enter()?;
        let result = scope
            .append(convert::role(role), convert::kind(kind), convert::retention(retention), &text)
            .await;
        let cancelled = scope.is_cancelled();
        self.meter.rest();
        match result {
            Ok(range) => Ok(Ok(convert::segment(&range))),
            Err(error) => Ok(Err(give(error, cancelled)?)),
        }
    }

    async fn generate(
        &mut self,
        options: chat::Options,
    ) -> wasmtime::Result<Result<Resource<Generation>, types::Error>> {
        let running = self.generating;
        let scope = self.enter()?;
        if running {
            let message = "a message is still being written: read it to its end or drop it".to_owned();
            return Ok(Err(refused(types::ErrorKind::Failed, "generation_running", message)));
        }
        let most = scope.request().max_tokens;
        let options = match convert::options(options, most) {
            Ok(options) => options,
            Err(error) => return Ok(Err(refused(types::ErrorKind::InvalidInput, "invalid_options", error))),
        };
        let begun = scope.generate(options).await;
        let (cancelled, range) = (scope.is_cancelled(), scope.generation());
        self.meter.rest();
        if let Err(error) = begun {
            return Ok(Err(give(error, cancelled)?));
        }
        self.generating = true;
        let segment = range.as_ref().map(convert::segment).unwrap_or(chat::Segment {
            id: String::new(),
            start: 0,
            end: 0,
        });
        Ok(Ok(self.table.push(Generation { segment, done: false })?))
    }
}

impl chat::HostGeneration for AgentState {
    async fn next(
        &mut self,
        this: Resource<Generation>,
    ) -> wasmtime::Result<Result<chat::Chunk, types::Error>> {
        let done = self.table.get(&this)?.done;
        let scope = self.enter()?;
        if done {
            let message = "the message has ended".to_owned();
            return Ok(Err(refused(types::ErrorKind::Failed, "generation_done", message)));
        }
        let chunk = scope.next_chunk().await;
        let (cancelled, range) = (scope.is_cancelled(), scope.generation());
        self.meter.rest();
        let generation = self.table.get_mut(&this)?;
        if let Some(range) = range {
            generation.segment = convert::segment(&range);
        }
        match chunk {
            Ok(Chunk::Text(text)) => Ok(Ok(chat::Chunk::Text(text))),
            Ok(Chunk::Done(finish)) => {
                generation.done = true;
                self.generating = false;
                Ok(Ok(chat::Chunk::Done(convert::finish(finish))))
            }
            Err(error) => {
                generation.done = true;
                self.generating = false;
                Ok(Err(give(error, cancelled)?))
            }
        }
    }

    async fn segment(&mut self, this: Resource<Generation>) -> wasmtime::Result<chat::Segment> {
        self.enter()?;
        Ok(self.table.get(&this)?.segment.clone())
    }

    async fn drop(&mut self, this: Resource<Generation>) -> wasmtime::Result<()> {
        let generation = self.table.delete(this)?;
        if !generation.done {
            self.finish_generation().await.map_err(stop)?;
            self.meter.rest();
        }
        Ok(())
    }
}

impl context::Host for AgentState {
    // What the KV is doing differs from run to run, so what the guest was told is recorded.
    async fn status(&mut self) -> wasmtime::Result<context::KvStatus> {
        let scope = self.enter()?;
        let kv = scope.kv().await.map_err(stop)?;
        let told = json!({ "state": kv.state, "tokens": kv.tokens, "resident": kv.resident_tokens });
        let told = record(scope, "context.status", told).await?;
        let context_length = convert::count(scope.context_length());
        self.meter.returned();
        let field = |name: &str| convert::count(told[name].as_u64().unwrap_or(0));
        let state = KvState::deserialize(&told["state"]).map_err(|error| stop(error.into()))?;
        Ok(context::KvStatus {
            state: convert::kv_state(state),
            tokens: field("tokens"),
            resident_tokens: field("resident"),
            context_length,
        })
    }

    async fn last_restore(&mut self) -> wasmtime::Result<Option<context::RestoreReport>> {
        let scope = self.enter()?;
        let report = serde_json::to_value(scope.kv().await.map_err(stop)?.last_restore)
            .map_err(|error| stop(error.into()))?;
        let told = record(scope, "context.last-restore", report).await?;
        self.meter.returned();
        let report: Option<RestoreReport> =
            serde_json::from_value(told).map_err(|error| stop(error.into()))?;
        Ok(report.as_ref().map(convert::restore_report))
    }
}

#[derive(Serialize, Deserialize)]
struct SegmentFacts {
    id: String,
    kind: SegmentKind,
    start: u64,
    end: u64,
    retention: Retention,
}

impl segments::Host for AgentState {
    async fn list_segments(&mut self) -> wasmtime::Result<Vec<segments::Info>> {
        let scope = self.enter()?;
        let facts: Vec<SegmentFacts> = scope
            .segments()
            .into_iter()
            .map(|segment| SegmentFacts {
                id: segment.id,
                kind: segment.kind,
                start: segment.start,
                end: segment.end,
                retention: segment.retention,
            })
            .collect();
        let facts = serde_json::to_value(facts).map_err(|error| stop(error.into()))?;
        let told = record(scope, "segments.list-segments", facts).await?;
        self.meter.returned();
        let facts: Vec<SegmentFacts> = serde_json::from_value(told).map_err(|error| stop(error.into()))?;
        let info = |facts: SegmentFacts| segments::Info {
            id: facts.id,
            kind: convert::kind_to_guest(facts.kind),
            start: convert::count(facts.start),
            end: convert::count(facts.end),
            retention: convert::retention_to_guest(facts.retention),
        };
        Ok(facts.into_iter().map(info).collect())
    }

    async fn set_retention(
        &mut self,
        id: String,
        retention: chat::Retention,
    ) -> wasmtime::Result<Result<(), types::Error>> {
        let scope = self.enter()?;
        let result = scope.set_retention(&id, convert::retention(retention)).await;
        let cancelled = scope.is_cancelled();
        self.meter.returned();
        result.map_or_else(|error| give(error, cancelled).map(Err), |()| Ok(Ok(())))
    }
}

impl tools::Host for AgentState {
    // The list is not written into the journal, only its digest: a tool that changed between a crash and
    // the replay is a divergence, because the model has read the old description.
    async fn list_tools(&mut self) -> wasmtime::Result<Vec<tools::ToolInfo>> {
        let registry = Arc::clone(&self.registry);
        let scope = self.enter()?;
        let mut names = scope.spec().tools.clone();
        names.sort();
        names.dedup();
        let list: Vec<tools::ToolInfo> = names
            .iter()
            .filter_map(|name| registry.tool(name))
            .map(|info| tools::ToolInfo {
                name: info.name,
                description: info.description,
                input_schema: info.input_schema.to_string(),
            })
            .collect();
        let mut hasher = blake3::Hasher::new();
        for tool in &list {
            for part in [&tool.name, &tool.description, &tool.input_schema] {
                hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
            }
        }
        let digest = json!({ "digest": hasher.finalize().to_hex().to_string() });
        scope.record("tools.list-tools", &digest, async || Ok(Value::Null)).await.map_err(stop)?;
        self.meter.returned();
        Ok(list)
    }

    async fn call(&mut self, name: String, input: String) -> wasmtime::Result<Result<String, types::Error>> {
        let (registry, input_bytes) = (Arc::clone(&self.registry), self.input_bytes);
        let scope = self.enter()?;
        let allowed = &scope.spec().tools;
        if !allowed.contains(&name) {
            let name = super::failure::scrub(&name, 64);
            let message =
                format!("this session may not call tool '{name}'; it may call: {}", allowed.join(", "));
            return Ok(Err(refused(types::ErrorKind::NotFound, "tool_not_found", message)));
        }
        // Before the intent is written down: an input the journal should not hold.
        if input.len() as u64 > input_bytes {
            let message =
                format!("the input has {} bytes, more than the limit of {input_bytes}", input.len());
            return Ok(Err(refused(types::ErrorKind::InvalidInput, "input_too_large", message)));
        }
        let (effect, expected_ms) =
            registry.tool(&name).map_or((Effect::Effect, None), |tool| (tool.effect, tool.expected(&input)));
        let outcome = match scope.begin_tool(&name, &input, effect, expected_ms).await {
            Ok(ToolStart::Recorded(outcome)) => outcome,
            Ok(ToolStart::Run { call_id, again }) => {
                let outcome = run_tool(scope, &registry, &name, &input, &call_id, again).await;
                scope.finish_tool(&call_id, outcome.clone()).await.map_err(stop)?;
                outcome
            }
            Err(error) => {
                let cancelled = scope.is_cancelled();
                return Ok(Err(give(error, cancelled)?));
            }
        };
        self.meter.rest();
        Ok(outcome.map_err(convert::failure))
    }
}

/// Runs a tool beside two other things: its progress, which becomes events, and the turn's cancellation.
async fn run_tool(
    scope: &mut TurnScope,
    registry: &Registry,
    name: &str,
    input: &str,
    call_id: &str,
    again: bool,
) -> ToolOutcome {
    let (sink, mut reports) = mpsc::channel(4);
    let request = ToolRequest {
        call_id: call_id.to_owned(),
        session_id: scope.session_id().to_owned(),
        again,
        grants: scope.spec().grants.clone(),
        progress: Some(sink),
    };
    let run = registry.call_tool(name, input, request);
    tokio::pin!(run);
    let mut last: Option<Instant> = None;
    loop {
        tokio::select! {
            outcome = &mut run => return outcome.map(|output| output.text),
            Some(report) = reports.recv() => {
                if last.is_none_or(|last| last.elapsed() >= PROGRESS_EVERY) {
                    scope.tool_progress(call_id, report.done, report.total, &report.message).await;
                    last = Some(Instant::now());
                }
            }
            () = scope.cancelled() => return Err(cancelled(name)),
        }
    }
}

fn cancelled(name: &str) -> ToolFailure {
    tool_failure("cancelled", "cancelled", format!("tool '{name}' was stopped: the turn was cancelled"))
}

impl state::Host for AgentState {
    async fn get(&mut self, key: String) -> wasmtime::Result<Option<String>> {
        Ok(self.enter()?.state_get(&key))
    }

    async fn set(&mut self, key: String, value: String) -> wasmtime::Result<Result<(), types::Error>> {
        let scope = self.enter()?;
        let result = scope.state_set(&key, &value).await;
        let cancelled = scope.is_cancelled();
        self.meter.returned();
        result.map_or_else(|error| give(error, cancelled).map(Err), |()| Ok(Ok(())))
    }

    async fn delete(&mut self, key: String) -> wasmtime::Result<()> {
        self.enter()?.state_delete(&key).await.map_err(stop)?;
        self.meter.returned();
        Ok(())
    }
}

impl clock::Host for AgentState {
    async fn now_ms(&mut self) -> wasmtime::Result<u64> {
        let scope = self.enter()?;
        let told = record(scope, "clock.now-ms", now_ms().into()).await?;
        self.meter.returned();
        told.as_u64().ok_or_else(|| stop(Error::internal("the journal holds no time for clock.now-ms")))
    }
}

impl random::Host for AgentState {
    async fn get_u64(&mut self) -> wasmtime::Result<u64> {
        let scope = self.enter()?;
        // The random bits of a fresh id: 62 of its low 64, the other two being fixed, mixed so that all move.
        let id = uuid::Uuid::now_v7();
        let digest = blake3::hash(id.as_bytes());
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&digest.as_bytes()[..8]);
        let told = record(scope, "random.get-u64", u64::from_le_bytes(bytes).into()).await?;
        self.meter.returned();
        told.as_u64().ok_or_else(|| stop(Error::internal("the journal holds no number for random.get-u64")))
    }
}

impl log::Host for AgentState {
    async fn write(&mut self, level: log::Level, message: String) -> wasmtime::Result<()> {
        self.enter()?;
        let Some(line) = self.meter.log_line(&message) else { return Ok(()) };
        let level = match level {
            log::Level::Debug => "debug",
            log::Level::Info => "info",
            log::Level::Warn => "warn",
            log::Level::Error => "error",
        };
        self.scope.log(level, &line).await;
        self.meter.returned();
        Ok(())
    }
}
