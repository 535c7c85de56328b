//! What the runtime adds to a token besides the forward pass: in the scheduler's thread (choosing rows, sampling, decoding to
//! text, telling), and in all until a listener has heard of it.

use std::sync::Arc;
use std::time::Instant;

use kernels::backend::Backend;
use tokio::runtime::Builder;
use tokio::sync::mpsc::unbounded_channel;

use crate::engine::Engine;
use crate::error::Error;
use crate::kv::contract::Contract;
use crate::models::Tokenizer;
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use crate::scheduler::tenants::TenantQuotas;
use crate::scheduler::{
    GenerationEvent, GenerationRequest, HostControl, IdlePolicyName, KvObserver, KvTransition, OpenSession,
    Scheduler, SchedulerOptions, Speculation,
};

struct Unobserved;

impl KvObserver for Unobserved {
    fn transition(&self, _: &str, _: &KvTransition) {}
    fn restored(&self, _: &str, _: &RestoreReport) {}
}

/// Seconds of a token outside of the forward pass.
#[derive(Default)]
pub(super) struct Overhead {
    /// In the scheduler's thread.
    pub scheduler: Vec<f64>,
    /// Until it is heard of.
    pub heard: Vec<f64>,
}

/// Measures `runs` messages of `length` tokens that a session writes after `prompt`.
pub(super) fn measure<B: Backend>(
    engine: Engine<B>,
    contract: Contract,
    tokenizer: Tokenizer,
    prompt: &[u32],
    (runs, length): (usize, usize),
) -> Result<Overhead, Error> {
    let directory = std::env::temp_dir().join(crate::ids::fresh("bench"));
    let outcome = Builder::new_current_thread().build().map_err(Error::internal).and_then(|waiting| {
        let store =
            store::Store::open(&directory, store::StoreOptions::default()).map_err(Error::internal)?;
        let options = SchedulerOptions {
            restore_mode: RestoreMode::Planned,
            idle_policy: IdlePolicyName::default(),
            idle_ttl_ms: u64::MAX,
            context_length: prompt.len() + (runs + 1) * length,
            save_when_idle: false,
            speculation: Speculation::Off,
            share_prefixes: false,
            host_budget_bytes: 0,
            host_control: HostControl::default(),
            tenants: TenantQuotas::default(),
            step_seconds: 1.0,
            trace: None,
        };
        let clock = Arc::new(store::SystemClock::default());
        let scheduler = Scheduler::start(engine, store, contract, options, clock, Box::new(Unobserved))?;
        waiting.block_on(messages(&scheduler, &Arc::new(tokenizer), prompt, (runs, length)))
    });
    // The directory is ours alone; what is left of it harms nobody.
    let _ = std::fs::remove_dir_all(&directory);
    outcome
}

async fn messages(
    scheduler: &Scheduler,
    tokenizer: &Arc<Tokenizer>,
    prompt: &[u32],
    (runs, length): (usize, usize),
) -> Result<Overhead, Error> {
    let session: Arc<str> = "bench".into();
    scheduler.open(&session, OpenSession::default())?;
    scheduler.append(&session, prompt.to_vec())?;
    // The first message reads the prompt, and is not counted.
    message(scheduler, tokenizer, &session, 1).await?;
    let mut overhead = Overhead::default();
    for _ in 0..runs {
        let before = scheduler.device().await?;
        let begun = Instant::now();
        let tokens = message(scheduler, tokenizer, &session, length).await?.max(1) as f64;
        let all = begun.elapsed().as_secs_f64();
        let after = scheduler.device().await?;
        let forward = after.forward_seconds - before.forward_seconds;
        overhead.scheduler.push((after.busy_seconds - before.busy_seconds - forward) / tokens);
        overhead.heard.push((all - forward) / tokens);
    }
    Ok(overhead)
}

/// Lets the session write a message; its tokens.
async fn message(
    scheduler: &Scheduler,
    tokenizer: &Arc<Tokenizer>,
    session: &Arc<str>,
    length: usize,
) -> Result<usize, Error> {
    let (events, mut told) = unbounded_channel();
    let request = GenerationRequest {
        max_tokens: length,
        tokenizer: Some(Arc::clone(tokenizer)),
        ..GenerationRequest::default()
    };
    scheduler.generate(session, request, events)?;
    let mut tokens = 0;
    while let Some(event) = told.recv().await {
        match event {
            GenerationEvent::Token { .. } => tokens += 1,
            GenerationEvent::Failed(error) => return Err(error),
            GenerationEvent::Started { .. } | GenerationEvent::Done { .. } => {}
        }
    }
    Ok(tokens)
}
