//! The library's face: a runtime that an application opens, and everything it can ask of it.

pub mod device;
mod opening;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::backend::{Backend, KvType};
use serde::Serialize;
use store::{Clock, Store};

use crate::agent::{AgentInfo, Guests, GuestsConfig, NativeTool, ToolInfo};
use crate::config::{CONTEXT_LENGTH_DEFAULT, Config};
use crate::engine::{self, EngineOptions};
use crate::error::Error;
use crate::kv::contract::{Contract, cell_layout, hex};
use crate::models::constraint::ConstraintFactory;
use crate::models::progress::{Listener, Silent};
use crate::models::{LoadedModel, ModelConfig};
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use crate::scheduler::tenants::TenantView;
use crate::scheduler::trace::TraceOptions;
use crate::scheduler::{DeviceView, HostControl, HostView, Scheduler, SchedulerOptions};
use crate::seams::Seams;
use crate::session::driver::{Drivers, PlainChat, TurnDriver};
use crate::session::host::SessionHost;
use crate::session::live::{JournalObserver, SessionMap};
use crate::session::manager::SessionManager;
use crate::session::spec::{Role, SessionSpec, TurnRequest};
use crate::session::view::{Event, KvTransition, KvView, SegmentView, SessionView, TurnView};

use device::ChosenDevice;
pub(crate) use opening::recovery_lines;
use opening::{check_memory, open_store, throttle};

/// Rows of a step: the largest piece of a prompt computed at once.
pub const STEP_ROWS: usize = 256;

/// The loaded model, for people and programs.
#[derive(Clone, Debug, Serialize)]
pub struct ModelInfo {
    /// Alias or path.
    pub alias: String,
    /// Architecture.
    pub architecture: String,
    /// Weights, counted.
    pub parameters: Option<u64>,
    /// Most tokens of a session.
    pub context_length: u64,
    /// Size of the vocabulary.
    pub vocab: u64,
    /// Bytes of KV for each token.
    pub kv_bytes_per_token: u64,
    /// Digest of the weights: SHA-256 of a GGUF file; of a checkpoint, over its files, configuration and precision.
    pub weights_digest: String,
}

/// What the disk tier holds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct DiskView {
    /// Bytes of packs.
    pub bytes: u64,
    /// Most bytes they may have.
    pub quota: u64,
    /// Cells.
    pub cells: u64,
}

/// A runtime, for people and programs.
#[derive(Clone, Debug, Serialize)]
pub struct RuntimeInfo {
    /// Version of this software.
    pub version: String,
    /// The model.
    pub model: ModelInfo,
    /// The device, in words.
    pub backend: String,
    /// Which backends give the same bits.
    pub numerics_class: String,
    /// Digest of the contract.
    pub contract: String,
    /// Pages.
    pub device: DeviceView,
    /// Cells in host memory.
    pub host: HostView,
    /// Cells on disk.
    pub disk: DiskView,
    /// What each tenant that has sessions holds.
    pub tenants: Vec<TenantView>,
    /// What was found and mended when the data directory was opened.
    pub recovery: Vec<String>,
    /// Sessions.
    pub sessions: u64,
    /// What an operator should know.
    pub warnings: Vec<String>,
}

struct Inner {
    config: Config,
    store: Store,
    guests: Guests,
    manager: Arc<SessionManager>,
    sessions: Arc<SessionMap>,
    host_control: HostControl,
    model: ModelInfo,
    backend: String,
    numerics_class: String,
    warnings: Vec<String>,
}

/// How long a shutdown waits for those who still hold the store.
const RELEASE: Duration = Duration::from_secs(5);

/// A runtime: one model on one device, with its sessions. Cheap to clone.
#[derive(Clone)]
pub struct Runtime(Arc<Inner>);

/// What a runtime is made of besides its device.
struct Parts {
    config: Config,
    store: Store,
    model: LoadedModel,
    guests: Guests,
    clock: Arc<dyn Clock>,
    progress: Listener,
}

/// Finds agents among the guests; a session without one is a plain chat.
struct GuestDrivers(Guests);

impl Drivers for GuestDrivers {
    fn driver(&self, spec: &SessionSpec) -> Result<Arc<dyn TurnDriver>, Error> {
        match &spec.agent {
            Some(agent) => self.0.driver(agent),
            None => Ok(Arc::new(PlainChat)),
        }
    }
}

