//! Guests: agents and tools as WebAssembly components, and tools of the embedding application.
//!
//! Owns the WebAssembly engine, the limits of every guest, the policy gate and the registry of names. It is
//! the only module that knows wasmtime. It must not know how a session keeps its history, its KV or its
//! journal: a turn is a [`TurnScope`](crate::session::scope::TurnScope) that it drives and gives back.

mod agent_convert;
mod agent_host;
mod agent_turn;
mod bindings;
mod cache;
mod component;
mod engine;
mod failure;
mod limits;
mod policy;
mod registry;
mod schema;
mod tool_call;
mod tool_host;
mod tools;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use limits::GuestLimits;
pub use policy::{DirectoryEntry, Policy, check_grants};
pub use registry::ToolRequest;
pub use tools::{
    AgentInfo, GuestKind, NativeTool, Progress, ProgressSink, ToolContext, ToolInfo, ToolOutput,
};

use self::agent_turn::WasmDriver;
use self::cache::CodeCache;
use self::engine::GuestEngine;
use self::registry::Registry;
use crate::error::Error;
use crate::session::driver::TurnDriver;
use crate::session::spec::SessionSpec;
use crate::session::tool::ToolFailure;

/// Where guests are and what they may use.
#[derive(Clone, Debug, Default)]
pub struct GuestsConfig {
    /// Directory of compiled components; created when needed, this user's alone.
    pub cache: PathBuf,
    /// Directories searched for `NAME.wasm`. One that is not there is passed over.
    pub directories: Vec<PathBuf>,
    /// Component files.
    pub components: Vec<PathBuf>,
    /// Limits of every guest.
    pub limits: GuestLimits,
    /// Directories that a session's grants must lie in; without one nothing can be granted.
    pub grant_roots: Vec<PathBuf>,
}

/// All guests of a process; cheap to clone.
#[derive(Clone)]
pub struct Guests {
    registry: Arc<Registry>,
    grant_roots: Arc<[PathBuf]>,
    warning: Option<Arc<str>>,
}

impl Guests {
    /// Starts the engine and loads the components. A component that cannot be used is listed with its
    /// error and stops nothing else. Must run inside a tokio runtime.
    ///
    /// # Errors
    /// `guest_limit_invalid`, or `guest_engine` when WebAssembly cannot run here at all.
    pub async fn open(config: GuestsConfig) -> Result<Self, Error> {
        config.limits.validate()?;
        let (engine, warning) = GuestEngine::start(&config.limits)?;
        let cache = CodeCache::new(config.cache, config.limits.cache_bytes);
        let registry = Registry::new(engine, cache, config.limits);
        for file in &config.components {
            registry.load_file(file).await;
        }
        for directory in &config.directories {
            registry.load_directory(directory).await;
        }
        Ok(Self {
            registry: Arc::new(registry),
            grant_roots: config.grant_roots.into(),
            warning: warning.map(Into::into),
        })
    }

    /// What drives the turns of sessions with this agent.
    ///
    /// # Errors
    /// `agent_not_found`, naming the agents there are, or the reason why this one cannot be used.
    pub fn driver(&self, agent: &str) -> Result<Arc<dyn TurnDriver>, Error> {
        let (_, agent) = self.registry.agent(agent)?;
        Ok(Arc::new(WasmDriver { agent, registry: Arc::clone(&self.registry) }))
    }

    /// Tools by name; those that cannot be used come last, with their error.
    pub fn tools(&self) -> Vec<ToolInfo> {
        self.registry.tools()
    }

    /// Agents by name; those that cannot be used come last, with their error.
    pub fn agents(&self) -> Vec<AgentInfo> {
        self.registry.agents()
    }

    /// Adds a tool of the embedding application.
    ///
    /// # Errors
    /// `tool_exists`, `tool_name_invalid`.
    pub fn register_native(&self, tool: Arc<dyn NativeTool>) -> Result<(), Error> {
        self.registry.register_native(tool)
    }

    /// Checks what a new session asks of guests: its agent, its parameters, its tools, its grants.
    ///
    /// # Errors
    /// `agent_not_found`, `params_invalid`, `tool_not_found`, or one of [`check_grants`].
    pub fn check(&self, spec: &SessionSpec) -> Result<(), Error> {
        if let Some(name) = &spec.agent {
            let (info, _) = self.registry.agent(name)?;
            schema::check(&info.params_schema, &spec.params.clone().into()).map_err(|why| {
                Error::invalid("params_invalid", format!("parameters of agent '{name}': {why}"))
            })?;
        }
        for tool in &spec.tools {
            if self.registry.tool(tool).is_none() {
                return Err(self.registry.no_tool(tool));
            }
        }
        check_grants(&spec.grants, &self.grant_roots)
    }

    /// Runs a tool outside of any turn, behind the same checks and limits.
    ///
    /// # Errors
    /// The tool's own failure, or `invalid_input`, `tool_not_found`, `memory_limit`, `table_limit`,
    /// `cpu_limit`, `deadline`, `host_call_limit`, `stack_overflow`, `output_too_large`,
    /// `output_invalid`, `trap`, `panic`, `busy`.
    pub async fn call_tool(
        &self,
        name: &str,
        input: &str,
        request: ToolRequest,
    ) -> Result<ToolOutput, ToolFailure> {
        self.registry.call_tool(name, input, request).await
    }

    /// How often a guest was denied something since the start.
    pub fn denials(&self) -> u64 {
        self.registry.denials().load(Ordering::Relaxed)
    }

    /// What an operator should know: broken components, a missing pool.
    pub fn warnings(&self) -> Vec<String> {
        let broken_tools = self.tools().into_iter().filter_map(|tool| tool.error);
        let broken_agents = self.agents().into_iter().filter_map(|agent| agent.error);
        let pool = self.warning.iter().map(|warning| warning.to_string());
        pool.chain(broken_agents).chain(broken_tools).collect()
    }
}
