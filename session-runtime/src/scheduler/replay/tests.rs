//! Traces of runs on simulated time, replayed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;

use super::*;
use crate::kv::reuse::KvReuse;
use crate::restore::cost::Costs;
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use crate::scheduler::simulation::{DeviceCost, DiskCost, Machine, Progress, Simulation};
use crate::scheduler::tenants::{Tenant, TenantQuota, TenantQuotas};
use crate::scheduler::trace::tests::change;
use crate::scheduler::trace::{Effect, TraceOptions};
use crate::scheduler::{
    Command, GenerationEvent, HostControl, KvObserver, KvTransition, OpenSession, RestReason,
    SchedulerOptions, Speculation,
};

mod packed;

/// What someone saw who knows nothing of traces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    transitions: u64,
    bytes_from_host: u64,
    bytes_from_disk: u64,
    recomputed: u64,
    evictions: BTreeMap<String, u64>,
}

#[derive(Clone, Default)]
struct Witness(Arc<Mutex<Seen>>);

impl KvObserver for Witness {
    fn transition(&self, _: &str, change: &KvTransition) {
        let mut seen = self.0.lock().unwrap();
        seen.transitions += 1;
        // A restore that is given up, and cells that are found, evict nothing; a prompt that was half read and is dropped does.
        if matches!(change.to.as_str(), "evicted" | "lost")
            && !matches!((change.from.as_str(), change.to.as_str()), ("restoring" | "none", "evicted"))
        {
            *seen.evictions.entry(change.reason.clone()).or_default() += 1;
        }
    }

    fn restored(&self, _: &str, report: &RestoreReport) {
        let mut seen = self.0.lock().unwrap();
        seen.bytes_from_host += report.from_host.bytes;
        seen.bytes_from_disk += report.from_disk.bytes;
        seen.recomputed += report.tokens_recomputed;
    }
}

/// Draws, always the same of a seed (SplitMix64).
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ (value >> 31)) % end
    }
}

/// How a run is made.
#[derive(Clone, Debug)]
struct Setting {
    policy: IdlePolicyName,
    device_tokens: usize,
    host_tokens: u64,
    ttl_ms: u64,
    speculation: Speculation,
    seed: u64,
    /// Whether tenants have quotas.
    quotas: bool,
}

const TOKEN_BYTES: u64 = 4096;
const SESSIONS: u64 = 6;
const ROUNDS: usize = 40;

fn options(setting: &Setting, trace: &Path) -> SchedulerOptions {
    SchedulerOptions {
        restore_mode: RestoreMode::Planned,
        idle_policy: setting.policy,
        idle_ttl_ms: setting.ttl_ms,
        context_length: 4000,
        save_when_idle: true,
        speculation: setting.speculation,
        share_prefixes: true,
        host_budget_bytes: setting.host_tokens * TOKEN_BYTES,
        host_control: HostControl::default(),
        tenants: quotas(setting),
        step_seconds: 0.1,
        trace: Some(TraceOptions { file: trace.to_owned(), model: "simulated".to_owned() }),
    }
}

/// Half of the device for every tenant, and for one of them also half of host memory.
fn quotas(setting: &Setting) -> TenantQuotas {
    if !setting.quotas {
        return TenantQuotas::default();
    }
    let device_bytes = Some(setting.device_tokens as u64 * TOKEN_BYTES / 2);
    let host_bytes = Some(setting.host_tokens * TOKEN_BYTES / 2);
    let others = TenantQuota { device_bytes, ..TenantQuota::default() };
    TenantQuotas { named: [("a".to_owned(), TenantQuota { host_bytes, ..others })].into(), others }
}

fn machine(device_tokens: usize) -> Machine {
    Machine {
        device: DeviceCost { step: 8e-3, row: 1e-3, context: 1e-7, logits: 1e-3, copy_bytes_per_s: 4e9 },
        // About as fast as computing.
        disk: DiskCost { read_bytes_per_s: 6e6, write_bytes_per_s: 2e7, latency: 1e-3 },
        token_bytes: TOKEN_BYTES,
        device_tokens,
        step_rows: 256,
    }
}

struct Agents {
    simulation: Simulation,
    draws: Draws,
    ids: Vec<Arc<str>>,
    writing: Vec<(Arc<str>, UnboundedReceiver<GenerationEvent>)>,
    restores: Vec<oneshot::Receiver<Result<RestoreReport, Error>>>,
}

impl Agents {
    fn history(&mut self) -> Vec<u32> {
        // Many begin alike.
        let (common, own) = (100 + 64 * self.draws.below(3) as u32, 40 + self.draws.below(400) as u32);
        let salt = self.draws.below(1 << 20) as u32;
        (0..common).chain((0..own).map(|place| 1000 + salt * 512 + place)).collect()
    }

