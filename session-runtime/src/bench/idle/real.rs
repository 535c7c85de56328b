//! The same scripts on the real engine, in real time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::backend::{Backend, KvType};
use kernels::cpu::{CpuBackend, CpuOptions};
use tokio::sync::mpsc::unbounded_channel;

use super::drive::{options, tokens};
use super::measure;
use super::workload::Script;
use crate::bench::Setup;
use crate::engine::{self, Engine, EngineOptions};
use crate::error::Error;
use crate::kv::contract::Contract;
use crate::models::progress::Silent;
use crate::models::{self, LoadedModel};
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use crate::runtime::{self, STEP_ROWS};
use crate::scheduler::simulation::{DiskCost, Machine};
use crate::scheduler::{
    GenerationEvent, GenerationRequest, IdlePolicyName, KvObserver, KvTransition, OpenSession, Scheduler,
};

/// Tokens of the session that is written to disk and read back to measure that.
const MOVED_TOKENS: usize = 1500;
const MOVES: usize = 3;

struct Unobserved;

impl KvObserver for Unobserved {
    fn transition(&self, _: &str, _: &KvTransition) {}
    fn restored(&self, _: &str, _: &RestoreReport) {}
}

/// A model on this machine.
pub(super) struct Real {
    model: LoadedModel,
    backend: Arc<CpuBackend>,
    contract: Contract,
    token_bytes: u64,
}

/// A directory that is gone with its value.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // The directory is ours alone; what is left of it harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Real {
    pub(super) fn open(name: &str, setup: &Setup) -> Result<Self, Error> {
        let (threads, rounding) = (setup.config.thread_count(), setup.config.rounding);
        let backend = Arc::new(CpuBackend::new(CpuOptions { threads, rounding, ..CpuOptions::default() })?);
        let model = models::open_as(name, setup.config.weights, &Silent)?;
        let contract = runtime::contract(&model, backend.as_ref(), KvType::F16, "");
        let token_bytes = model.config.kv_token_bytes(KvType::F16) as u64;
        Ok(Self { model, backend, contract, token_bytes })
    }

    fn engine(&self, device_tokens: usize, context_length: usize) -> Result<Engine<impl Backend>, Error> {
        let budget_bytes = device_tokens as u64 * self.token_bytes;
        let options =
            EngineOptions { budget_bytes, context_length, step_rows: STEP_ROWS, kv_type: KvType::F16 };
        engine::open(Arc::clone(&self.backend), &self.model, options, &Silent)
    }

    fn scheduler(
        &self,
        directory: &Path,
        (device_tokens, context_length): (usize, usize),
        (policy, idle_ttl): (IdlePolicyName, Duration),
    ) -> Result<Scheduler, Error> {
        let store = store::Store::open(directory, store::StoreOptions::default()).map_err(Error::internal)?;
        let engine = self.engine(device_tokens, context_length)?;
        let clock = Arc::new(store::SystemClock::default());
        let options = options(policy, idle_ttl, context_length);
        Scheduler::start(engine, store, self.contract.clone(), options, clock, Box::new(Unobserved))
    }

    /// Measures this machine; its device is to hold `device_tokens` tokens.
    pub(super) async fn measure(&self, device_tokens: usize) -> Result<Machine, Error> {
        let device = tokio::task::block_in_place(|| {
            let mut engine = self.engine(4096, 4096)?;
            measure::device(&mut engine)
        })?;
        let disk = self.measure_disk(device.copy_bytes_per_s).await?;
        Ok(Machine { device, disk, token_bytes: self.token_bytes, device_tokens, step_rows: STEP_ROWS })
    }

    /// Writes a session to disk and reads it back.
    async fn measure_disk(&self, copy_bytes_per_s: f64) -> Result<DiskCost, Error> {
        let scratch = Scratch(std::env::temp_dir().join(crate::ids::fresh("bench")));
        let sizes = (2 * MOVED_TOKENS, 2 * MOVED_TOKENS);
        // Nothing leaves before it is told to, so that all of it is written then.
        let scheduler = self.scheduler(&scratch.0, sizes, (IdlePolicyName::Lru, Duration::MAX))?;
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        let rate = |bytes: u64, ms: f64| {
            let seconds = ms / 1e3 - bytes as f64 / copy_bytes_per_s;
            bytes as f64 / seconds.max(ms / 1e4)
        };
        for run in 0..MOVES {
            let session: Arc<str> = format!("moved-{run}").into();
            let history = tokens(run, 0, MOVED_TOKENS, self.model.config.vocab as u64);
            scheduler.open(&session, OpenSession::default())?;
            scheduler.append(&session, history)?;
            message(&scheduler, &session, 1).await?;
            let change = scheduler.evict(&session).await?;
            writes.push(rate(change.bytes, change.ms));
            let report = scheduler.restore(&session, RestoreMode::Load).await?;
            reads.push(rate(report.bytes_loaded, report.ms));
            scheduler.close(&session)?;
        }
        Ok(DiskCost {
            read_bytes_per_s: crate::bench::median(reads),
            write_bytes_per_s: crate::bench::median(writes),
            latency: 0.0,
        })
    }

    /// Runs scripts to their end; seconds of every turn but each session's first, and those of all steps.
    pub(super) async fn run(
        &self,
        scripts: &[Script],
        device_tokens: usize,
        (policy, idle_ttl): (IdlePolicyName, Duration),
    ) -> Result<(Vec<f64>, f64), Error> {
        let context_length = scripts.iter().map(Script::tokens).max().unwrap_or(0) + 1;
        let scratch = Scratch(std::env::temp_dir().join(crate::ids::fresh("bench")));
        let scheduler = self.scheduler(&scratch.0, (device_tokens, context_length), (policy, idle_ttl))?;
        let vocab = self.model.config.vocab as u64;
        let sessions =
            scripts.iter().enumerate().map(|(index, script)| session(&scheduler, index, script, vocab));
        let outcomes = futures::future::try_join_all(sessions).await?;
        let forward_seconds = scheduler.device().await?.forward_seconds;
        Ok((outcomes.into_iter().flatten().collect(), forward_seconds))
    }
}

