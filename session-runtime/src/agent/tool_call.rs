//! Runs one call of a tool component in a fresh store.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Semaphore;
use wasmtime::component::{HasSelf, Linker};

use super::bindings::tool::{self as wit, ToolPre};
use super::component::{LoadError, Loaded, World};
use super::engine::GuestEngine;
use super::failure::{self, scrub, tool_failure};
use super::limits::GuestLimits;
use super::policy::{FILES, Policy};
use super::schema;
use super::tool_host::{ToolState, host_failure};
use super::tools::{Callable, GuestKind, ToolContext, ToolInfo, ToolOutput};
use crate::session::tool::{Effect, ToolFailure};

const DESCRIPTION_BYTES: usize = 8 << 10;
const SCHEMA_BYTES: usize = 64 << 10;
/// Wall time of `describe`, milliseconds.
const DESCRIBE_MS: u64 = 5_000;
/// What a tool may want.
const OFFERED: [&str; 2] = [FILES, "progress"];

/// A tool component, ready to be instantiated per call.
pub(super) struct WasmTool {
    name: String,
    engine: GuestEngine,
    pre: ToolPre<ToolState>,
    limits: GuestLimits,
    places: Arc<Semaphore>,
}

impl WasmTool {
    /// Checks the component against the tool world and asks it what it is.
    pub(super) async fn open(
        engine: &GuestEngine,
        loaded: &Loaded,
        limits: &GuestLimits,
        places: &Arc<Semaphore>,
    ) -> Result<(ToolInfo, Self), String> {
        let pre = prepare(engine, loaded).map_err(|error| {
            LoadError::Mismatch {
                name: loaded.name.clone(),
                world: World::Tool.word(),
                reason: scrub(&format!("{error:#}"), 500),
            }
            .to_string()
        })?;
        let mut tool = Self {
            name: loaded.name.clone(),
            engine: engine.clone(),
            pre,
            limits: limits.clone(),
            places: Arc::clone(places),
        };
        let info = tool.describe(loaded).await?;
        tool.name.clone_from(&info.name);
        Ok((info, tool))
    }

    async fn describe(&self, loaded: &Loaded) -> Result<ToolInfo, String> {
        let policy = Arc::new(Policy::nothing(&self.limits));
        let time = Duration::from_millis(DESCRIBE_MS.min(self.limits.call_deadline_ms));
        let cx = ToolContext::new("describe", "", policy, time, None);
        let asked = tokio::time::timeout(time, async {
            let mut store = self.engine.store(ToolState::new(&self.name, &self.limits, cx));
            let guest = self.pre.instantiate_async(&mut store).await?;
            guest.call_describe(&mut store).await
        });
        let info = match asked.await {
            Ok(Ok(info)) => info,
            Ok(Err(error)) => {
                return Err(format!("describe: {}", failure::of_tool(&self.name, &error).message));
            }
            Err(_) => return Err(format!("describe: tool '{}' did not answer in time", self.name)),
        };
        check_info(&info, loaded)
    }

    async fn run_in_store(&self, input: &str, cx: ToolContext) -> wasmtime::Result<wit::Outcome> {
        let context = wit::CallContext {
            call_id: cx.call_id().to_owned(),
            session_id: cx.session_id().to_owned(),
            deadline_ms: u64::try_from(cx.remaining().as_millis()).unwrap_or(u64::MAX),
        };
        let mut store = self.engine.store(ToolState::new(&self.name, &self.limits, cx));
        let guest = self.pre.instantiate_async(&mut store).await?;
        guest.call_call(&mut store, input, &context).await
    }
}

fn prepare(engine: &GuestEngine, loaded: &Loaded) -> wasmtime::Result<ToolPre<ToolState>> {
    let mut linker = Linker::new(engine.inner());
    wit::Tool::add_to_linker::<_, HasSelf<ToolState>>(&mut linker, |state| state)?;
    ToolPre::new(linker.instantiate_pre(&loaded.component)?)
}

fn check_info(info: &wit::ToolInfo, loaded: &Loaded) -> Result<ToolInfo, String> {
    let component = &loaded.name;
    if !crate::ids::is_valid(&info.name) {
        let name = scrub(&info.name, 64);
        return Err(format!("component {component} names its tool {name:?}; use [A-Za-z0-9_.-], at most 64"));
    }
    let name = &info.name;
    let schema = |which: &str, text: &str| {
        if text.len() > SCHEMA_BYTES {
            return Err(format!("tool '{name}': its {which} schema has more than {SCHEMA_BYTES} bytes"));
        }
        schema::parse(text).map_err(|why| format!("tool '{name}': its {which} schema {why}"))
    };
    let input_schema = schema("input", &info.input_schema)?;
    if info.output_schema.len() > SCHEMA_BYTES {
        return Err(format!("tool '{name}': its output schema has more than {SCHEMA_BYTES} bytes"));
    }
    let output_schema: Value = serde_json::from_str(&info.output_schema)
        .map_err(|error| format!("tool '{name}': its output schema is no JSON document: {error}"))?;
    if let Some(want) = info.wants.iter().find(|want| !OFFERED.contains(&want.as_str())) {
        let want = scrub(want, 64);
        return Err(format!("tool '{name}' wants '{want}', which this host does not offer"));
    }
    if let Some(property) = &info.expected_seconds_of
        && input_schema["properties"].get(property).is_none()
    {
        let property = scrub(property, 64);
        return Err(format!(
            "tool '{name}' has its input's '{property}' say how long a call takes, and its input schema has no such property"
        ));
    }
    Ok(ToolInfo {
        name: name.clone(),
        description: scrub(&info.description, DESCRIPTION_BYTES),
        input_schema,
        output_schema,
        effect: effect(info.effect),
        wants: info.wants.clone(),
        digest: Some(loaded.digest.to_hex().to_string()),
        kind: GuestKind::Wasm,
        expected_ms: info.expected_ms,
        expected_seconds_of: info.expected_seconds_of.clone(),
        error: None,
    })
}

fn effect(class: wit::EffectClass) -> Effect {
    match class {
        wit::EffectClass::Pure => Effect::Pure,
        wit::EffectClass::Read => Effect::Read,
        wit::EffectClass::Idempotent => Effect::Idempotent,
        wit::EffectClass::Effect => Effect::Effect,
    }
}

#[async_trait::async_trait]
impl Callable for WasmTool {
    async fn run(&self, input: &str, cx: ToolContext) -> Result<ToolOutput, ToolFailure> {
        // The wait for a place is part of the call's wall time. A tool never waits for another guest while
        // it holds its place, so places come free.
        let Ok(_place) = self.places.acquire().await else {
            return Err(tool_failure("unavailable", "busy", "the host is shutting down"));
        };
        match self.run_in_store(input, cx).await {
            Ok(Ok(output)) => Ok(ToolOutput { json: output.json, text: output.text }),
            Ok(Err(error)) => Err(host_failure(error)),
            Err(error) => {
                let failure = failure::of_tool(&self.name, &error);
                tracing::warn!(tool = %self.name, code = %failure.code, "tool stopped");
                Err(failure)
            }
        }
    }
}
