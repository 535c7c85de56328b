//! What becomes of sessions when tiers fail: each outcome has a name, nobody hangs, and the tokens are those of a session that
//! never left the device. A budget smaller than one session is in `pressure.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/checkpoints.rs"]
mod checkpoints;
mod support;
#[path = "support/troubled_disk.rs"]
mod troubled_disk;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use checkpoints::TinyCheckpoint;
use session_runtime::kv::state::KvState;
use session_runtime::models::progress::Silent;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::restore::report::RestoreReport;
use session_runtime::seams::Seams;
use session_runtime::session::spec::TurnRequest;
use session_runtime::session::view::TurnStatus;
use session_runtime::{Config, Runtime};
use store::{DiskFault, DiskOp, FaultEffect, FaultyDisk, ManualClock, RealDisk, Throttle, TierFault};
use support::{SECOND, control, create, say, story};
use troubled_disk::{Trouble, TroubledDisk};

const THEN: &str = "Which night had the most lamps?";
const ROOM: u64 = 8 << 20;

fn first() -> String {
    (0..9).map(|day| format!("Day {day}: the keeper lit {} lamps by the sea at night. ", day * 3)).collect()
}

fn config(directory: &Path, model: &TinyCheckpoint) -> Config {
    Config { model: model.name(), device_budget_bytes: 1 << 20, ..support::config(directory) }
}

async fn open_on(config: Config, seams: Seams) -> Runtime {
    Runtime::open_on(config, seams, Arc::new(Silent)).await.unwrap()
}

async fn talked(runtime: &Runtime, session: &str) {
    create(runtime, session).await;
    say(runtime, session, &first(), 16).await;
}

/// What a session says that never left the device.
async fn never_left(model: &TinyCheckpoint) -> Vec<u32> {
    let directory = tempfile::tempdir().unwrap();
    let runtime = Runtime::open(config(directory.path(), model)).await.unwrap();
    talked(&runtime, "s").await;
    say(&runtime, "s", THEN, 24).await;
    runtime.tokens("s").await.unwrap()
}

fn refused_for(report: &RestoreReport, reason: &str) -> bool {
    report.refused.iter().any(|refusal| refusal.reason == reason)
}

/// A disk that takes nothing: what leaves the device is in host memory, or is recomputed.
#[tokio::test(flavor = "multi_thread")]
async fn i2_what_a_full_or_forbidden_disk_refuses_is_in_host_memory_or_recomputed() {
    let model = TinyCheckpoint::new("llama");
    let expected = never_left(&model).await;
    for trouble in [Trouble::Full, Trouble::Denied, Trouble::Broken] {
        for host_budget_bytes in [0, ROOM] {
            let directory = tempfile::tempdir().unwrap();
            let disk = TroubledDisk::default();
            let seams = Seams { disk: Arc::new(disk.clone()), ..Seams::default() };
            let config = || Config { host_budget_bytes, ..config(directory.path(), &model) };
            let runtime = open_on(config(), seams).await;
            disk.set(trouble);
            talked(&runtime, "s").await;
            let change = runtime.evict("s").await.unwrap();
            assert_eq!(change.to, KvState::Evicted);
            let kv = runtime.kv("s").await.unwrap();
            assert_eq!((kv.saved_tokens, kv.host_tokens > 0), (0, host_budget_bytes > 0), "{kv:?}");
            assert!(runtime.store().cells().usage().refused > 0, "{trouble:?}");
            assert_eq!(runtime.poisoned(), None, "only copies are concerned");
            let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
            assert_eq!(report.from_disk.cells, 0);
            if host_budget_bytes > 0 {
                assert_eq!(report.from_host.tokens, report.tokens, "{report:?}");
            } else {
                assert!(refused_for(&report, "absent") && report.cells_loaded == 0, "{report:?}");
            }
            // Once the disk takes cells again, they are saved with the next rest.
            disk.set(Trouble::None);
            say(&runtime, "s", THEN, 24).await;
            assert_eq!(runtime.tokens("s").await.unwrap(), expected, "{trouble:?}");
            runtime.evict("s").await.unwrap();
            let kv = runtime.kv("s").await.unwrap();
            assert_eq!(kv.saved_tokens, runtime.restore("s", RestoreMode::Load).await.unwrap().tokens);
            runtime.shutdown().await.unwrap();
            let runtime = Runtime::open(config()).await.unwrap();
            let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
            assert!(report.from_disk.cells > 0, "{report:?}");
        }
    }
}