/// A session's life; seconds of its turns but the first.
async fn session(
    scheduler: &Scheduler,
    index: usize,
    script: &Script,
    vocab: u64,
) -> Result<Vec<f64>, Error> {
    scheduler.open(&script.id, OpenSession::default())?;
    scheduler.append(&script.id, tokens(index, 0, script.history, vocab))?;
    tokio::time::sleep(script.start).await;
    let (mut latencies, mut place) = (Vec::new(), script.history);
    for (number, turn) in script.turns.iter().enumerate() {
        let begun = Instant::now();
        scheduler.append(&script.id, tokens(index, place, turn.input, vocab))?;
        message(scheduler, &script.id, turn.output).await?;
        if number > 0 {
            latencies.push(begun.elapsed().as_secs_f64());
        }
        place += turn.input + turn.output;
        if number + 1 < script.turns.len() {
            scheduler.rest(&script.id, turn.reason.clone())?;
            tokio::time::sleep(turn.pause).await;
        }
    }
    scheduler.close(&script.id)?;
    Ok(latencies)
}

/// Lets a session write so many tokens.
async fn message(scheduler: &Scheduler, session: &Arc<str>, count: usize) -> Result<(), Error> {
    let (events, mut told) = unbounded_channel();
    let request = GenerationRequest { max_tokens: count, ..GenerationRequest::default() };
    scheduler.generate(session, request, events)?;
    while let Some(event) = told.recv().await {
        match event {
            GenerationEvent::Failed(error) => return Err(error),
            GenerationEvent::Done { .. } => break,
            GenerationEvent::Started { .. } | GenerationEvent::Token { .. } => {}
        }
    }
    Ok(())
}
