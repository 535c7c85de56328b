//! The scheduler on simulated time: the real loop, with a device and a tier that only take time. It is driven step by
//! step on one thread, so that the same calls give the same run, and a run of hours takes seconds.

mod device;
mod disk;
#[cfg(test)]
pub(super) mod sessions;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kernels::backend::{KvType, PAGE_TOKENS, PoolSpec, RopePairing};
use serde::{Deserialize, Serialize};
use store::{Clock, ManualClock};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

pub use device::DeviceCost;
use device::PackedLengths;
pub(super) use device::SimulatedDevice;
pub use disk::DiskCost;
use disk::DiskPort;

use super::idle::RestReason;
use super::sequence::Sequence;
use super::tenants::TenantView;
use super::trace::Surroundings;
use super::worker::{Phase, TICK, Worker};
use super::{
    Command, DeviceView, GenerationEvent, GenerationRequest, KvObserver, OpenSession, SchedulerOptions,
};
use crate::engine::{Engine, Weights};
use crate::error::Error;
use crate::kv::chunk::chunks;
use crate::kv::contract::Contract;
use crate::models::architecture::{Architecture, Gate, LayerKind, ModelConfig};

/// Layers of the simulated model: fewer than a real one has, of more bytes each, because a plan's cuts need layers, but
/// tables of many take the time of the simulation and not of what it simulates.
const LAYERS: usize = 4;
/// Its vocabulary.
const VOCAB: usize = 8;
/// The longest time without anything going on while someone waits; the loop's own clocks are far shorter.
const STUCK: Duration = Duration::from_secs(30);

/// What is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The device's times.
    pub device: DeviceCost,
    /// The tier's times.
    pub disk: DiskCost,
    /// Bytes of KV of a token.
    pub token_bytes: u64,
    /// Tokens whose KV the device holds.
    pub device_tokens: usize,
    /// Most rows of a step.
    pub step_rows: usize,
}

/// How a step of the simulation went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Something was done.
    Worked,
    /// Nothing was to be done, so that time passed.
    Passed,
    /// Somebody waits, and nothing will ever happen.
    Stuck,
}

/// How long idle KV has stayed past its soft TTL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Overstay {
    /// Ticks of the loop, begun ones included: one until the loop has looked at it. A tick waits for the step that runs.
    pub ticks: u64,
    /// The time.
    pub time: Duration,
}

/// A scheduler on simulated time.
pub struct Simulation {
    pub(super) worker: Worker<SimulatedDevice>,
    clock: Arc<ManualClock>,
    disk: DiskPort,
    /// Since when nothing has gone on.
    still: Duration,
}

/// How steps go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    /// What they cost.
    pub cost: DeviceCost,
    /// The most rows of one.
    pub rows: usize,
}

/// An engine that computes nothing.
///
/// # Errors
/// What the engine refuses.
pub(super) fn engine(
    config: ModelConfig,
    spec: PoolSpec,
    steps: Steps,
    context: usize,
    clock: &Arc<ManualClock>,
) -> Result<Engine<SimulatedDevice>, Error> {
    let (cost, layers) = (steps.cost, config.layers);
    let device = SimulatedDevice {
        clock: Arc::clone(clock),
        cost,
        layers,
        queued: Mutex::default(),
        packed: PackedLengths::default(),
    };
    let weights = Weights::blank(&config);
    Engine::new(Arc::new(device), config, weights, spec, context, steps.rows)
}

/// The shape of the simulated model.
fn model(context_length: usize, layer_bytes: usize) -> ModelConfig {
    let head_dim = (layer_bytes / (2 * size_of::<u16>())).max(1);
    shaped(context_length, 1, head_dim, vec![LayerKind::Full; LAYERS])
}

/// A model of which only the KV has a shape.
pub(super) fn shaped(
    context_length: usize,
    kv_heads: usize,
    head_dim: usize,
    layer_kinds: Vec<LayerKind>,
) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        layers: layer_kinds.len(),
        hidden: head_dim,
        ffn: head_dim,
        heads: kv_heads,
        kv_heads,
        head_dim,
        vocab: VOCAB,
        context_length,
        rms_eps: 1e-5,
        rope_base: 1e4,
        window_rope_base: None,
        rope_dims: head_dim,
        rope_pairing: RopePairing::Halves,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        post_norms: false,
        gate: Gate::Silu,
        embedding_scale: None,
        attention_scale: 1.0,
        layer_kinds,
    }
}

/// The contract of simulated KV.
pub(super) fn contract() -> Contract {
    let simulated = || "simulated".to_owned();
    Contract {
        weights_digest: simulated(),
        architecture: simulated(),
        adapter_digest: "none".to_owned(),
        tokenizer_digest: simulated(),
        rope: simulated(),
        kv_layout: simulated(),
        numerics_class: simulated(),
        lineage: "exact".to_owned(),
        tenant_salt: String::new(),
    }
}

impl Simulation {
    /// A scheduler without sessions, at time zero.
    ///
    /// # Errors
    /// A device that holds no page.
    pub fn new(
        machine: &Machine,
        options: SchedulerOptions,
        observer: Box<dyn KvObserver>,
    ) -> Result<Self, Error> {
        let layer_bytes = usize::try_from(machine.token_bytes).map_err(Error::internal)? / LAYERS;
        let config = model(options.context_length, layer_bytes);
        let page_bytes = 2 * size_of::<u16>() * config.head_dim * PAGE_TOKENS;
        let budget = machine.device_tokens.div_ceil(PAGE_TOKENS) * LAYERS * page_bytes;
        let spec = crate::engine::pool_spec(&config, KvType::F16, budget as u64)?;
        let steps = Steps { cost: machine.device, rows: machine.step_rows };
        Self::of(config, spec, steps, machine.disk, options, observer)
    }