/// What the disk refused while a session rested is tried again when it leaves the device.
#[tokio::test(flavor = "multi_thread")]
async fn what_could_not_be_saved_is_saved_on_eviction() {
    let model = TinyCheckpoint::new("llama");
    let directory = tempfile::tempdir().unwrap();
    let disk = TroubledDisk::default();
    let seams = Seams { disk: Arc::new(disk.clone()), ..Seams::default() };
    let runtime = open_on(config(directory.path(), &model), seams).await;
    disk.set(Trouble::Full);
    for id in ["s", "t"] {
        talked(&runtime, id).await;
    }
    // An eviction is answered when the disk has answered for everything before it.
    runtime.evict("t").await.unwrap();
    assert!(runtime.store().cells().usage().refused > 0);
    disk.set(Trouble::None);
    let kv = runtime.kv("s").await.unwrap();
    assert_eq!((kv.state, kv.saved_tokens), (KvState::Idle, 0));
    runtime.evict("s").await.unwrap();
    assert_eq!(runtime.kv("s").await.unwrap().saved_tokens, kv.resident_tokens);
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    assert_eq!((report.tokens_loaded, report.cells_refused()), (kv.resident_tokens, 0), "{report:?}");
}

/// What was saved cannot be read any more.
#[tokio::test(flavor = "multi_thread")]
async fn i2_cells_that_cannot_be_read_are_recomputed_by_name() {
    let model = TinyCheckpoint::new("gemma3");
    let expected = never_left(&model).await;
    for trouble in [Trouble::Denied, Trouble::Broken] {
        let directory = tempfile::tempdir().unwrap();
        let disk = TroubledDisk::default();
        let seams = Seams { disk: Arc::new(disk.clone()), ..Seams::default() };
        let runtime = open_on(config(directory.path(), &model), seams).await;
        talked(&runtime, "s").await;
        runtime.evict("s").await.unwrap();
        disk.set(trouble);
        let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
        assert!(refused_for(&report, "io") && report.cells_loaded == 0, "{report:?}");
        say(&runtime, "s", THEN, 24).await;
        assert_eq!(runtime.tokens("s").await.unwrap(), expected, "{trouble:?}");
        // A cell that could not be read is not taken for damaged.
        assert_eq!(runtime.store().cells().usage().damaged, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_a_tier_directory_that_is_removed_takes_no_token_with_it() {
    let model = TinyCheckpoint::new("llama");
    let expected = never_left(&model).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = Runtime::open(config(directory.path(), &model)).await.unwrap();
    talked(&runtime, "s").await;
    talked(&runtime, "t").await;
    runtime.evict("s").await.unwrap();
    std::fs::remove_dir_all(directory.path().join("packs")).unwrap();
    // Files that are open can still be read and written; the others cannot.
    for id in ["s", "t"] {
        say(&runtime, id, THEN, 24).await;
        assert_eq!(runtime.tokens(id).await.unwrap(), expected);
        runtime.evict(id).await.unwrap();
    }
    assert_eq!(runtime.poisoned(), None);
    runtime.shutdown().await.unwrap();
    // The next process finds no cells, says so, and goes on.
    let runtime = Runtime::open(config(directory.path(), &model)).await.unwrap();
    let recovery = runtime.info().await.unwrap().recovery;
    assert!(recovery.iter().any(|line| line.contains("will be recomputed")), "{recovery:?}");
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    assert!(refused_for(&report, "absent") && report.cells_loaded == 0, "{report:?}");
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
    runtime.evict("s").await.unwrap();
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    assert_eq!(report.tokens_loaded, report.tokens, "and saves anew: {report:?}");
}

/// The journal is what counts: without room for it nothing is acknowledged, and that has a name.
#[tokio::test(flavor = "multi_thread")]
async fn i6_a_disk_without_room_for_the_journal_stops_turns_by_name() {
    let model = TinyCheckpoint::new("llama");
    let expected = never_left(&model).await;
    let directory = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new(Arc::new(RealDisk));
    let seams = Seams { disk: Arc::new(disk.clone()), ..Seams::default() };
    let runtime = open_on(config(directory.path(), &model), seams).await;
    talked(&runtime, "s").await;
    let before = runtime.tokens("s").await.unwrap();
    let nth = disk.count(DiskOp::Write) + 1;
    disk.plan(DiskFault { on: DiskOp::Write, nth, effect: FaultEffect::Errno(28), repeat: true });
    let request = TurnRequest { input: THEN.to_owned(), ..TurnRequest::default() };
    let error = match runtime.start_turn("s", request).await {
        Err(error) => error,
        Ok(turn) => runtime.wait_turn("s", &turn.id).await.unwrap_err(),
    };
    assert_eq!(error.code, "store_unavailable", "{error}");
    assert!(runtime.poisoned().is_some());
    drop(runtime.shutdown().await);
    disk.clear();
    // Everything that was acknowledged is there.
    let runtime = Runtime::open(config(directory.path(), &model)).await.unwrap();
    assert_eq!(runtime.tokens("s").await.unwrap(), before);
    say(&runtime, "s", THEN, 24).await;
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_without_any_room_below_the_device_everything_is_recomputed() {
    let model = TinyCheckpoint::new("llama");
    let expected = never_left(&model).await;
    let directory = tempfile::tempdir().unwrap();
    let none = Config { disk_quota_bytes: 0, host_budget_bytes: 0, ..config(directory.path(), &model) };
    let runtime = Runtime::open(none).await.unwrap();
    talked(&runtime, "s").await;
    runtime.evict("s").await.unwrap();
    let kv = runtime.kv("s").await.unwrap();
    assert_eq!((kv.saved_tokens, kv.host_tokens, kv.host_bytes), (0, 0, 0));
    let turn = say(&runtime, "s", THEN, 24).await;
    let report = &turn.restores[0];
    assert!(refused_for(report, "absent") && report.tokens_recomputed == report.tokens, "{report:?}");
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
    let info = runtime.info().await.unwrap();
    assert_eq!((info.disk.cells, info.host.cells, info.host.budget), (0, 0, 0));
}

/// Throttled to a crawl, or with an endless wait before each read: a planned restore leaves both to compute.
#[tokio::test(flavor = "multi_thread")]
async fn i4_a_slow_disk_is_left_to_compute() {
    let expected = control(1).await;
    for throttle in [
        Throttle { bytes_per_s: Some(1), latency: Duration::ZERO },
        Throttle { bytes_per_s: None, latency: Duration::from_secs(3600) },
    ] {
        let directory = tempfile::tempdir().unwrap();
        // Writes are throttled too: nothing is saved unasked.
        let config = Config { save_when_idle: false, ..support::config(directory.path()) };
        let runtime = Runtime::open(config).await.unwrap();
        create(&runtime, "s").await;
        say(&runtime, "s", &story(1), 16).await;
        runtime.evict("s").await.unwrap();
        runtime.store().cells().set_throttle(throttle);
        let turn = say(&runtime, "s", SECOND, 24).await;
        let report = &turn.restores[0];
        assert_eq!(report.cells_loaded, 0, "{throttle:?}: {report:?}");
        assert_eq!(runtime.tokens("s").await.unwrap(), expected);
    }
}

/// Waits until a session's KV is in a state.
async fn reach(runtime: &Runtime, session: &str, state: KvState) {
    loop {
        let seen = runtime.session(session).await.unwrap().last_event;
        if runtime.kv(session).await.unwrap().state == state {
            return;
        }
        runtime.wait_events(session, seen).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i9_a_forced_load_from_a_stuck_disk_waits_alone_and_can_be_left() {
    let model = TinyCheckpoint::new("llama");
    let expected = never_left(&model).await;
    let directory = tempfile::tempdir().unwrap();
    let forced = Config { restore_mode: RestoreMode::Load, ..config(directory.path(), &model) };
    let runtime = Runtime::open(forced).await.unwrap();
    talked(&runtime, "s").await;
    runtime.evict("s").await.unwrap();
    runtime.store().cells().set_fault(TierFault::DelayReads(Duration::MAX));
    let request = TurnRequest { input: THEN.to_owned(), ..TurnRequest::default() };
    let turn = runtime.start_turn("s", request).await.unwrap();
    reach(&runtime, "s", KvState::Restoring).await;
    assert!(runtime.store().leases().count() > 0, "its cells are kept for it");
    // Others go on, and what they save is written.
    talked(&runtime, "t").await;
    say(&runtime, "t", THEN, 24).await;
    assert_eq!(runtime.tokens("t").await.unwrap(), expected);
    let resident = runtime.kv("t").await.unwrap().resident_tokens;
    runtime.evict("t").await.unwrap();
    assert_eq!(runtime.kv("t").await.unwrap().saved_tokens, resident);
    runtime.cancel_turn("s", &turn.id).await.unwrap();
    assert_eq!(runtime.wait_turn("s", &turn.id).await.unwrap().status, TurnStatus::Cancelled);
    // So can a command, whose caller goes away.
    let waiting = {
        let runtime = runtime.clone();
        tokio::spawn(async move { runtime.restore("s", RestoreMode::Load).await })
    };
    reach(&runtime, "s", KvState::Restoring).await;
    waiting.abort();
    reach(&runtime, "s", KvState::Evicted).await;
    runtime.info().await.unwrap();
    assert_eq!(runtime.store().leases().count(), 0, "nothing is kept for a restore that is over");
    runtime.store().cells().set_fault(TierFault::None);
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    assert!(report.from_disk.cells > 0 && report.refused.is_empty(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_clocks_that_jump_evict_nothing_early_and_lose_nothing() {
    let model = TinyCheckpoint::new("llama");
    let expected = never_left(&model).await;
    let directory = tempfile::tempdir().unwrap();
    let start = 1_700_000_000_000;
    let clock = Arc::new(ManualClock::new(start));
    let seams = Seams { clock: Arc::<ManualClock>::clone(&clock), ..Seams::default() };
    let ttl = Duration::from_secs(60);
    let runtime = open_on(Config { idle_ttl: ttl, ..config(directory.path(), &model) }, seams).await;
    talked(&runtime, "s").await;
    talked(&runtime, "t").await;
    // The wall clock goes to 1970 and to the year 2500; the soft TTL goes by the other one.
    for wall in [0, 16_725_225_600_000, start] {
        clock.set_wall(wall);
        say(&runtime, "t", "And then?", 4).await;
        assert_eq!(runtime.kv("s").await.unwrap().state, KvState::Idle, "at {wall}");
    }
    // A machine that slept for a year: the TTL has passed once, and the session comes back as it was.
    clock.advance(365 * 86_400_000);
    reach(&runtime, "s", KvState::Evicted).await;
    // The journal has it a moment later.
    let change = loop {
        let (_, _, change) = runtime.transitions("s").await.unwrap().pop().unwrap();
        if change.to == KvState::Evicted {
            break change;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!(change.reason, "ttl");
    say(&runtime, "s", THEN, 24).await;
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}