    fn is_writing(&self, id: &str) -> bool {
        self.writing.iter().any(|(writer, _)| &**writer == id)
    }

    fn open(&mut self) {
        let id: Arc<str> = format!("s{}", self.ids.len()).into();
        let tokens = self.history();
        match self.draws.below(3) {
            0 => self.simulation.open_with(&id, tokens, true),
            _ => {
                let tenant = Tenant::named([None, Some("a"), Some("b")][self.draws.below(3) as usize]);
                let reuse = [KvReuse::Exact, KvReuse::Approximate][self.draws.below(2) as usize];
                self.simulation.open(&id, OpenSession { tenant, reuse, ..OpenSession::default() });
                self.simulation.append(&id, tokens);
            }
        }
        self.ids.push(id);
    }

    fn act(&mut self) {
        let id = Arc::clone(&self.ids[self.draws.below(self.ids.len() as u64) as usize]);
        let session = Arc::clone(&id);
        match (self.draws.below(12), self.is_writing(&id)) {
            (0, true) => self.simulation.worker.command(Command::Cancel { session }),
            // Nobody listens any more.
            (1, true) => self.writing.retain(|(writer, _)| *writer != id),
            (_, true) => {}
            (0, _) => {
                let (reply, answer) = oneshot::channel();
                self.restores.push(answer);
                let mode = [RestoreMode::Planned, RestoreMode::Alternate, RestoreMode::Load]
                    [self.draws.below(3) as usize];
                self.simulation.worker.command(Command::Restore { session, mode, reply });
            }
            (1, _) => drop(self.restores.pop()),
            (2, _) => self.simulation.worker.command(Command::Evict { session, reply: oneshot::channel().0 }),
            (3, _) => {
                let target: Arc<str> = format!("s{}", self.ids.len()).into();
                self.ids.push(Arc::clone(&target));
                self.simulation.worker.command(Command::Fork {
                    source: session,
                    target,
                    reply: oneshot::channel().0,
                });
            }
            (4, _) => {
                let start = self.draws.below(300) as usize;
                let reply = oneshot::channel().0;
                self.simulation.worker.command(Command::Cut { session, start, end: start + 30, reply });
            }
            (5, _) if self.ids.len() as u64 > SESSIONS => self.simulation.close(&id),
            (6, _) => self.open(),
            _ => {
                let given = (0..10 + self.draws.below(60) as u32).map(|place| 7 + place % 5).collect();
                self.simulation.append(&id, given);
                let told = self.simulation.generate(&id, 1 + self.draws.below(24) as usize);
                self.writing.push((id, told));
            }
        }
    }

    /// Lets sessions rest whose messages ended.
    fn hear(&mut self) {
        let mut ended = Vec::new();
        for (id, told) in &mut self.writing {
            while let Ok(event) = told.try_recv() {
                if matches!(event, GenerationEvent::Done { .. } | GenerationEvent::Failed(_)) {
                    ended.push(Arc::clone(id));
                }
            }
        }
        self.writing.retain(|(id, _)| !ended.contains(id));
        for id in ended {
            let tool = ["read", "build", "ask"][self.draws.below(3) as usize];
            let declared_ms = (tool == "build").then_some(4000);
            self.simulation.rest(&id, RestReason::ToolCall { tool: tool.into(), declared_ms });
        }
    }
}

/// Runs agents while a trace is written; what was seen, and tokens that were reused when messages began.
fn recorded(setting: &Setting, trace: &Path) -> (Seen, u64) {
    let witness = Witness::default();
    let machine = machine(setting.device_tokens);
    let simulation = Simulation::new(&machine, options(setting, trace), Box::new(witness.clone())).unwrap();
    let draws = Draws(setting.seed);
    let mut agents = Agents { simulation, draws, ids: Vec::new(), writing: Vec::new(), restores: Vec::new() };
    agents.open();
    agents.open();
    for _ in 0..ROUNDS {
        agents.act();
        let until = agents.simulation.now() + Duration::from_millis(agents.draws.below(1500));
        while agents.simulation.now() < until {
            agents.simulation.step(Some(until));
            agents.hear();
        }
    }
    let reused = agents.simulation.device().tokens_reused;
    let seen = witness.0.lock().unwrap().clone();
    (seen, reused)
}

fn replayed(trace: &Path, what_if: WhatIf) -> Replay {
    replay(TraceReader::open(trace).unwrap(), what_if).unwrap()
}

