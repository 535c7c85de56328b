//! Traces of live runs on a real model: their replay gives the counts that the run itself reported.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/server.rs"]
mod server;
mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kernels::backend::KvType;
use kernels::cpu::{CpuBackend, CpuOptions};
use serde_json::Value;
use session_runtime::engine::{self, EngineOptions};
use session_runtime::kv::state::KvState;
use session_runtime::models::progress::Silent;
use session_runtime::models::{self, Precision};
use session_runtime::restore::plan::RestoreMode;
use session_runtime::restore::report::RestoreReport;
use session_runtime::runtime::{STEP_ROWS, contract};
use session_runtime::scheduler::replay::{Replay, WhatIf, replay};
use session_runtime::scheduler::tenants::TenantQuotas;
use session_runtime::scheduler::trace::{TraceEnd, TraceOptions, TraceReader};
use session_runtime::scheduler::{
    GenerationEvent, GenerationRequest, HostControl, IdlePolicyName, KvObserver, KvTransition, OpenSession,
    RestReason, Scheduler, SchedulerOptions, Speculation,
};
use session_runtime::{Config, Runtime};
use support::{SECOND, config, create, say, story};
use tokio::sync::mpsc::unbounded_channel;

/// Bytes of a token's KV in the model of these tests.
const TOKEN_BYTES: u64 = 2 * 3 * 64 * 2 * 30;

fn replayed(trace: &Path, what_if: WhatIf) -> Replay {
    replay(TraceReader::open(trace).unwrap(), what_if).unwrap()
}

/// Sessions that talk in turns on a device that holds one of them, are forked, and are moved on command.
#[tokio::test(flavor = "multi_thread")]
async fn a_trace_gives_the_counts_of_the_sessions() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("live.trace");
    let runtime = Runtime::open(Config {
        device_budget_bytes: 900 * TOKEN_BYTES,
        host_budget_bytes: 400 * TOKEN_BYTES,
        share_prefixes: true,
        trace: Some(trace.clone()),
        ..config(&directory.path().join("data"))
    })
    .await
    .unwrap();
    let mut restores: Vec<RestoreReport> = Vec::new();
    for (id, salt) in [("a", 1), ("b", 2)] {
        create(&runtime, id).await;
        restores.extend(say(&runtime, id, &story(salt), 16).await.restores);
    }
    restores.extend(say(&runtime, "a", SECOND, 12).await.restores);
    runtime.fork_session("a", Some("c".to_owned()), None).await.unwrap();
    restores.extend(say(&runtime, "c", "And the fewest?", 8).await.restores);
    runtime.evict("c").await.unwrap();
    restores.push(runtime.restore("c", RestoreMode::Alternate).await.unwrap());
    restores.extend(say(&runtime, "b", SECOND, 12).await.restores);
    let mut transitions = Vec::new();
    for id in ["a", "b", "c"] {
        transitions.extend(runtime.transitions(id).await.unwrap().into_iter().map(|(_, _, change)| change));
    }
    let device = runtime.info().await.unwrap().device;
    runtime.shutdown().await.unwrap();

    let replay = replayed(&trace, WhatIf::default());
    assert_eq!((&replay.divergence, replay.end), (&None, TraceEnd::Stopped));
    assert_eq!(replay.recorded, replay.replayed);
    let counts = &replay.replayed;
    assert_eq!(counts.messages, 5);
    let left = |change: &&KvTransition| {
        matches!(change.to, KvState::Evicted | KvState::Lost)
            && !matches!(change.from, KvState::None | KvState::Restoring)
    };
    assert_eq!(counts.evicted(), transitions.iter().filter(left).count() as u64, "{transitions:?}");
    assert!(counts.evictions["pressure"] > 0 && counts.evictions["command"] == 1, "{counts:?}");
    assert_eq!(counts.restored(), restores.len() as u64);
    let sum = |of: fn(&RestoreReport) -> u64| restores.iter().map(of).sum::<u64>();
    assert_eq!(counts.bytes_from_host, sum(|report| report.from_host.bytes));
    assert_eq!(counts.bytes_from_disk, sum(|report| report.from_disk.bytes));
    assert_eq!(counts.restored_loaded_tokens, sum(|report| report.tokens_loaded));
    assert_eq!(counts.restored_mixed_tokens, sum(|report| report.tokens_mixed));
    assert_eq!(counts.restored_recomputed_tokens, sum(|report| report.tokens_recomputed));
    let hits = counts.device_hit_tokens + counts.host_hit_tokens + counts.disk_hit_tokens;
    assert_eq!(hits, device.tokens_reused);
    assert_eq!(replay.device_budget_bytes, device.pages_total * device.page_bytes);

    let lru = WhatIf { policy: Some(IdlePolicyName::Lru), ..WhatIf::default() };
    let what_if = replayed(&trace, lru).what_if.unwrap();
    assert_eq!((what_if.policy, what_if.counts.messages, what_if.stuck), ("lru", 5, 0));
}

