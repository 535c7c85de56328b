//! The trace: what came to the scheduler, what it was told, and what became of KV, in a file that [`super::replay`] reads.
//!
//! Everything that decides reaches the scheduler through seams (commands, the clock, the disk tier, the next tokens), so a
//! trace listens there. It holds no text and no token: tokens have pseudonyms.

mod file;
mod host_settings;
mod pseudonyms;
mod record;
mod recorder;
mod seams;
mod writer;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use kernels::backend::{Backend, PAGE_TOKENS};
use store::Clock;

pub use file::{TRACE_VERSION, TraceEnd, TraceReader};
pub(super) use record::{Cause, Effect, Record, Restored, SessionNumber, Taken, Told};
pub use record::{TraceHeader, TracedOptions, TracedQuota, TracedShape};
pub(super) use recorder::Recorder;

use super::port::TierPort;
use super::tenants::TenantQuota;
use super::{KvObserver, SchedulerOptions};
use crate::engine::Engine;
use crate::error::Error;
use crate::kv::chunk::CHUNK_TOKENS;
use crate::kv::contract::{Contract, hex};
use seams::{RecordedClock, RecordedObserver, RecordedTier};
use writer::Writer;

/// Where a trace is written.
#[derive(Clone, Debug)]
pub struct TraceOptions {
    /// The file, which is created.
    pub file: PathBuf,
    /// Alias or path of the model, for the header.
    pub model: String,
}

/// What a scheduler is made of, apart from its engine; a trace puts itself in between.
pub(super) struct Surroundings {
    pub tier: Box<dyn TierPort>,
    pub contract: Contract,
    pub options: SchedulerOptions,
    pub clock: Arc<dyn Clock>,
    pub observer: Box<dyn KvObserver>,
}

impl Surroundings {
    /// Has everything recorded, where the options name a file.
    ///
    /// # Errors
    /// `trace_exists`, `trace_unwritable`.
    pub(super) fn traced<B: Backend>(self, engine: &Engine<B>) -> Result<(Self, Recorder), Error> {
        let Some(TraceOptions { file, model }) = self.options.trace.clone() else {
            return Ok((self, Recorder::default()));
        };
        let out = writer::create(&file)?;
        self.recorded(engine, &model, out)
    }

    /// Has everything recorded.
    pub(super) fn recorded<B: Backend>(
        self,
        engine: &Engine<B>,
        model: &str,
        out: impl Write + Send + 'static,
    ) -> Result<(Self, Recorder), Error> {
        let Self { tier, contract, mut options, clock, observer } = self;
        let began = clock.monotonic();
        let header = TraceHeader {
            program: env!("CARGO_PKG_VERSION").to_owned(),
            model: model.to_owned(),
            contract: hex(&contract.digest()),
            shape: TracedShape::of(engine),
            options: TracedOptions::of(&options),
            device: engine.backend().describe(),
            costs: tier.costs(),
            began_ns: u64::try_from(began.as_nanos()).unwrap_or(u64::MAX),
        };
        let writer = Writer::start(out, began)?;
        let control = options.host_control.clone();
        let recorder = Recorder::start(writer, &header, Arc::clone(&clock), contract.clone(), control)?;
        if let Some(seen) = recorder.seen_control() {
            options.host_control = seen;
        }
        let clock: Arc<dyn Clock> = Arc::new(RecordedClock { clock, recorder: recorder.clone() });
        let tier: Box<dyn TierPort> = Box::new(RecordedTier { tier, recorder: recorder.clone() });
        let observer: Box<dyn KvObserver> =
            Box::new(RecordedObserver { observer, recorder: recorder.clone() });
        Ok((Self { tier, contract, options, clock, observer }, recorder))
    }
}

impl TracedShape {
    fn of<B: Backend>(engine: &Engine<B>) -> Self {
        let (config, spec) = (engine.config(), engine.pool_spec());
        let windows = config.layer_kinds.iter().zip(0..).filter_map(|(kind, layer)| {
            let window = kind.window()?;
            Some((layer, window as u64))
        });
        Self {
            layers: config.layers as u32,
            kv_heads: config.kv_heads as u32,
            head_dim: config.head_dim as u32,
            kv_type: spec.kv_type.name().to_owned(),
            windows: windows.collect(),
            page_tokens: PAGE_TOKENS as u32,
            chunk_tokens: CHUNK_TOKENS as u32,
            page_bytes: spec.page_bytes() as u64,
            pages: spec.pages as u64,
            step_rows: engine.step_rows() as u32,
        }
    }
}

impl TracedOptions {
    fn of(options: &SchedulerOptions) -> Self {
        let named = options.tenants.named.iter();
        Self {
            idle_policy: options.idle_policy.as_str().to_owned(),
            restore_mode: options.restore_mode.to_string(),
            idle_ttl_ms: options.idle_ttl_ms,
            context_length: options.context_length as u64,
            save_when_idle: options.save_when_idle,
            speculation: options.speculation.as_str().to_owned(),
            share_prefixes: options.share_prefixes,
            host_budget_bytes: options.host_budget_bytes,
            step_seconds: options.step_seconds,
            quotas: named.map(|(name, quota)| (name.clone(), TracedQuota::of(quota))).collect(),
            others: TracedQuota::of(&options.tenants.others),
        }
    }
}

impl TracedQuota {
    fn of(quota: &TenantQuota) -> Self {
        let TenantQuota { device_bytes, host_bytes, disk_bytes } = *quota;
        Self { device_bytes, host_bytes, disk_bytes }
    }
}

#[cfg(test)]
pub(super) mod tests;