fn setting(policy: IdlePolicyName, seed: u64) -> Setting {
    let speculation = Speculation::Always;
    Setting { policy, device_tokens: 900, host_tokens: 700, ttl_ms: 20_000, speculation, seed, quotas: false }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the policy, the budgets and what sessions do: the replay does what was done, and the counts are those that
    /// someone else saw.
    #[test]
    fn a_replay_does_exactly_what_was_recorded(
        policy in prop::sample::select(IdlePolicyName::ALL.to_vec()),
        device_tokens in 700_usize..4000,
        host_tokens in prop::sample::select(vec![0_u64, 64, 500, 4000]),
        ttl_ms in 300_u64..60_000,
        speculation in prop::sample::select(vec![Speculation::Off, Speculation::Auto, Speculation::Always]),
        seed: u64,
        quotas: bool,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let trace = directory.path().join("trace");
        let setting = Setting { policy, device_tokens, host_tokens, ttl_ms, speculation, seed, quotas };
        let (seen, reused) = recorded(&setting, &trace);
        let replay = replayed(&trace, WhatIf::default());
        prop_assert_eq!(&replay.divergence, &None);
        prop_assert_eq!(&replay.recorded, &replay.replayed);
        prop_assert_eq!(replay.end, TraceEnd::Stopped);
        let counts = &replay.replayed;
        prop_assert_eq!(counts.transitions, seen.transitions);
        prop_assert_eq!(&counts.evictions, &seen.evictions);
        prop_assert_eq!(counts.bytes_from_host, seen.bytes_from_host);
        prop_assert_eq!(counts.bytes_from_disk, seen.bytes_from_disk);
        prop_assert_eq!(counts.restored_recomputed_tokens, seen.recomputed);
        let hits = counts.device_hit_tokens + counts.host_hit_tokens + counts.disk_hit_tokens;
        prop_assert_eq!(hits, reused);
        prop_assert_eq!(hits + counts.computed_tokens, counts.input_tokens);
    }
}

#[test]
fn runs_are_of_all_kinds() {
    // Else the property above says little.
    let mut sum = Counts::default();
    for seed in 0..4 {
        let directory = tempfile::tempdir().unwrap();
        let trace = directory.path().join("trace");
        recorded(&setting(IdlePolicyName::Declared, seed), &trace);
        let counts = replayed(&trace, WhatIf::default()).replayed;
        for (reason, count) in counts.evictions {
            *sum.evictions.entry(reason).or_default() += count;
        }
        for (reason, count) in counts.restores {
            *sum.restores.entry(reason).or_default() += count;
        }
        sum.device_hit_tokens += counts.device_hit_tokens;
        sum.host_hit_tokens += counts.host_hit_tokens;
        sum.disk_hit_tokens += counts.disk_hit_tokens;
        sum.restored_recomputed_tokens += counts.restored_recomputed_tokens;
        sum.bytes_to_disk += counts.bytes_to_disk;
    }
    for reason in ["pressure", "command"] {
        assert!(sum.evictions.contains_key(reason), "{reason}: {sum:?}");
    }
    for reason in ["turn", "command", "prefetch"] {
        assert!(sum.restores.contains_key(reason), "{reason}: {sum:?}");
    }
    let all = [
        sum.device_hit_tokens,
        sum.host_hit_tokens,
        sum.disk_hit_tokens,
        sum.restored_recomputed_tokens,
        sum.bytes_to_disk,
    ];
    assert!(all.iter().all(|count| *count > 0), "{sum:?}");
}

#[test]
fn what_if_a_device_held_everything_nothing_would_have_left() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let setting = Setting { ttl_ms: u64::MAX, ..setting(IdlePolicyName::Lru, 3) };
    recorded(&setting, &trace);
    let roomy = WhatIf { device_budget_bytes: Some(60_000 * TOKEN_BYTES), ..WhatIf::default() };
    let replay = replayed(&trace, roomy);
    let (simulated, what_if) = (replay.simulated.unwrap(), replay.what_if.unwrap());
    assert!(simulated.counts.evictions.contains_key("pressure"), "{simulated:?}");
    assert!(!what_if.counts.evictions.contains_key("pressure"), "{what_if:?}");
    assert!(what_if.counts.device_hit_tokens > simulated.counts.device_hit_tokens);
    for run in [&simulated, &what_if] {
        assert_eq!((run.stuck, run.failed), (0, 0));
        // Messages that were cancelled before they began are over when they do.
        assert!(run.counts.messages.abs_diff(replay.recorded.messages) <= 4, "{run:?}");
    }
}

#[test]
fn every_policy_runs_and_drop_keeps_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    recorded(&setting(IdlePolicyName::ToolHistory, 5), &trace);
    for policy in IdlePolicyName::ALL {
        let what_if = replayed(&trace, WhatIf { policy: Some(policy), ..WhatIf::default() }).what_if.unwrap();
        assert_eq!((what_if.policy, what_if.stuck), (policy.as_str(), 0));
        let kept = what_if.counts.evicted() - what_if.counts.drops;
        assert_eq!(kept == 0, policy == IdlePolicyName::Drop, "{what_if:?}");
        assert_eq!(what_if.counts.bytes_to_disk == 0, policy == IdlePolicyName::Drop, "{what_if:?}");
    }
}

