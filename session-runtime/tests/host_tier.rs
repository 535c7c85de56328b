//! Host memory between the device and the disk: what comes back from it is what left, and every restore says where its cells
//! came from.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/checkpoints.rs"]
mod checkpoints;
mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use checkpoints::TinyCheckpoint;
use kernels::backend::KvType;
use session_runtime::kv::chunk::{cell_id, chunks};
use session_runtime::kv::state::KvState;
use session_runtime::models;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::restore::report::TierLoads;
use session_runtime::session::spec::TurnRequest;
use session_runtime::session::view::TurnStatus;
use session_runtime::{Config, Runtime};
use store::{CellId, Throttle, TierFault};
use support::{SECOND, control, create, say, story};

const THEN: &str = "Which night had the most lamps?";
const ROOM: u64 = 8 << 20;

fn first() -> String {
    (0..9).map(|day| format!("Day {day}: the keeper lit {} lamps by the sea at night. ", day * 3)).collect()
}

fn config(directory: &Path, model: &TinyCheckpoint, host_budget_bytes: u64) -> Config {
    Config {
        model: model.name(),
        device_budget_bytes: 1 << 20,
        host_budget_bytes,
        ..support::config(directory)
    }
}

/// A runtime with a session that was talked to once and evicted, and how many tokens left the device.
async fn evicted(config: Config) -> (Runtime, u64) {
    let runtime = Runtime::open(config).await.unwrap();
    create(&runtime, "s").await;
    say(&runtime, "s", &first(), 16).await;
    let known = runtime.kv("s").await.unwrap().resident_tokens;
    runtime.evict("s").await.unwrap();
    (runtime, known)
}

/// What a session says that never left the device, and its cells, saved only then.
async fn never_left(model: &TinyCheckpoint) -> (Vec<u32>, BTreeMap<CellId, Vec<u8>>) {
    let directory = tempfile::tempdir().unwrap();
    let runtime = Runtime::open(config(directory.path(), model, 0)).await.unwrap();
    create(&runtime, "s").await;
    say(&runtime, "s", &first(), 16).await;
    let cells = {
        runtime.fork_session("s", Some("f".into()), None).await.unwrap();
        runtime.evict("f").await.unwrap();
        cells(&runtime, "s").await
    };
    say(&runtime, "s", THEN, 24).await;
    (runtime.tokens("s").await.unwrap(), cells)
}

