//! Names to guests: finds components, asks each once what it is, and keeps the ones that failed with their
//! reason, so that one bad file never takes the others down.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Semaphore;

use super::agent_turn::WasmAgent;
use super::cache::CodeCache;
use super::component::{self, World};
use super::engine::GuestEngine;
use super::failure::tool_failure;
use super::limits::GuestLimits;
use super::policy::Policy;
use super::tool_call::WasmTool;
use super::tools::{
    self, AgentInfo, Callable, GuestKind, Native, NativeTool, ProgressSink, ToolContext, ToolInfo, ToolOutput,
};
use crate::error::{Error, ErrorKind};
use crate::session::spec::FileGrant;
use crate::session::tool::{Effect, ToolFailure};

/// Components of one directory that are looked at.
const DIRECTORY_FILES: usize = 256;
/// Tools and agents in all.
const GUESTS: usize = 1024;

/// What a call of a tool is for, besides its input.
#[derive(Clone, Default)]
pub struct ToolRequest {
    /// Stays the same when the call runs again after a crash.
    pub call_id: String,
    /// The session that calls.
    pub session_id: String,
    /// Whether an earlier run was interrupted.
    pub again: bool,
    /// The session's grants.
    pub grants: Vec<FileGrant>,
    /// Where progress goes.
    pub progress: Option<ProgressSink>,
}

struct Tool {
    info: ToolInfo,
    callable: Arc<dyn Callable>,
}

struct Agent {
    info: AgentInfo,
    agent: Arc<WasmAgent>,
}

/// A file that gave no guest.
struct Broken {
    name: String,
    /// The world it seemed to be for; unknown ones are listed among the tools.
    world: World,
    digest: Option<String>,
    error: String,
}

#[derive(Default)]
struct Entries {
    tools: BTreeMap<String, Arc<Tool>>,
    agents: BTreeMap<String, Agent>,
    broken: Vec<Broken>,
    seen: HashSet<PathBuf>,
}

/// All guests of a process.
pub(super) struct Registry {
    engine: GuestEngine,
    cache: Arc<CodeCache>,
    limits: GuestLimits,
    tool_places: Arc<Semaphore>,
    agent_places: Arc<Semaphore>,
    denials: Arc<AtomicU64>,
    entries: RwLock<Entries>,
}

impl Registry {
    pub(super) fn new(engine: GuestEngine, cache: CodeCache, limits: GuestLimits) -> Self {
        let places = limits.concurrency as usize;
        Self {
            engine,
            cache: Arc::new(cache),
            limits,
            tool_places: Arc::new(Semaphore::new(places)),
            agent_places: Arc::new(Semaphore::new(places)),
            denials: Arc::default(),
            entries: RwLock::default(),
        }
    }

    pub(super) fn denials(&self) -> &Arc<AtomicU64> {
        &self.denials
    }