#[test]
fn a_budget_that_holds_nothing_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    recorded(&setting(IdlePolicyName::Lru, 1), &trace);
    let refused = |what_if| replay(TraceReader::open(&trace).unwrap(), what_if).unwrap_err().code;
    let device = WhatIf { device_budget_bytes: Some(1), ..WhatIf::default() };
    assert_eq!(refused(device), "device_budget_too_small");
    let host = WhatIf { host_budget_bytes: Some(1), ..WhatIf::default() };
    assert_eq!(refused(host), "host_budget_too_small");
}

#[test]
fn a_restore_that_is_refused_takes_nothing_from_the_one_under_way() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let setting = setting(IdlePolicyName::Lru, 9);
    let options = options(&setting, &trace);
    let mut simulation = Simulation::new(&machine(2000), options, Box::new(Witness::default())).unwrap();
    let id: Arc<str> = "s".into();
    simulation.open_with(&id, (0..1500).collect(), false);
    let answers = [(), ()].map(|()| {
        let (reply, answer) = oneshot::channel();
        let (session, mode) = (Arc::clone(&id), RestoreMode::Recompute);
        simulation.worker.command(Command::Restore { session, mode, reply });
        answer
    });
    while !simulation.is_resident(&id) {
        assert_ne!(simulation.step(None), Progress::Stuck);
    }
    drop(simulation);
    let [report, refused] = answers.map(|mut answer| answer.try_recv().unwrap());
    assert_eq!((report.unwrap().tokens_recomputed, &*refused.unwrap_err().code), (1500, "session_busy"));
    let replay = replayed(&trace, WhatIf::default());
    assert_eq!(replay.divergence, None);
    assert_eq!(replay.replayed.restored_recomputed_tokens, 1500);
}

#[test]
fn costs_that_the_traced_device_had_measured_are_those_of_the_replay() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    recorded(&setting(IdlePolicyName::Lru, 5), &trace);
    let mut kept = Costs::on("a device".to_owned(), None);
    (0..50).for_each(|_| kept.compute.observe(64, 4, 100.0, 1.0));
    let traced = TraceReader::open(&trace).unwrap().header().clone();
    let costs = Some(serde_json::to_vec(&kept).unwrap());
    let header = TraceHeader { device: "a device".to_owned(), costs, ..traced };
    let seconds = |costs: &Costs| costs.compute.seconds(64, 4, 100.0);
    assert_eq!(seconds(exact::Exact::new(&header).unwrap().costs()), seconds(&kept));
    assert_ne!(seconds(&kept), seconds(&Costs::default()));
}

/// What is wrong with the replay of a trace whose first record that `edit` changes was changed.
fn changed(edit: fn(&mut Record) -> bool) -> Divergence {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    recorded(&setting(IdlePolicyName::Lru, 2), &trace);
    let mut done = false;
    change(&trace, |record| done = done || edit(record));
    assert!(done, "nothing was changed");
    let replay = replayed(&trace, WhatIf::default());
    assert!(!replay.is_exact());
    replay.divergence.unwrap()
}

#[test]
fn a_trace_that_says_something_else_is_found() {
    let bytes = changed(|record| match record.effects.first_mut() {
        Some(Effect::Moved { bytes, .. }) => {
            *bytes += 1;
            true
        }
        _ => false,
    });
    assert!(bytes.what.contains("Moved"), "{bytes:?}");
    let saved = changed(|record| match &mut record.cause {
        Cause::Saved { refused: refused @ None } => {
            *refused = Some("full".to_owned());
            true
        }
        _ => false,
    });
    assert!(saved.what.contains("Saved"), "{saved:?}");
    let time = changed(|record| record.cause == Cause::Turn && record.told.times_ns.pop().is_some());
    assert!(time.what.contains("reads a time"), "{time:?}");
    let token = changed(|record| {
        let again = record.told.tokens.last().copied();
        record.told.tokens.extend(again);
        again.is_some()
    });
    assert!(token.what.contains("does not sample"), "{token:?}");
    let answer = changed(|record| {
        let asked = record.told.asked > 0;
        record.told.asked = 0;
        asked
    });
    assert!(answer.what.contains("asks the disk"), "{answer:?}");
}

#[test]
fn a_trace_with_another_policy_in_its_header_is_another_run() {
    // What proves that the counts come from the policy and not from the record.
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    recorded(&setting(IdlePolicyName::Declared, 4), &trace);
    let mut reader = TraceReader::open(&trace).unwrap();
    let mut header = reader.header().clone();
    "drop".clone_into(&mut header.options.idle_policy);
    assert!(read(&mut reader, &header, false).unwrap().divergence.is_some());
}