impl Runtime {
    /// Opens the data directory, loads the model and the guests, brings the sessions back.
    ///
    /// # Errors
    /// `config_invalid`, `data_dir_in_use`, `data_dir_newer`, `model_not_found`, `model_unsupported`,
    /// `out_of_memory`, `device_unavailable`, `device_budget_too_small`, `host_budget_too_small`, `trace_exists`,
    /// `trace_unwritable` and others, each with its fix.
    pub async fn open(config: Config) -> Result<Self, Error> {
        Self::open_telling(config, Arc::new(Silent)).await
    }

    /// [`Runtime::open`] that tells how far it is: reading a model file for the first time takes a while, and so does
    /// repacking a large one.
    ///
    /// # Errors
    /// Those of [`Runtime::open`].
    pub async fn open_telling(config: Config, progress: Listener) -> Result<Self, Error> {
        Self::open_on(config, Seams::default(), progress).await
    }

    /// [`Runtime::open_telling`] on another disk or clock than the machine's own.
    ///
    /// # Errors
    /// Those of [`Runtime::open`].
    pub async fn open_on(config: Config, seams: Seams, progress: Listener) -> Result<Self, Error> {
        config.validate()?;
        let (opening, told, under) = (config.clone(), Arc::clone(&progress), seams.clone());
        let (store, model, device) = tokio::task::spawn_blocking(move || {
            let store = open_store(&opening, under)?;
            let model = crate::models::open_as(&opening.model, opening.weights, told.as_ref())?;
            let device = device::choose(&opening, &model.config)?;
            Ok::<_, Error>((store, model, device))
        })
        .await
        .map_err(Error::internal)??;
        let guests = Guests::open(GuestsConfig {
            cache: config.data_dir.join("compiled"),
            directories: config.guests.clone(),
            components: config.components.clone(),
            limits: config.limits.clone(),
            grant_roots: config.grant_roots.clone(),
        })
        .await?;
        let parts = Parts { config, store, model, guests, clock: seams.clock, progress };
        match device {
            ChosenDevice::Cpu(backend, note) => Self::assemble(backend, note, parts).await,
            ChosenDevice::Cuda(backend) => Self::assemble(backend, None, parts).await,
        }
    }

