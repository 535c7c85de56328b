//! Runs scripts against the scheduler on simulated time. A session's next turn begins when its tool is done, so that whoever
//! waits longer also asks later.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use super::workload::Script;
use crate::error::Error;
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use crate::scheduler::simulation::{Machine, Overstay, Progress, Simulation};
use crate::scheduler::tenants::TenantQuotas;
use crate::scheduler::{
    GenerationEvent, HostControl, IdlePolicyName, KvObserver, KvTransition, OpenSession, SchedulerOptions,
    Speculation,
};

/// What happened to KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moves {
    /// Tokens loaded, and recomputed, by restores.
    pub loaded: u64,
    pub recomputed: u64,
    /// Restores ahead of a return.
    pub prefetched: u64,
}

#[derive(Clone, Default)]
struct Observer(Arc<Mutex<Moves>>);

impl KvObserver for Observer {
    fn transition(&self, _: &str, change: &KvTransition) {
        if change.reason == "prefetch" && change.to == crate::kv::state::KvState::Restored {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).prefetched += 1;
        }
    }

    fn restored(&self, _: &str, report: &RestoreReport) {
        let mut moves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        moves.loaded += report.tokens_loaded;
        moves.recomputed += report.tokens_recomputed + report.tokens_mixed;
    }
}

/// How a run went.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    /// Seconds from the end of a tool to the end of the message after it, of every turn but each session's first.
    pub latencies: Vec<f64>,
    /// Of those turns, the ones whose history was on the device when they came.
    pub hits: usize,
    /// Sessions that could not go on.
    pub stuck: usize,
    /// The longest that idle KV stayed past its soft TTL.
    pub overstay: Overstay,
    /// What was moved.
    pub moves: Moves,
    /// Seconds of the device's steps.
    pub forward_seconds: f64,
}

impl Outcome {
    /// Mean milliseconds of a turn.
    pub(super) fn mean_ms(&self) -> f64 {
        1e3 * self.latencies.iter().sum::<f64>() / self.latencies.len().max(1) as f64
    }

    /// The milliseconds that this share of the turns stays below.
    pub(super) fn quantile_ms(&self, share: f64) -> f64 {
        let mut sorted = self.latencies.clone();
        sorted.sort_by(f64::total_cmp);
        1e3 * sorted.get((share * sorted.len() as f64) as usize).copied().unwrap_or(0.0)
    }
}

/// What a run is made of.
pub(super) struct Run<'a> {
    pub machine: Machine,
    pub scripts: &'a [Script],
    pub policy: IdlePolicyName,
    pub idle_ttl: Duration,
    /// Whether sessions begin with their history on the tier, as agents that have been there for long; else they have to
    /// compute it.
    pub begun_before: bool,
}

/// The options every run has, simulated or real.
pub(super) fn options(policy: IdlePolicyName, idle_ttl: Duration, context_length: usize) -> SchedulerOptions {
    SchedulerOptions {
        restore_mode: RestoreMode::Planned,
        idle_policy: policy,
        idle_ttl_ms: u64::try_from(idle_ttl.as_millis()).unwrap_or(u64::MAX),
        context_length,
        save_when_idle: true,
        speculation: Speculation::Off,
        share_prefixes: false,
        // What is compared is how policies use the device and the disk.
        host_budget_bytes: 0,
        host_control: HostControl::default(),
        tenants: TenantQuotas::default(),
        step_seconds: 0.15,
        trace: None,
    }
}

