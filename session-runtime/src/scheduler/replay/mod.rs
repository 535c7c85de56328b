//! Replays of traces. The replay of what was (`exact`) proves that a trace says everything that decides: the scheduler, fed
//! from it, does the same again. The replay of what would have been (`other`) puts what sessions did on simulated time, and
//! chooses another policy or other budgets. Both run the real scheduler; neither has a model.

mod counts;
mod exact;
mod feed;
mod other;
mod plan;
mod script;
mod setting;

use std::io::Read;
use std::time::Duration;

use serde::Serialize;

use super::IdlePolicyName;
use super::trace::{Cause, Record, TraceEnd, TraceHeader, TraceReader};
use crate::error::Error;
use counts::Counter;
pub use counts::Counts;
use exact::Exact;
pub use other::Simulated;
use other::{Choice, Measured};
use plan::Plan;

/// What is asked besides what was: all unset, nothing is.
#[derive(Clone, Copy, Debug, Default)]
pub struct WhatIf {
    /// Another idle policy.
    pub policy: Option<IdlePolicyName>,
    /// Bytes of KV on the device.
    pub device_budget_bytes: Option<u64>,
    /// Bytes of cells that host memory may hold.
    pub host_budget_bytes: Option<u64>,
}

impl WhatIf {
    fn is_nothing(&self) -> bool {
        self.policy.is_none() && self.device_budget_bytes.is_none() && self.host_budget_bytes.is_none()
    }
}

/// Where a replay of what was went another way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Divergence {
    /// The record, from 1 on.
    pub record: u64,
    /// How.
    pub what: String,
}

/// What a trace says, and what became of it again.
#[derive(Clone, Debug, Serialize)]
pub struct Replay {
    /// Version of the software that wrote the trace.
    pub program: String,
    /// The model.
    pub model: String,
    /// Digest of the contract.
    pub contract: String,
    /// Bytes of KV on the device.
    pub device_budget_bytes: u64,
    /// Bytes of cells in host memory.
    pub host_budget_bytes: u64,
    /// The idle policy.
    pub policy: String,
    /// Records read.
    pub records: u64,
    /// How the trace ended.
    pub end: TraceEnd,
    /// Seconds from its beginning to its last record.
    pub seconds: f64,
    /// What became of KV, as recorded.
    pub recorded: Counts,
    /// What became of it in the replay, up to where that went another way.
    pub replayed: Counts,
    /// Mean milliseconds that a message waited for its first token, as recorded.
    pub mean_wait_ms: Option<f64>,
    /// Where the replay went another way; none where it did exactly what was recorded.
    pub divergence: Option<Divergence>,
    /// What sessions did, on simulated time with the recorded policy and budgets: what `what_if` is to be compared with.
    pub simulated: Option<Simulated>,
    /// The same with what was asked for.
    pub what_if: Option<Simulated>,
}

impl Replay {
    /// Whether the replay did exactly what was recorded.
    pub fn is_exact(&self) -> bool {
        self.divergence.is_none() && self.recorded == self.replayed
    }
}

/// Replays a trace.
///
/// # Errors
/// `trace_invalid`, where it says what no scheduler can do; `device_budget_too_small` and `host_budget_too_small`, where what
/// is asked for holds nothing.
pub fn replay<R: Read>(mut trace: TraceReader<R>, what_if: WhatIf) -> Result<Replay, Error> {
    let header = trace.header().clone();
    let name = trace.name().to_owned();
    let told = read(&mut trace, &header, !what_if.is_nothing()).map_err(|error| naming(error, &name))?;
    let recorded_host = header.options.host_budget_bytes;
    let (mut simulated, mut asked) = (None, None);
    if !what_if.is_nothing() {
        let (costs, (disk_limit, host)) = (told.exact.costs(), told.exact.throttles());
        let measured = Measured { costs, token_seconds: told.token_seconds(), disk_limit, host };
        let policy = setting::word(&header.options.idle_policy)?;
        let was = Choice { policy, device_budget: None, host_budget: recorded_host };
        simulated = Some(other::run(&header, &told.plan, &measured, was)?);
        let choice = Choice {
            policy: what_if.policy.unwrap_or(policy),
            device_budget: what_if.device_budget_bytes,
            host_budget: what_if.host_budget_bytes.unwrap_or(recorded_host),
        };
        asked = Some(other::run(&header, &told.plan, &measured, choice)?);
    }
    Ok(Replay {
        program: header.program,
        model: header.model,
        contract: header.contract,
        device_budget_bytes: header.shape.pages.saturating_mul(header.shape.page_bytes),
        host_budget_bytes: recorded_host,
        policy: header.options.idle_policy,
        records: trace.records,
        end: trace.end(),
        seconds: told.at.as_secs_f64(),
        mean_wait_ms: told.recorded.counts.mean_wait_ms(),
        recorded: told.recorded.counts,
        replayed: told.exact.counter().counts.clone(),
        divergence: told.divergence,
        simulated,
        what_if: asked,
    })
}

/// What was read of a trace.
struct Reading {
    exact: Exact,
    recorded: Counter,
    divergence: Option<Divergence>,
    plan: Plan,
    /// Seconds of turns that gave one token and nothing else.
    tokens: Vec<f64>,
    /// Since the trace began.
    at: Duration,
}

impl Reading {
    /// Median seconds of a step that gave one token; what the costs say of a row, where there was none.
    fn token_seconds(&self) -> f64 {
        let mut sorted = self.tokens.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    }
}

/// Reads a trace to its end and replays what was on the way.
fn read<R: Read>(trace: &mut TraceReader<R>, header: &TraceHeader, plans: bool) -> Result<Reading, Error> {
    let began = Duration::from_nanos(header.began_ns);
    let mut reading = Reading {
        exact: Exact::new(header)?,
        recorded: Counter::default(),
        divergence: None,
        plan: Plan::default(),
        tokens: Vec::new(),
        at: Duration::ZERO,
    };
    while let Some(record) = trace.next_record() {
        let at = reading.at.saturating_add(Duration::from_nanos(record.after_ns));
        let took: u64 = record.told.times_ns.iter().fold(0, |sum, since| sum.saturating_add(*since));
        let ended = at.saturating_add(Duration::from_nanos(took));
        reading.at = at;
        let times = (began.saturating_add(at), began.saturating_add(ended));
        if let Cause::Generate { session, .. } = record.cause {
            reading.recorded.asked(session, times.0);
        }
        record.effects.iter().for_each(|effect| reading.recorded.count(effect, times.1));
        // Behind a difference everything differs.
        if reading.divergence.is_none() {
            reading.divergence = reading.exact.apply(&record, times.0);
        }
        if plans {
            if is_one_token(&record) {
                reading.tokens.push((ended - at).as_secs_f64());
            }
            reading.plan.learn(record, at, ended);
        }
    }
    Ok(reading)
}

/// Whether a turn did nothing but one token's step.
fn is_one_token(record: &Record) -> bool {
    let told = &record.told;
    record.cause == Cause::Turn && told.tokens.len() == 1 && told.guess.is_none() && record.effects.is_empty()
}

/// A trace that says what cannot be.
fn invalid(what: &str) -> Error {
    Error::invalid("trace_invalid", format!("the trace cannot be replayed: {what}; record it again"))
}

/// An error of a trace, with its name.
fn naming(mut error: Error, name: &str) -> Error {
    error.message = format!("{name}: {}", error.message);
    error
}

#[cfg(test)]
mod tests;