    /// Puts the parts together on a device; `note` is what an operator should know of its choice.
    async fn assemble<B: Backend>(
        backend: Arc<B>,
        note: Option<String>,
        parts: Parts,
    ) -> Result<Self, Error> {
        let Parts { config, store, model, guests, clock, progress } = parts;
        let context_length = match config.context_length {
            0 => model.config.context_length.min(CONTEXT_LENGTH_DEFAULT),
            asked => asked.min(model.config.context_length),
        };
        let contract = contract(&model, backend.as_ref(), config.kv_type, &config.tenant_salt);
        let (description, numerics_class) = (backend.describe(), backend.numerics_class().to_owned());
        let info = model_info(&config, &model, context_length);
        let mut warnings = guests.warnings();
        warnings.extend(model.warnings.iter().cloned());
        warnings.extend(note);

        let sessions = Arc::new(SessionMap::default());
        let options = EngineOptions {
            budget_bytes: config.device_budget_bytes,
            context_length,
            step_rows: STEP_ROWS,
            kv_type: config.kv_type,
        };
        let (engine, model) = tokio::task::spawn_blocking(move || {
            engine::open(backend, &model, options, progress.as_ref()).map(|engine| (engine, model))
        })
        .await
        .map_err(Error::internal)??;
        check_memory(config.host_budget_bytes)?;
        let host_control = HostControl::default();
        host_control.set_throttle(throttle(config.host_throttle));
        let scheduler = Scheduler::start(
            engine,
            store.clone(),
            contract.clone(),
            SchedulerOptions {
                restore_mode: config.restore_mode,
                idle_policy: config.idle_policy,
                idle_ttl_ms: u64::try_from(config.idle_ttl.as_millis()).unwrap_or(u64::MAX),
                context_length,
                save_when_idle: config.save_when_idle,
                speculation: config.speculation,
                share_prefixes: config.share_prefixes,
                host_budget_bytes: config.host_budget_bytes,
                host_control: host_control.clone(),
                tenants: config.tenants.clone(),
                step_seconds: config.step_time.as_secs_f64(),
                trace: config.trace.clone().map(|file| TraceOptions { file, model: config.model.clone() }),
            },
            Arc::clone(&clock),
            Box::new(JournalObserver { sessions: Arc::clone(&sessions) }),
        )?;
        let constraints = ConstraintFactory::new(&model.tokenizer)
            .map_err(|error| Error::invalid("model_unsupported", error.to_string()))?;
        let host = Arc::new(SessionHost {
            store: store.clone(),
            scheduler,
            tokenizer: Arc::new(model.tokenizer),
            template: model.template,
            frames: model.frames,
            constraints,
            contract,
            model: config.model.clone(),
            context_length,
            limits: config.sessions.clone(),
            clock,
        });
        let drivers = Arc::new(GuestDrivers(guests.clone()));
        let (map, resume) = (Arc::clone(&sessions), config.resume_turns);
        let manager = SessionManager::open(host, map, drivers, resume)?;
        Ok(Self(Arc::new(Inner {
            config,
            store,
            guests,
            manager,
            sessions,
            host_control,
            model: info,
            backend: description,
            numerics_class,
            warnings,
        })))
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// Model, device, tiers, warnings.
    ///
    /// # Errors
    /// The scheduler has stopped.
    pub async fn info(&self) -> Result<RuntimeInfo, Error> {
        let inner = &self.0;
        let host = inner.manager.host();
        let usage = inner.store.cells().usage();
        Ok(RuntimeInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: inner.model.clone(),
            backend: inner.backend.clone(),
            numerics_class: inner.numerics_class.clone(),
            contract: hex(&host.contract.digest()),
            device: host.scheduler.device().await?,
            host: host.scheduler.host().await?,
            disk: DiskView { bytes: usage.disk_bytes, quota: usage.quota_bytes, cells: usage.cells },
            tenants: host.scheduler.tenants().await?,
            recovery: recovery_lines(inner.store.recovery()),
            sessions: inner.manager.count() as u64,
            warnings: inner.warnings.clone(),
        })
    }

    /// The contract of cells as they are on the device, of sessions that name no tenant.
    pub fn contract(&self) -> &Contract {
        &self.0.manager.host().contract
    }

    /// Why the store stopped acknowledging, if it did.
    pub fn poisoned(&self) -> Option<String> {
        self.0.store.poisoned()
    }

    /// Why nothing runs on the device any more, if it is lost: the runtime has to be opened again.
    pub fn device_lost(&self) -> Option<Error> {
        self.0.manager.host().scheduler.device_lost()
    }

    /// The store, for its throttle, its faults and its usage.
    pub fn store(&self) -> &Store {
        &self.0.store
    }

