//! Runs one turn of an agent component in a fresh store that owns the turn's scope and gives it back.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use wasmtime::Store;
use wasmtime::component::{HasSelf, Linker};

use super::agent_host::AgentState;
use super::bindings::agent::{self as wit, AgentPre};
use super::component::{LoadError, Loaded, World};
use super::engine::{Bare, GuestEngine, Metered};
use super::failure::{self, MESSAGE_BYTES, guest_code, scrub};
use super::limits::GuestLimits;
use super::registry::Registry;
use super::schema;
use super::tools::{AgentInfo, GuestKind};
use crate::error::{Error, ErrorKind};
use crate::session::driver::TurnDriver;
use crate::session::scope::TurnScope;

const DESCRIPTION_BYTES: usize = 8 << 10;
const SCHEMA_BYTES: usize = 64 << 10;
/// Wall time of `describe`.
const DESCRIBE: Duration = Duration::from_secs(5);

/// An agent component, ready to be instantiated per turn.
pub(super) struct WasmAgent {
    name: String,
    engine: GuestEngine,
    pre: AgentPre<AgentState>,
    limits: GuestLimits,
    places: Arc<Semaphore>,
}

impl WasmAgent {
    /// Checks the component against the agent world and asks it what it is.
    pub(super) async fn open(
        engine: &GuestEngine,
        loaded: &Loaded,
        limits: &GuestLimits,
        places: &Arc<Semaphore>,
    ) -> Result<(AgentInfo, Self), String> {
        let pre = prepare(engine, loaded).map_err(|error| {
            LoadError::Mismatch {
                name: loaded.name.clone(),
                world: World::Agent.word(),
                reason: scrub(&format!("{error:#}"), 500),
            }
            .to_string()
        })?;
        let mut agent = Self {
            name: loaded.name.clone(),
            engine: engine.clone(),
            pre,
            limits: limits.clone(),
            places: Arc::clone(places),
        };
        let info = agent.describe(loaded).await?;
        agent.name.clone_from(&info.name);
        Ok((info, agent))
    }

    async fn describe(&self, loaded: &Loaded) -> Result<AgentInfo, String> {
        let asked = tokio::time::timeout(DESCRIBE, async {
            // Without a session there is nothing to ask: every import traps.
            let mut linker = Linker::new(self.engine.inner());
            linker.define_unknown_imports_as_traps(&loaded.component)?;
            let pre = AgentPre::new(linker.instantiate_pre(&loaded.component)?)?;
            let mut store = self.engine.store(Bare::new(&self.limits));
            let guest = pre.instantiate_async(&mut store).await?;
            guest.call_describe(&mut store).await
        });
        let info = match asked.await {
            Ok(Ok(info)) => info,
            Ok(Err(error)) => {
                return Err(format!("describe: {}", failure::of_agent(&self.name, &error).message));
            }
            Err(_) => return Err(format!("describe: agent '{}' did not answer in time", self.name)),
        };
        if !crate::ids::is_valid(&info.name) {
            let (component, name) = (&loaded.name, scrub(&info.name, 64));
            return Err(format!(
                "component {component} names its agent {name:?}; use [A-Za-z0-9_.-], at most 64"
            ));
        }
        if info.params_schema.len() > SCHEMA_BYTES {
            return Err(format!(
                "agent '{}': its schema of parameters has more than {SCHEMA_BYTES} bytes",
                info.name
            ));
        }
        let params_schema = schema::parse(&info.params_schema)
            .map_err(|why| format!("agent '{}': its schema of parameters {why}", info.name))?;
        Ok(AgentInfo {
            name: info.name,
            description: scrub(&info.description, DESCRIPTION_BYTES),
            params_schema,
            digest: Some(loaded.digest.to_hex().to_string()),
            kind: GuestKind::Wasm,
            error: None,
        })
    }

    async fn drive(&self, store: &mut Store<AgentState>) -> Result<(), Error> {
        let stopped = |error: wasmtime::Error| failure::of_agent(&self.name, &error);
        let guest = self.pre.instantiate_async(&mut *store).await.map_err(stopped)?;
        if !store.data().scope.agent_started() {
            let started = guest.call_start(&mut *store).await.map_err(stopped)?;
            started.map_err(|error| self.failed("start", &error))?;
            store.data_mut().scope.mark_agent_started().await?;
        }
        let event = wit::Event::UserMessage(store.data().scope.request().input.clone());
        store.data_mut().meter().rest();
        let ended = guest.call_on_event(&mut *store, &event).await.map_err(stopped)?;
        ended.map_err(|error| self.failed("on-event", &error))
    }

    fn failed(&self, export: &str, error: &wit::Error) -> Error {
        use super::bindings::agent::session_runtime::agent::types::ErrorKind as K;
        let kind = match error.kind {
            K::InvalidInput => ErrorKind::InvalidInput,
            K::NotFound => ErrorKind::NotFound,
            K::Denied => ErrorKind::Denied,
            K::Limit => ErrorKind::Limit,
            K::Cancelled => ErrorKind::Conflict,
            K::Unavailable => ErrorKind::Unavailable,
            K::Failed => ErrorKind::Internal,
        };
        let message = format!(
            "agent '{}' gave up in `{export}` ({}): {}",
            self.name,
            guest_code(&error.code),
            scrub(&error.message, MESSAGE_BYTES)
        );
        Error::new(kind, if kind == ErrorKind::Conflict { "cancelled" } else { "agent_failed" }, message)
    }
}

fn prepare(engine: &GuestEngine, loaded: &Loaded) -> wasmtime::Result<AgentPre<AgentState>> {
    let mut linker = Linker::new(engine.inner());
    wit::Agent::add_to_linker::<_, HasSelf<AgentState>>(&mut linker, |state| state)?;
    AgentPre::new(linker.instantiate_pre(&loaded.component)?)
}

/// Drives the turns of sessions whose agent is a component.
pub(super) struct WasmDriver {
    pub(super) agent: Arc<WasmAgent>,
    pub(super) registry: Arc<Registry>,
}

impl WasmDriver {
    async fn place(&self, scope: &TurnScope) -> Result<tokio::sync::OwnedSemaphorePermit, Error> {
        tokio::select! {
            place = Arc::clone(&self.agent.places).acquire_owned() => place.map_err(Error::internal),
            () = scope.cancelled() => Err(cancelled()),
        }
    }
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Conflict, "cancelled", "the turn was cancelled")
}

#[async_trait::async_trait]
impl TurnDriver for WasmDriver {
    async fn run(&self, scope: TurnScope) -> (TurnScope, Result<(), Error>) {
        let _place = match self.place(&scope).await {
            Ok(place) => place,
            Err(error) => return (scope, Err(error)),
        };
        let agent = &self.agent;
        let state = AgentState::new(&agent.limits, scope, Arc::clone(&self.registry));
        let mut store = agent.engine.store(state);
        let mut result =
            if store.data().scope.is_cancelled() { Err(cancelled()) } else { agent.drive(&mut store).await };
        if store.data().scope.is_cancelled() && result.as_ref().is_err_and(|error| !ends_session_work(error))
        {
            result = Err(cancelled());
        }
        (store.into_data().scope, result)
    }
}

// What a cancellation must not hide.
fn ends_session_work(error: &Error) -> bool {
    error.kind == ErrorKind::Internal && !error.code.starts_with("agent_")
        || matches!(&*error.code, "outcome_unknown" | "replay_divergence")
}