/// Tokens that no other session has.
pub(super) fn tokens(session: usize, from: usize, count: usize, vocab: u64) -> Vec<u32> {
    (from..from + count)
        .map(|place| {
            let mixed = (session as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ place as u64;
            (mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as u32 % vocab as u32
        })
        .collect()
}

/// Ids of the simulated tokens: many, so that sessions share no chunk.
const IDS: u64 = 1 << 30;

/// A turn under way.
struct Under {
    session: usize,
    told: UnboundedReceiver<GenerationEvent>,
    since: Duration,
}

struct Drive<'a> {
    run: &'a Run<'a>,
    simulation: Simulation,
    arrivals: BinaryHeap<Reverse<(Duration, usize)>>,
    /// The next turn of each session.
    next: Vec<usize>,
    under: Vec<Under>,
    outcome: Outcome,
}

/// Runs scripts to their end.
///
/// # Errors
/// A machine that holds nothing, or a message that fails.
pub(super) fn drive(run: &Run<'_>) -> Result<Outcome, Error> {
    let observer = Observer::default();
    let context = run.scripts.iter().map(Script::tokens).max().unwrap_or(0) + 1;
    let options = options(run.policy, run.idle_ttl, context);
    let mut simulation = Simulation::new(&run.machine, options, Box::new(observer.clone()))?;
    let saves = run.policy.policy().saves();
    for (index, script) in run.scripts.iter().enumerate() {
        let history = tokens(index, 0, script.history, IDS);
        if run.begun_before {
            simulation.open_with(&script.id, history, saves);
        } else {
            simulation.open(&script.id, OpenSession::default());
            simulation.append(&script.id, history);
        }
    }
    let arrivals =
        run.scripts.iter().enumerate().map(|(index, script)| Reverse((script.start, index))).collect();
    let next = vec![0; run.scripts.len()];
    let outcome = Outcome::default();
    let mut drive = Drive { run, simulation, arrivals, next, under: Vec::new(), outcome };
    drive.all()?;
    drive.outcome.forward_seconds = drive.simulation.device().forward_seconds;
    drive.outcome.moves = *observer.0.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(drive.outcome)
}

impl Drive<'_> {
    fn all(&mut self) -> Result<(), Error> {
        loop {
            while let Some(Reverse((due, session))) = self.arrivals.peek().copied()
                && due <= self.simulation.now()
            {
                self.arrivals.pop();
                self.begin(session, due);
            }
            self.outcome.overstay = self.outcome.overstay.max(self.simulation.overstay());
            match self.simulation.step(self.arrivals.peek().map(|Reverse((due, _))| *due)) {
                Progress::Worked => self.hear()?,
                Progress::Passed if self.under.is_empty() && self.arrivals.is_empty() => return Ok(()),
                Progress::Passed => self.hear()?,
                Progress::Stuck => {
                    self.outcome.stuck = self.under.len();
                    return Ok(());
                }
            }
        }
    }

    /// A session's tool is done.
    fn begin(&mut self, session: usize, due: Duration) {
        let script = &self.run.scripts[session];
        let index = self.next[session];
        let turn = &script.turns[index];
        if index > 0 && self.simulation.is_resident(&script.id) {
            self.outcome.hits += 1;
        }
        let before: usize = script.turns[..index].iter().map(|turn| turn.input + turn.output).sum();
        self.simulation.append(&script.id, tokens(session, script.history + before, turn.input, IDS));
        let told = self.simulation.generate(&script.id, turn.output);
        self.under.push(Under { session, told, since: due });
    }

    /// Hears of messages that ended.
    fn hear(&mut self) -> Result<(), Error> {
        let mut index = 0;
        while index < self.under.len() {
            let mut over = false;
            while let Ok(event) = self.under[index].told.try_recv() {
                match event {
                    GenerationEvent::Done { .. } => over = true,
                    GenerationEvent::Failed(error) => return Err(error),
                    GenerationEvent::Started { .. } | GenerationEvent::Token { .. } => {}
                }
            }
            if over {
                let ended = self.under.swap_remove(index);
                self.end(&ended);
            } else {
                index += 1;
            }
        }
        Ok(())
    }

    fn end(&mut self, ended: &Under) {
        let script = &self.run.scripts[ended.session];
        let index = self.next[ended.session];
        let now = self.simulation.now();
        if index > 0 {
            self.outcome.latencies.push(now.saturating_sub(ended.since).as_secs_f64());
        }
        self.next[ended.session] += 1;
        let turn = &script.turns[index];
        if index + 1 < script.turns.len() {
            self.simulation.rest(&script.id, turn.reason.clone());
            self.arrivals.push(Reverse((now + turn.pause, ended.session)));
        } else {
            self.simulation.close(&script.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::workload::Agents;
    use super::*;
    use crate::scheduler::simulation::{DeviceCost, DiskCost};

    /// About a small model on a small machine.
    pub(super) fn machine(device_tokens: usize) -> Machine {
        Machine {
            device: DeviceCost { step: 8e-3, row: 1e-3, context: 1e-7, logits: 1e-3, copy_bytes_per_s: 4e9 },
            disk: DiskCost { read_bytes_per_s: 5e7, write_bytes_per_s: 1e8, latency: 1e-4 },
            token_bytes: 23_040,
            device_tokens,
            step_rows: 256,
        }
    }

    fn agents(seed: u64) -> Agents {
        let (history, input, output) = ((60, 700), (8, 64), (2, 12));
        Agents { sessions: 16, turns: 4, history, input, output, pause: 3.0, seed }
    }

    fn outcome(
        policy: IdlePolicyName,
        seed: u64,
        share: f64,
        idle_ttl: Duration,
        begun_before: bool,
    ) -> Outcome {
        let scripts = agents(seed).scripts();
        let all: usize = scripts.iter().map(Script::tokens).sum();
        let most = scripts.iter().map(Script::tokens).max().unwrap() + 64;
        let device_tokens = ((all as f64 * share) as usize).max(most);
        drive(&Run { machine: machine(device_tokens), scripts: &scripts, policy, idle_ttl, begun_before })
            .unwrap()
    }

    #[test]
    fn the_same_seed_gives_the_same_run() {
        for policy in IdlePolicyName::ALL {
            let run = || outcome(policy, 3, 0.25, Duration::from_secs(5), true);
            assert_eq!(run(), run(), "{policy}");
        }
    }

    #[test]
    fn on_a_device_that_holds_everything_nothing_is_moved_twice() {
        for policy in IdlePolicyName::ALL {
            let outcome = outcome(policy, 5, 1.2, Duration::from_secs(3600), false);
            assert_eq!(outcome.moves, Moves::default(), "{policy}");
            assert_eq!((outcome.hits, outcome.latencies.len(), outcome.stuck), (48, 48, 0), "{policy}");
        }
    }

    #[test]
    fn dropping_recomputes_and_moving_loads() {
        let run = |policy| outcome(policy, 9, 0.25, Duration::from_secs(3600), true).moves;
        let (dropped, moved) = (run(IdlePolicyName::Drop), run(IdlePolicyName::Lru));
        assert_eq!((dropped.loaded, moved.prefetched), (0, 0));
        assert!(dropped.recomputed > 0 && moved.loaded > moved.recomputed, "{dropped:?} {moved:?}");
    }

    #[test]
    fn kv_is_back_ahead_of_declared_returns() {
        let run = |policy| outcome(policy, 11, 0.4, Duration::from_secs(3600), true);
        let (declared, lru) = (run(IdlePolicyName::Declared), run(IdlePolicyName::Lru));
        assert_eq!(lru.moves.prefetched, 0);
        assert!(declared.moves.prefetched > 0, "{:?}", declared.moves);
        assert!(declared.hits >= lru.hits, "{} {}", declared.hits, lru.hits);
    }

    #[test]
    fn i9_a_ttl_ends_while_many_sessions_are_recomputed() {
        let ttl = Duration::from_millis(50);
        let outcome =
            outcome(IdlePolicyName::Drop, 3_134_560_867_969_771_664, 0.482_218_589_077_562_4, ttl, false);
        assert!(outcome.overstay.time <= Duration::from_millis(200 + 400), "{:?}", outcome.overstay);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the policy, the budget and the TTL: everyone gets on, and nothing outlives its TTL by more than the
        /// tick in which it ends. A tick waits for the step that runs, here of at most a third of a second.
        #[test]
        fn i9_everyone_gets_on_and_a_ttl_ends(
            seed: u64,
            share in 0.02..0.6_f64,
            ttl_ms in 50_u64..8000,
            policy in prop::sample::select(IdlePolicyName::ALL.to_vec()),
            begun_before: bool,
        ) {
            let outcome = outcome(policy, seed, share, Duration::from_millis(ttl_ms), begun_before);
            prop_assert_eq!(outcome.stuck, 0);
            prop_assert_eq!(outcome.latencies.len(), 16 * 3);
            prop_assert!(outcome.overstay.ticks <= 1, "{:?}", outcome.overstay);
            prop_assert!(outcome.overstay.time <= Duration::from_millis(200 + 400), "{:?}", outcome.overstay);
        }
    }
}