    /// The host tier's throttle and faults.
    pub fn host_control(&self) -> &HostControl {
        &self.0.host_control
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &crate::models::Tokenizer {
        &self.0.manager.host().tokenizer
    }

    /// Writes the server's address into the data directory's lock, where other commands find it.
    ///
    /// # Errors
    /// The lock file cannot be written.
    pub fn set_address(&self, url: &str) -> Result<(), Error> {
        self.0.store.set_address(url).map_err(Error::internal)
    }

    /// Adds a tool of the application.
    ///
    /// # Errors
    /// `tool_exists`, `tool_name_invalid`.
    pub fn register_tool(&self, tool: Arc<dyn NativeTool>) -> Result<(), Error> {
        self.0.guests.register_native(tool)
    }

    /// Tools by name.
    pub fn tools(&self) -> Vec<ToolInfo> {
        self.0.guests.tools()
    }

    /// Agents by name.
    pub fn agents(&self) -> Vec<AgentInfo> {
        self.0.guests.agents()
    }

    /// Creates a session.
    ///
    /// # Errors
    /// `session_exists`, `agent_not_found`, `tool_not_found`, `params_invalid`, `too_many_sessions`.
    pub async fn create_session(&self, spec: SessionSpec) -> Result<SessionView, Error> {
        self.0.guests.check(&spec)?;
        let session = self.0.manager.create(spec).await?;
        self.0.manager.view(&session).await
    }

    /// Every session, by creation.
    pub async fn sessions(&self) -> Vec<SessionView> {
        self.0.manager.views().await
    }

    /// A session.
    ///
    /// # Errors
    /// `session_not_found` (as for every method that takes an id).
    pub async fn session(&self, id: &str) -> Result<SessionView, Error> {
        self.0.manager.view(self.0.manager.get(id)?.as_ref()).await
    }

    /// Deletes a session and its events; a running turn is cancelled first.
    ///
    /// # Errors
    /// The store.
    pub async fn delete_session(&self, id: &str) -> Result<(), Error> {
        self.0.manager.delete(&self.0.manager.get(id)?).await
    }

    /// Makes a session with the history of another one, sharing its pages.
    ///
    /// # Errors
    /// `session_busy`, `session_exists`.
    pub async fn fork_session(
        &self,
        id: &str,
        new_id: Option<String>,
        title: Option<String>,
    ) -> Result<SessionView, Error> {
        let source = self.0.manager.get(id)?;
        let fork = self.0.manager.fork(&source, new_id, title).await?;
        self.0.manager.view(&fork).await
    }

    /// Appends a message between turns.
    ///
    /// # Errors
    /// `session_busy`, `context_length_exceeded`.
    pub async fn append_message(&self, id: &str, role: Role, text: &str) -> Result<(), Error> {
        self.0.manager.append_message(&self.0.manager.get(id)?, role, text).await
    }

    /// Begins a turn; it runs on whoever waits.
    ///
    /// # Errors
    /// `session_busy`, `queue_full`, `context_length_exceeded`, `contract_mismatch`, `store_unavailable`.
    pub async fn start_turn(&self, id: &str, request: TurnRequest) -> Result<TurnView, Error> {
        self.0.manager.get(id)?.start_turn(request, self.0.manager.drivers()).await
    }

    /// A turn.
    ///
    /// # Errors
    /// `turn_not_found`.
    pub async fn turn(&self, id: &str, turn: &str) -> Result<TurnView, Error> {
        self.0.manager.get(id)?.turn(turn)
    }

    /// Every turn of a session.
    ///
    /// # Errors
    /// `session_not_found`.
    pub async fn turns(&self, id: &str) -> Result<Vec<TurnView>, Error> {
        Ok(self.0.manager.get(id)?.turns())
    }

    /// Waits until a turn is neither queued nor running.
    ///
    /// # Errors
    /// `turn_not_found`.
    pub async fn wait_turn(&self, id: &str, turn: &str) -> Result<TurnView, Error> {
        self.0.manager.get(id)?.wait_turn(turn).await
    }

    /// Asks a turn to stop.
    ///
    /// # Errors
    /// `turn_not_found`.
    pub async fn cancel_turn(&self, id: &str, turn: &str) -> Result<TurnView, Error> {
        self.0.manager.get(id)?.cancel_turn(turn).await
    }

    /// Durable events after `after`, at most `limit`. Every one of them has taken effect: who has read that a turn ended
    /// finds it ended.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn events(&self, id: &str, after: u64, limit: usize) -> Result<Vec<Event>, Error> {
        let session = self.0.manager.get(id)?;
        self.0.manager.events(&session, after, limit).await
    }

    /// Resolves when an event after `after` is durable.
    ///
    /// # Errors
    /// `session_not_found` once the session is deleted.
    pub async fn wait_events(&self, id: &str, after: u64) -> Result<(), Error> {
        self.0.manager.get(id)?.wait_events(after).await
    }

    /// The session's segments.
    ///
    /// # Errors
    /// `session_not_found`.
    pub async fn segments(&self, id: &str) -> Result<Vec<SegmentView>, Error> {
        let session = self.0.manager.get(id)?;
        Ok(self.0.manager.segments(&session))
    }

    /// The session's tokens.
    ///
    /// # Errors
    /// `session_not_found`.
    pub async fn tokens(&self, id: &str) -> Result<Vec<u32>, Error> {
        Ok(self.0.manager.get(id)?.record().tokens.clone())
    }

    /// The text of the session's tokens, control tokens included.
    ///
    /// # Errors
    /// `session_not_found`.
    pub async fn transcript(&self, id: &str) -> Result<String, Error> {
        let tokens = self.tokens(id).await?;
        Ok(self.tokenizer().decode(&tokens))
    }