/// What a run reported to someone who knows nothing of traces.
#[derive(Clone, Default)]
struct Witness(Arc<Mutex<(Vec<KvTransition>, Vec<RestoreReport>)>>);

impl KvObserver for Witness {
    fn transition(&self, _: &str, transition: &KvTransition) {
        self.0.lock().unwrap().0.push(transition.clone());
    }

    fn restored(&self, _: &str, report: &RestoreReport) {
        self.0.lock().unwrap().1.push(report.clone());
    }
}

fn scheduler(directory: &Path, trace: &Path, witness: Witness) -> Scheduler {
    let backend = Arc::new(CpuBackend::new(CpuOptions::default()).unwrap());
    let model = models::open_as(support::MODEL, Precision::default(), &Silent).unwrap();
    let contract = contract(&model, backend.as_ref(), KvType::F16, "");
    let (context_length, step_rows) = (2048, STEP_ROWS);
    let budget_bytes = 700 * TOKEN_BYTES;
    let options = EngineOptions { budget_bytes, context_length, step_rows, kv_type: KvType::F16 };
    let engine = engine::open(backend, &model, options, &Silent).unwrap();
    let store = store::Store::open(directory, store::StoreOptions::default()).unwrap();
    let options = SchedulerOptions {
        restore_mode: RestoreMode::Planned,
        idle_policy: IdlePolicyName::Declared,
        idle_ttl_ms: 600_000,
        context_length,
        save_when_idle: true,
        speculation: Speculation::Always,
        share_prefixes: true,
        host_budget_bytes: 300 * TOKEN_BYTES,
        host_control: HostControl::default(),
        tenants: TenantQuotas::default(),
        step_seconds: 0.15,
        trace: Some(TraceOptions { file: trace.to_owned(), model: support::MODEL.to_owned() }),
    };
    let clock = Arc::new(store::SystemClock::default());
    Scheduler::start(engine, store, contract, options, clock, Box::new(witness)).unwrap()
}

/// A message of so many tokens; with `patience`, nobody listens after that many.
async fn message(scheduler: &Scheduler, session: &Arc<str>, tokens: usize, patience: usize) {
    let (events, mut told) = unbounded_channel();
    let request = GenerationRequest { max_tokens: tokens, ..GenerationRequest::default() };
    scheduler.generate(session, request, events).unwrap();
    let mut heard = 0;
    while heard < patience
        && let Some(event) = told.recv().await
    {
        match event {
            GenerationEvent::Failed(error) => panic!("{error}"),
            GenerationEvent::Token { .. } => heard += 1,
            GenerationEvent::Started { .. } | GenerationEvent::Done { .. } => {}
        }
    }
}