    /// Loads every `*.wasm` of a directory, in name order. A directory that is not there is no error.
    pub(super) async fn load_directory(&self, directory: &Path) {
        let mut files = Vec::new();
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::info!(directory = %directory.display(), %error, "no guests here");
                return;
            }
        };
        for entry in entries.flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "wasm") {
                files.push(path);
            }
        }
        files.sort();
        if files.len() > DIRECTORY_FILES {
            let error = format!(
                "{} has {} components; the first {DIRECTORY_FILES} by name are used",
                directory.display(),
                files.len()
            );
            self.add_broken(component::name_of(directory), World::Tool, None, error);
            files.truncate(DIRECTORY_FILES);
        }
        for file in files {
            self.load_file(&file).await;
        }
    }

    /// Loads one component file; a failure is kept and listed.
    pub(super) async fn load_file(&self, path: &Path) {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if !self.write().seen.insert(real) {
            return;
        }
        let (engine, cache, file) = (self.engine.clone(), Arc::clone(&self.cache), path.to_owned());
        let most = self.limits.component_bytes;
        let loaded = tokio::task::spawn_blocking(move || component::load(&engine, &cache, &file, most)).await;
        let loaded = match loaded {
            Ok(Ok(loaded)) => loaded,
            Ok(Err(error)) => {
                return self.add_broken(component::name_of(path), World::Tool, None, error.to_string());
            }
            Err(error) => {
                return self.add_broken(component::name_of(path), World::Tool, None, error.to_string());
            }
        };
        let result = match loaded.world {
            World::Tool => WasmTool::open(&self.engine, &loaded, &self.limits, &self.tool_places)
                .await
                .and_then(|(info, tool)| self.add_tool(info, Arc::new(tool))),
            World::Agent => WasmAgent::open(&self.engine, &loaded, &self.limits, &self.agent_places)
                .await
                .and_then(|(info, agent)| self.add_agent(info, agent)),
        };
        match result {
            Ok(()) => tracing::debug!(path = %loaded.path.display(), "guest loaded"),
            Err(error) => {
                let digest = Some(loaded.digest.to_hex().to_string());
                self.add_broken(loaded.name, loaded.world, digest, error);
            }
        }
    }

    pub(super) fn register_native(&self, tool: Arc<dyn NativeTool>) -> Result<(), Error> {
        let mut info = tool.info();
        info.kind = GuestKind::Native;
        info.error = None;
        if !crate::ids::is_valid(&info.name) {
            let message = format!("tool name {:?} must be 1 to 64 characters of [A-Za-z0-9_.-]", info.name);
            return Err(Error::invalid("tool_name_invalid", message));
        }
        self.add_tool(info, Arc::new(Native(tool)))
            .map_err(|message| Error::new(ErrorKind::Conflict, "tool_exists", message))
    }

    fn add_tool(&self, info: ToolInfo, callable: Arc<dyn Callable>) -> Result<(), String> {
        let mut entries = self.write();
        if entries.tools.contains_key(&info.name) {
            return Err(format!("there is already a tool '{}'", info.name));
        }
        if entries.tools.len() >= GUESTS {
            return Err(format!("there are already {GUESTS} tools"));
        }
        entries.tools.insert(info.name.clone(), Arc::new(Tool { info, callable }));
        Ok(())
    }

    fn add_agent(&self, info: AgentInfo, agent: WasmAgent) -> Result<(), String> {
        let mut entries = self.write();
        if entries.agents.contains_key(&info.name) {
            return Err(format!("there is already an agent '{}'", info.name));
        }
        if entries.agents.len() >= GUESTS {
            return Err(format!("there are already {GUESTS} agents"));
        }
        entries.agents.insert(info.name.clone(), Agent { info, agent: Arc::new(agent) });
        Ok(())
    }

    fn add_broken(&self, name: String, world: World, digest: Option<String>, error: String) {
        tracing::warn!(guest = %name, %error, "guest not usable");
        let mut entries = self.write();
        if entries.broken.len() < GUESTS {
            entries.broken.push(Broken { name, world, digest, error });
        }
    }

    /// Tools by name, the broken ones last.
    pub(super) fn tools(&self) -> Vec<ToolInfo> {
        let entries = self.read();
        let mut infos: Vec<ToolInfo> = entries.tools.values().map(|tool| tool.info.clone()).collect();
        infos.extend(entries.broken.iter().filter(|broken| broken.world == World::Tool).map(|broken| {
            ToolInfo {
                name: broken.name.clone(),
                description: String::new(),
                input_schema: Value::Bool(false),
                output_schema: Value::Bool(false),
                effect: Effect::Effect,
                wants: Vec::new(),
                digest: broken.digest.clone(),
                kind: GuestKind::Wasm,
                expected_ms: None,
                expected_seconds_of: None,
                error: Some(broken.error.clone()),
            }
        }));
        infos
    }

    /// Agents by name, the broken ones last.
    pub(super) fn agents(&self) -> Vec<AgentInfo> {
        let entries = self.read();
        let mut infos: Vec<AgentInfo> = entries.agents.values().map(|agent| agent.info.clone()).collect();
        infos.extend(entries.broken.iter().filter(|broken| broken.world == World::Agent).map(|broken| {
            AgentInfo {
                name: broken.name.clone(),
                description: String::new(),
                params_schema: Value::Bool(false),
                digest: broken.digest.clone(),
                kind: GuestKind::Wasm,
                error: Some(broken.error.clone()),
            }
        }));
        infos
    }

    /// What is known of a usable tool.
    pub(super) fn tool(&self, name: &str) -> Option<ToolInfo> {
        self.read().tools.get(name).map(|tool| tool.info.clone())
    }

    /// Why there is no such tool, naming the ones there are.
    pub(super) fn no_tool(&self, name: &str) -> Error {
        let entries = self.read();
        let names: Vec<&str> = entries.tools.keys().map(String::as_str).collect();
        missing("tool", name, &names, &entries.broken)
    }

    pub(super) fn agent(&self, name: &str) -> Result<(AgentInfo, Arc<WasmAgent>), Error> {
        let entries = self.read();
        match entries.agents.get(name) {
            Some(agent) => Ok((agent.info.clone(), Arc::clone(&agent.agent))),
            None => {
                let names: Vec<&str> = entries.agents.keys().map(String::as_str).collect();
                Err(missing("agent", name, &names, &entries.broken))
            }
        }
    }

    /// Runs a tool to its end, whoever asks.
    pub(super) async fn call_tool(
        &self,
        name: &str,
        input: &str,
        request: ToolRequest,
    ) -> Result<ToolOutput, ToolFailure> {
        let Some(tool) = self.read().tools.get(name).map(Arc::clone) else {
            return Err(tool_failure("not_found", "tool_not_found", self.no_tool(name).message));
        };
        let policy = Policy::new(&request.grants, &tool.info.wants, &self.limits, Arc::clone(&self.denials));
        let time = Duration::from_millis(self.limits.call_deadline_ms);
        let cx =
            ToolContext::new(&request.call_id, &request.session_id, Arc::new(policy), time, request.progress)
                .again(request.again);
        tools::call(&tool.info, tool.callable.as_ref(), input, cx, &self.limits).await
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Entries> {
        // Every change is one insertion, so what a panicking writer leaves behind is whole.
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Entries> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn missing(what: &str, name: &str, known: &[&str], broken: &[Broken]) -> Error {
    let code = if what == "tool" { "tool_not_found" } else { "agent_not_found" };
    if let Some(broken) = broken.iter().find(|broken| broken.name == name) {
        return Error::not_found(code, format!("{what} '{name}' cannot be used: {}", broken.error));
    }
    let known = if known.is_empty() {
        "there are none; build the guests with `cargo xtask guests`".to_owned()
    } else {
        format!("there are {}", known.join(", "))
    };
    Error::not_found(code, format!("there is no {what} '{name}'; {known}"))
}