    /// Where the session's KV is.
    ///
    /// # Errors
    /// `session_not_found`.
    pub async fn kv(&self, id: &str) -> Result<KvView, Error> {
        Ok(self.session(id).await?.kv)
    }

    /// Recent KV transitions: sequence number of the event, time, transition.
    ///
    /// # Errors
    /// `session_not_found`.
    pub async fn transitions(&self, id: &str) -> Result<Vec<(u64, u64, KvTransition)>, Error> {
        Ok(self.0.manager.get(id)?.record().transitions.clone())
    }

    /// Saves the session's KV to host memory and disk and frees its pages; of a session that is evicted nothing is left
    /// to do, and the transition moves no bytes.
    ///
    /// # Errors
    /// `session_busy`; `not_resident` where there is no KV at all.
    pub async fn evict(&self, id: &str) -> Result<KvTransition, Error> {
        self.0.manager.evict(self.0.manager.get(id)?.as_ref()).await
    }

    /// Brings the session's KV back to the device. A caller that stops waiting gives the restore up.
    ///
    /// # Errors
    /// `session_busy`, `kv_capacity`, `nothing_to_restore`.
    pub async fn restore(&self, id: &str, mode: RestoreMode) -> Result<RestoreReport, Error> {
        self.0.manager.restore(self.0.manager.get(id)?.as_ref(), mode).await
    }

    /// Cuts segments whose TTL has passed now instead of at the next tick.
    pub async fn sweep(&self) {
        self.0.manager.sweep().await;
    }

    /// Waits until everything that is to be saved is on disk, then forgets the sessions in memory. Where this was the last clone, the
    /// data directory can be opened again when this returns, unless what a turn called goes on for longer than five seconds.
    ///
    /// # Errors
    /// The store cannot be closed cleanly.
    pub async fn shutdown(self) -> Result<(), Error> {
        self.0.manager.host().scheduler.settle().await?;
        self.0.sessions.clear();
        // Events that nobody waited for hold their session until they are durable, and with it everything:
        // the end of the journal's thread is the end of them.
        let closing = move || {
            let store = self.0.store.clone();
            let closed = store.clone().close();
            if Arc::into_inner(self.0).is_some() {
                // Turns and timers find the store closed and end; who holds it last holds the directory's lock.
                let end = Instant::now() + RELEASE;
                while store.is_shared() && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            closed
        };
        let closed = tokio::task::spawn_blocking(closing).await.map_err(Error::internal)?;
        closed.map_err(Error::internal)
    }
}

/// The contract of a model on a backend.
pub fn contract<B: Backend>(
    model: &LoadedModel,
    backend: &B,
    kv_type: KvType,
    tenant_salt: &str,
) -> Contract {
    let shape = &model.config;
    Contract {
        weights_digest: hex(&model.weights_digest),
        architecture: format!(
            "{} layers={} hidden={} ffn={} heads={} kv_heads={} head_dim={} kinds={}",
            shape.architecture.name(),
            shape.layers,
            shape.hidden,
            shape.ffn,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.layer_kinds.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
        ),
        adapter_digest: "none".to_owned(),
        tokenizer_digest: hex(&model.tokenizer_digest),
        rope: rope(shape),
        kv_layout: cell_layout(kv_type),
        numerics_class: backend.numerics_class().to_owned(),
        lineage: "exact".to_owned(),
        tenant_salt: tenant_salt.to_owned(),
    }
}

/// The rotary parameters; those of window layers only where they have their own.
fn rope(shape: &ModelConfig) -> String {
    let own = shape.window_rope_base.map_or_else(String::new, |base| format!(" window_base={base}"));
    format!("base={}{own} dims={} pairing={:?}", shape.rope_base, shape.rope_dims, shape.rope_pairing)
}

fn model_info(config: &Config, model: &LoadedModel, context_length: usize) -> ModelInfo {
    let shape: &ModelConfig = &model.config;
    ModelInfo {
        alias: config.model.clone(),
        architecture: shape.architecture.name().to_owned(),
        parameters: Some(model.weights.parameters()),
        context_length: context_length as u64,
        vocab: shape.vocab as u64,
        kv_bytes_per_token: shape.kv_token_bytes(config.kv_type) as u64,
        weights_digest: hex(&model.weights_digest),
    }
}

#[cfg(test)]
mod tests;