async fn contract(runtime: &Runtime) -> [u8; 32] {
    let hex = runtime.info().await.unwrap().contract;
    let bytes: Vec<u8> =
        (0..32).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// Ids of every cell that a session can have on disk.
async fn ids(runtime: &Runtime, session: &str) -> Vec<CellId> {
    let contract = contract(runtime).await;
    let tokens = runtime.tokens(session).await.unwrap();
    // The KV of the last tokens, which end the message, has not been computed.
    let mut ids: Vec<CellId> = (tokens.len() - 8..=tokens.len())
        .flat_map(|end| chunks(&contract, &tokens[..end]))
        .flat_map(|chunk| (0..8).map(move |layer| cell_id(&chunk.id, layer)))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

async fn cells(runtime: &Runtime, session: &str) -> BTreeMap<CellId, Vec<u8>> {
    let contract = contract(runtime).await;
    let get = |id| Some((id, runtime.store().cells().get(&id, &contract).ok()?));
    ids(runtime, session).await.into_iter().filter_map(get).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_host_memory_alone_brings_a_session_back_to_the_bit() {
    for name in ["llama", "gemma3"] {
        let model = TinyCheckpoint::new(name);
        let (tokens, expected) = never_left(&model).await;
        let directory = tempfile::tempdir().unwrap();
        let (runtime, known) = evicted(config(directory.path(), &model, ROOM)).await;
        let kv = runtime.kv("s").await.unwrap();
        let host = runtime.info().await.unwrap().host;
        assert_eq!((kv.host_tokens, kv.host_bytes), (known, host.bytes));
        assert!(host.bytes > 0 && host.budget == ROOM, "{host:?}");
        // The disk forgets everything, and gives nothing.
        runtime.store().cells().remove(&ids(&runtime, "s").await).unwrap();
        assert_eq!(runtime.store().cells().usage().cells, 0);
        runtime.store().cells().set_fault(TierFault::DropReads);
        let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
        assert_eq!((report.from_host.tokens, report.tokens_loaded, report.tokens), (known, known, known));
        assert_eq!(
            (report.from_host.cells, report.from_host.bytes),
            (report.cells_loaded, report.bytes_loaded)
        );
        assert_eq!(report.from_disk, TierLoads::default());
        assert!(report.refused.is_empty() && report.cells_recomputed == 0, "{report:?}");
        assert!(report.summary().contains(&format!("{known} from host")), "{}", report.summary());
        // What came from host memory is saved anew, bit by bit what it was.
        runtime.store().cells().set_fault(TierFault::None);
        runtime.evict("s").await.unwrap();
        let saved = cells(&runtime, "s").await;
        assert!(saved.len() as u64 >= report.cells_loaded, "{} of {report:?}", saved.len());
        for (id, bytes) in &saved {
            assert!(expected[id] == *bytes, "{name}");
        }
        say(&runtime, "s", THEN, 24).await;
        assert_eq!(runtime.tokens("s").await.unwrap(), tokens, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i10_what_host_memory_lacks_comes_from_disk_and_the_report_tells() {
    let model = TinyCheckpoint::new("llama");
    let (tokens, _) = never_left(&model).await;
    let token_bytes = models::open(&model.name()).unwrap().config.kv_token_bytes(KvType::F16) as u64;
    // None, fewer chunks than the session has, and all.
    for budget in [0, 200 * token_bytes, ROOM] {
        let directory = tempfile::tempdir().unwrap();
        let (runtime, known) = evicted(config(directory.path(), &model, budget)).await;
        let kv = runtime.kv("s").await.unwrap();
        let held = kv.host_tokens;
        assert_eq!(held * token_bytes, kv.host_bytes, "whole chunks are kept");
        assert_eq!((held == 0, held == known), (budget == 0, budget == ROOM), "{kv:?}");
        assert_eq!(kv.saved_tokens, known, "the disk has all of it in any case");
        let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
        assert_eq!((report.from_host.tokens, report.from_disk.tokens), (held, known - held), "{report:?}");
        assert_eq!(report.from_host.bytes, held * token_bytes);
        assert!(report.refused.is_empty());
        let host = runtime.info().await.unwrap().host;
        assert!(host.bytes <= budget && host.budget == budget, "{host:?}");
        say(&runtime, "s", THEN, 24).await;
        assert_eq!(runtime.tokens("s").await.unwrap(), tokens, "{budget}");
        // A new process finds nothing in host memory, and puts there what it brings from disk.
        runtime.shutdown().await.unwrap();
        let runtime = Runtime::open(config(directory.path(), &model, budget)).await.unwrap();
        let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
        assert_eq!(report.from_host, TierLoads::default());
        assert!(report.from_disk.cells > 0);
        let kv = runtime.kv("s").await.unwrap();
        assert_eq!(kv.host_tokens > 0, budget > 0, "{kv:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_what_host_memory_gives_broken_is_recomputed_by_name() {
    let model = TinyCheckpoint::new("gemma3");
    let (tokens, _) = never_left(&model).await;
    for (fault, reason) in [
        (TierFault::DropReads, "absent"),
        (TierFault::FlipBit, "corrupt"),
        (TierFault::Tear, "truncated"),
        (TierFault::Stale, "contract"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let (runtime, _) = evicted(config(directory.path(), &model, ROOM)).await;
        runtime.host_control().set_fault(fault);
        let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
        assert_eq!((report.cells_loaded, &*report.refused[0].reason), (0, reason), "{report:?}");
        assert!(report.cells_recomputed > 0);
        say(&runtime, "s", THEN, 24).await;
        assert_eq!(runtime.tokens("s").await.unwrap(), tokens, "{fault:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i4_a_slow_or_stuck_host_tier_is_left_for_the_disk_or_for_compute() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = Runtime::open(Config { host_budget_bytes: 64 << 20, ..support::config(directory.path()) })
        .await
        .unwrap();
    create(&runtime, "s").await;
    say(&runtime, "s", &story(1), 16).await;
    runtime.evict("s").await.unwrap();
    // Known to be slow: what the disk has too comes from there.
    let control = runtime.host_control();
    control.set_throttle(Throttle { bytes_per_s: Some(1), latency: Duration::ZERO });
    let report = runtime.restore("s", RestoreMode::Planned).await.unwrap();
    assert_eq!(report.from_host, TierLoads::default(), "{report:?}");
    assert!(report.from_disk.cells > 0 && report.refused.is_empty(), "{report:?}");
    runtime.evict("s").await.unwrap();
    // Found to be stuck on the way.
    control.set_throttle(Throttle::default());
    control.set_fault(TierFault::DelayReads(Duration::from_secs(3600)));
    let turn = say(&runtime, "s", SECOND, 24).await;
    let report = &turn.restores[0];
    assert_eq!(report.cells_loaded, 0, "{report:?}");
    assert!(report.refused.iter().any(|refusal| refusal.reason == "slow"), "{report:?}");
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}

/// Waits until the session's KV is in a state.
async fn reach(runtime: &Runtime, state: KvState) {
    loop {
        let seen = runtime.session("s").await.unwrap().last_event;
        if runtime.kv("s").await.unwrap().state == state {
            return;
        }
        runtime.wait_events("s", seen).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i9_a_forced_load_from_a_stuck_host_tier_waits_and_can_be_left() {
    let model = TinyCheckpoint::new("llama");
    let directory = tempfile::tempdir().unwrap();
    let forced = Config { restore_mode: RestoreMode::Load, ..config(directory.path(), &model, ROOM) };
    let (runtime, known) = evicted(forced).await;
    let stuck = TierFault::DelayReads(Duration::MAX);
    runtime.host_control().set_fault(stuck);
    // A command whose caller goes away.
    let waiting = {
        let runtime = runtime.clone();
        tokio::spawn(async move { runtime.restore("s", RestoreMode::Load).await })
    };
    reach(&runtime, KvState::Restoring).await;
    waiting.abort();
    reach(&runtime, KvState::Evicted).await;
    // A turn that is cancelled.
    let request = TurnRequest { input: THEN.to_owned(), ..TurnRequest::default() };
    let turn = runtime.start_turn("s", request).await.unwrap();
    reach(&runtime, KvState::Restoring).await;
    runtime.cancel_turn("s", &turn.id).await.unwrap();
    assert_eq!(runtime.wait_turn("s", &turn.id).await.unwrap().status, TurnStatus::Cancelled);
    reach(&runtime, KvState::Evicted).await;
    runtime.host_control().set_fault(TierFault::None);
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    assert_eq!(report.from_host.tokens, known, "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_cells_of_forks_take_room_once() {
    let model = TinyCheckpoint::new("llama");
    let directory = tempfile::tempdir().unwrap();
    let (runtime, known) = evicted(config(directory.path(), &model, ROOM)).await;
    let before = runtime.info().await.unwrap().host;
    runtime.fork_session("s", Some("f".into()), None).await.unwrap();
    for id in ["s", "f"] {
        runtime.restore(id, RestoreMode::Load).await.unwrap();
    }
    for id in ["s", "f"] {
        runtime.evict(id).await.unwrap();
        let kv = runtime.kv(id).await.unwrap();
        assert_eq!((kv.host_tokens, kv.host_bytes), (known, before.bytes));
    }
    assert_eq!(runtime.info().await.unwrap().host, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_session_begins_with_what_only_host_memory_has_of_another() {
    let model = TinyCheckpoint::new("llama");
    let other_end = format!("{} And what became of the keeper?", first());
    let mut written = Vec::new();
    for share_prefixes in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let config = Config { share_prefixes, disk_quota_bytes: 0, ..config(directory.path(), &model, ROOM) };
        let (runtime, _) = evicted(config).await;
        create(&runtime, "t").await;
        let turn = say(&runtime, "t", &other_end, 24).await;
        let shared = turn.restores.first().map_or(0, |report| report.from_host.tokens);
        assert_eq!(shared >= 192, share_prefixes, "{:?}", turn.restores);
        written.push(runtime.tokens("t").await.unwrap());
    }
    assert_eq!(written[0], written[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn budgets_that_make_no_sense_are_refused_with_the_fix() {
    let model = TinyCheckpoint::new("llama");
    let directory = tempfile::tempdir().unwrap();
    for (budget, code) in [(1000, "host_budget_too_small"), (u64::MAX, "out_of_memory")] {
        let error = Runtime::open(config(directory.path(), &model, budget)).await.err().unwrap();
        assert_eq!(error.code, code);
        assert!(error.message.contains("host budget") && error.message.contains('0'), "{error}");
    }
    let still = Config {
        host_throttle: session_runtime::config::Throttle { bytes_per_s: Some(0), latency: Duration::ZERO },
        ..config(directory.path(), &model, 0)
    };
    assert_eq!(Runtime::open(still).await.err().unwrap().code, "config_invalid");
}