/// Sessions at once, whose tools take different times; they are guessed for, cut, forked, cancelled and forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn a_trace_of_sessions_at_once_is_replayed_exactly() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("live.trace");
    let witness = Witness::default();
    let scheduler = Arc::new(scheduler(&directory.path().join("data"), &trace, witness.clone()));
    let agents = [(0, 30), (1, 250), (2, 90), (3, 400)].map(|(agent, tool_ms): (u32, u64)| {
        let scheduler = Arc::clone(&scheduler);
        tokio::spawn(async move {
            let session: Arc<str> = format!("agent-{agent}").into();
            scheduler.open(&session, OpenSession::default()).unwrap();
            // A common beginning, then words that come again, so that some of them are guessed.
            let own = (0..130).map(|place| 900 + agent * 40 + place % 20);
            scheduler.append(&session, (100..260).chain(own).collect()).unwrap();
            for turn in 0..4 {
                message(&scheduler, &session, 10, if turn == 2 && agent == 1 { 3 } else { usize::MAX }).await;
                let tool = format!("tool-{tool_ms}").into();
                let reason = RestReason::ToolCall { tool, declared_ms: Some(tool_ms) };
                scheduler.rest(&session, reason).unwrap();
                tokio::time::sleep(Duration::from_millis(tool_ms)).await;
                scheduler.append(&session, (500..530).map(|token| token + turn).collect()).unwrap();
            }
            session
        })
    });
    let mut sessions = Vec::new();
    for agent in agents {
        sessions.push(agent.await.unwrap());
    }
    let fork: Arc<str> = "fork".into();
    scheduler.fork(&sessions[0], &fork).await.unwrap();
    scheduler.cut(&sessions[0], 40, 90).await.unwrap();
    message(&scheduler, &sessions[0], 6, usize::MAX).await;
    message(&scheduler, &fork, 6, usize::MAX).await;
    // Busy, resident or gone: whatever it is answered is on record.
    for session in &sessions {
        let _ = scheduler.evict(session).await;
    }
    scheduler.restore(&sessions[2], RestoreMode::Load).await.unwrap();
    scheduler.close(&sessions[1]).unwrap();
    scheduler.settle().await.unwrap();
    let device = scheduler.device().await.unwrap();
    drop(scheduler);

    let replay = replayed(&trace, WhatIf::default());
    assert_eq!((&replay.divergence, replay.end), (&None, TraceEnd::Stopped));
    assert_eq!(replay.recorded, replay.replayed);
    let (transitions, restores) = witness.0.lock().unwrap().clone();
    let counts = &replay.replayed;
    assert_eq!(counts.transitions, transitions.len() as u64);
    assert_eq!((counts.messages, counts.restored()), (18, restores.len() as u64));
    assert_eq!(counts.bytes_from_disk, restores.iter().map(|report| report.from_disk.bytes).sum::<u64>());
    assert_eq!(counts.bytes_from_host, restores.iter().map(|report| report.from_host.bytes).sum::<u64>());
    let hits = counts.device_hit_tokens + counts.host_hit_tokens + counts.disk_hit_tokens;
    assert_eq!(hits, device.tokens_reused);
    assert!(counts.evicted() > 0 && counts.restored() > 0 && counts.bytes_to_disk > 0, "{counts:?}");
    assert!(device.tokens_guessed[0] > 0, "nothing was guessed");

    // A killed process leaves the same trace, cut off somewhere.
    let bytes = std::fs::read(&trace).unwrap();
    let torn = directory.path().join("torn.trace");
    std::fs::write(&torn, &bytes[..bytes.len() * 2 / 3]).unwrap();
    let cut = replayed(&torn, WhatIf::default());
    assert!(cut.is_exact() && cut.records < replay.records && cut.end != TraceEnd::Stopped, "{cut:?}");
    // What was said is not in it: neither as text nor as token ids.
    let ids: Vec<u8> = (100_u32..108).flat_map(u32::to_le_bytes).collect();
    assert!(!bytes.windows(ids.len()).any(|window| window == ids));
    let short: Vec<u8> = (100_u8..108).collect();
    assert!(!bytes.windows(short.len()).any(|window| window == short));
    for policy in IdlePolicyName::ALL {
        let what_if = replayed(&trace, WhatIf { policy: Some(policy), ..WhatIf::default() }).what_if.unwrap();
        assert_eq!((what_if.stuck, what_if.failed), (0, 0), "{policy}");
    }
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_session-runtime");

fn program(arguments: &[&str], data: &Path) -> Output {
    let mut command = Command::new(PROGRAM);
    command.env("SESSION_RUNTIME_MODEL", server::model()).env("SESSION_RUNTIME_DATA", data);
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

#[test]
fn the_program_writes_a_trace_and_replays_it() {
    let place = server::fresh_dir("trace");
    std::fs::create_dir_all(&place).unwrap();
    let (data, trace): (PathBuf, PathBuf) = (place.join("data"), place.join("t.trace"));
    let file = trace.to_str().unwrap();
    let run = ["run", "--trace", file, "--max-tokens", "6", "Say hello."];
    let first = program(&run, &data);
    assert!(first.status.success(), "{}", said(&first));
    let again = program(&run, &data);
    assert_eq!(again.status.code(), Some(1));
    assert!(said(&again).contains("exists already"), "{}", said(&again));

    let checked = program(&["replay", file, "--check"], &data);
    assert!(checked.status.success(), "{}", said(&checked));
    let text = said(&checked);
    assert!(text.contains("to its end") && text.contains("exactly what was recorded"), "{text}");
    let arguments = ["replay", file, "--json", "--policy", "lru", "--device-budget", "512MiB"];
    let asked = program(&arguments, &data);
    let report: Value = serde_json::from_slice(&asked.stdout).unwrap();
    assert_eq!((&report["recorded"], &report["divergence"]), (&report["replayed"], &Value::Null));
    assert_eq!((&report["recorded"]["messages"], &report["what_if"]["policy"]), (&1.into(), &"lru".into()));
    assert_eq!(report["what_if"]["counts"]["messages"], 1);

    let refused = program(&["replay", place.join("none").to_str().unwrap()], &data);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("cannot be read"), "{}", said(&refused));
    assert_eq!(program(&["replay", file, "--policy", "mru"], &data).status.code(), Some(2));
}