    /// A scheduler of a model of any shape, without sessions, at time zero.
    ///
    /// # Errors
    /// What the engine refuses.
    pub(super) fn of(
        config: ModelConfig,
        spec: PoolSpec,
        steps: Steps,
        disk: DiskCost,
        options: SchedulerOptions,
        observer: Box<dyn KvObserver>,
    ) -> Result<Self, Error> {
        let clock = Arc::new(ManualClock::new(0));
        let engine = engine(config, spec, steps, options.context_length, &clock)?;
        let disk = DiskPort::new(Arc::clone(&clock), disk);
        let surroundings = Surroundings {
            tier: Box::new(disk.clone()),
            contract: contract(),
            options,
            clock: Arc::<ManualClock>::clone(&clock),
            observer,
        };
        let (surroundings, recorder) = surroundings.traced(&engine)?;
        let worker = Worker::new(engine, surroundings, recorder, Arc::new(AtomicBool::new(false)));
        Ok(Self { worker, clock, disk, still: Duration::ZERO })
    }

    /// The simulated time.
    pub fn now(&self) -> Duration {
        self.clock.monotonic()
    }

    /// Makes a session known.
    pub fn open(&mut self, session: &Arc<str>, opening: OpenSession) {
        self.worker.command(Command::Open { session: Arc::clone(session), opening: Box::new(opening) });
    }

    /// Makes a session known with a history, and its KV on the tier; where it is not `saved`, lost.
    pub fn open_with(&mut self, session: &Arc<str>, tokens: Vec<u32>, saved: bool) {
        if saved {
            self.hold(&tokens);
        }
        let saved_under = saved.then(|| self.worker.contract.clone());
        self.open(session, OpenSession { tokens, saved_under, ..OpenSession::default() });
    }

    /// Has the KV of a history on the tier.
    pub(super) fn hold(&mut self, tokens: &[u32]) {
        let (bytes, layers) = (self.worker.engine.cell_bytes(1), self.worker.engine.config().layers as u32);
        for chunk in chunks(&self.worker.contract_digest, tokens) {
            (0..layers).for_each(|layer| self.disk.hold(chunk.id, layer, chunk.tokens * bytes));
        }
    }

    /// Whether a session's KV is on the device.
    pub fn is_resident(&self, session: &str) -> bool {
        self.worker.sequences.get(session).is_some_and(|sequence| sequence.state.is_resident())
    }

    /// Appends tokens to a session's history.
    pub fn append(&mut self, session: &Arc<str>, tokens: Vec<u32>) {
        self.worker.command(Command::Append { session: Arc::clone(session), tokens });
    }

    /// Begins a message of so many tokens.
    pub fn generate(&mut self, session: &Arc<str>, tokens: usize) -> UnboundedReceiver<GenerationEvent> {
        let (events, told) = unbounded_channel();
        let request = Box::new(GenerationRequest { max_tokens: tokens, ..GenerationRequest::default() });
        self.worker.command(Command::Generate { session: Arc::clone(session), request, events });
        told
    }

    /// Lets a session rest.
    pub fn rest(&mut self, session: &Arc<str>, reason: RestReason) {
        self.worker.command(Command::Rest { session: Arc::clone(session), reason });
    }

    /// Forgets a session.
    pub fn close(&mut self, session: &Arc<str>) {
        self.worker.command(Command::Close { session: Arc::clone(session) });
    }

    /// What the device holds.
    pub fn device(&self) -> DeviceView {
        self.worker.device()
    }

    /// Bytes of cells that the tier was given.
    pub(super) fn bytes_written(&self) -> u64 {
        self.disk.written()
    }

    /// What each tenant holds.
    pub fn tenants(&self) -> Vec<TenantView> {
        self.worker.tenants()
    }

    /// Whether nothing is left to do but what the clock brings.
    pub fn is_quiet(&self) -> bool {
        self.worker.jobs.is_empty() && self.worker.saver.is_idle()
    }

    /// How far past the end of its soft TTL the KV of some idle session is, at most.
    pub fn overstay(&self) -> Overstay {
        let idle = self.worker.sequences.values().filter(|sequence| self.worker.job(&sequence.id).is_none());
        let Some(deadline) = idle.filter_map(Sequence::deadline_ms).min() else { return Overstay::default() };
        let (deadline, now) = (Duration::from_millis(deadline), self.now());
        if deadline >= now {
            return Overstay::default();
        }
        let ticks = match self.worker.last_tick.checked_sub(deadline) {
            None => 1,
            Some(since) => 2 + (since.as_nanos() / TICK.as_nanos()) as u64,
        };
        Overstay { time: now - deadline, ticks }
    }

    /// One round of the loop, or time passes until something is due, but not beyond `until`.
    pub fn step(&mut self, until: Option<Duration>) -> Progress {
        let mut answered = false;
        while let Some(answer) = self.disk.answer() {
            self.worker.tier_answer(answer);
            answered = true;
        }
        if self.worker.turn() {
            self.still = self.now();
            return Progress::Worked;
        }
        let now = self.now();
        let waits = self.worker.jobs.iter().any(|job| !matches!(job.phase, Phase::Running));
        let due = self.disk.next_due();
        if answered || due.is_some() || !waits {
            self.still = now;
        } else if now.saturating_sub(self.still) > STUCK {
            return Progress::Stuck;
        }
        let next = [Some(now + self.worker.patience()), due, until].into_iter().flatten().min();
        self.clock.pass(next.unwrap_or(now).saturating_sub(now));
        Progress::Passed
    }
}
