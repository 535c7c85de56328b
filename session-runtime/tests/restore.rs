//! Evicted and restored sessions continue exactly, and every restore says what it did.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/checkpoints.rs"]
mod checkpoints;
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use checkpoints::TinyCheckpoint;
use kernels::backend::KvType;
use session_runtime::kv::state::KvState;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::restore::report::RestoreReport;
use session_runtime::{Config, Runtime};
use support::{SECOND, config, control, create, open, say, story};

/// A runtime with a session that was talked to once and evicted.
async fn evicted(directory: &Path) -> Runtime {
    let runtime = open(directory).await;
    create(&runtime, "s").await;
    say(&runtime, "s", &story(1), 16).await;
    let transition = runtime.evict("s").await.unwrap();
    assert_eq!((transition.from, transition.to), (KvState::Idle, KvState::Evicted));
    assert_eq!(runtime.kv("s").await.unwrap().resident_tokens, 0);
    runtime
}

async fn reopen(runtime: Runtime, config: Config) -> Runtime {
    runtime.shutdown().await.unwrap();
    Runtime::open(config).await.unwrap()
}

/// Every cell is either loaded or recomputed, and the report's tokens add up.
fn check(report: &RestoreReport) {
    let chunks = report.plan.len() as u64;
    assert_eq!(report.cells_loaded + report.cells_recomputed, chunks * u64::from(report.layers));
    let parts =
        report.tokens_resident + report.tokens_loaded + report.tokens_mixed + report.tokens_recomputed;
    assert_eq!(report.tokens, parts);
}

fn packs(directory: &Path) -> Vec<PathBuf> {
    fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "pack") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(directory, &mut found);
    assert!(!found.is_empty(), "there are no packs under {}", directory.display());
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn i10_saved_tokens_are_those_that_a_restore_loads() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    create(&runtime, "s").await;
    say(&runtime, "s", &story(1), 16).await;
    let resident = runtime.kv("s").await.unwrap().resident_tokens;
    assert_ne!(resident % 64, 0, "the last chunk is not sealed");
    runtime.evict("s").await.unwrap();
    assert_eq!(runtime.kv("s").await.unwrap().saved_tokens, resident);
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    assert_eq!(report.tokens_loaded, resident);
    runtime.evict("s").await.unwrap();
    // After a restart the sealed chunks are found again.
    let runtime = reopen(runtime, config(directory.path())).await;
    assert_eq!(runtime.kv("s").await.unwrap().saved_tokens, resident / 64 * 64);
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_session_restored_by_any_cut_continues_with_the_same_tokens() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    let modes = [
        RestoreMode::Load,
        RestoreMode::Recompute,
        RestoreMode::Cut(7),
        RestoreMode::Alternate,
        RestoreMode::Planned,
    ];
    for (index, mode) in modes.into_iter().enumerate() {
        let name = format!("fork-{index}");
        runtime.fork_session("s", Some(name.clone()), None).await.unwrap();
        let report = runtime.restore(&name, mode).await.unwrap();
        check(&report);
        match mode {
            RestoreMode::Load => assert_eq!(report.cells_recomputed, 0, "{report:?}"),
            RestoreMode::Recompute => assert_eq!(report.cells_loaded, 0, "{report:?}"),
            RestoreMode::Cut(cut) => {
                assert_eq!(report.cells_recomputed, u64::from(cut) * report.plan.len() as u64);
            }
            _ => {}
        }
        say(&runtime, &name, SECOND, 24).await;
        assert_eq!(runtime.tokens(&name).await.unwrap(), expected, "restored by {mode}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i10_what_was_restored_is_what_the_next_turn_reuses() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    check(&report);
    let kv = runtime.kv("s").await.unwrap();
    assert_eq!(kv.state, KvState::Restored);
    assert_eq!(kv.resident_tokens, report.tokens);
    assert_eq!(kv.last_restore.as_ref(), Some(&report));
    let turn = say(&runtime, "s", SECOND, 4).await;
    assert_eq!(turn.usage.cached_tokens, report.tokens, "the next turn reuses what was restored");
    let events = runtime.events("s", 0, 10_000).await.unwrap();
    let journaled = events.iter().find(|event| event.kind == "kv.restore").unwrap();
    let journaled: RestoreReport =
        serde_json::from_value(serde_json::Value::Object(journaled.data.clone())).unwrap();
    assert_eq!(journaled, report, "journal and API tell the same");
    // The KV comes to rest beside the turn's end, not before it.
    loop {
        // Read before the look: what comes in between ends the wait.
        let seen = runtime.session("s").await.unwrap().last_event;
        if runtime.transitions("s").await.unwrap().len() >= 7 {
            break;
        }
        runtime.wait_events("s", seen).await.unwrap();
    }
    let moves: Vec<_> = runtime
        .transitions("s")
        .await
        .unwrap()
        .into_iter()
        .map(|(_, _, change)| (change.from, change.to))
        .collect();
    use KvState::{Active, Evicted, Idle, None, Restored, Restoring};
    assert_eq!(
        moves,
        [
            (None, Active),
            (Active, Idle),
            (Idle, Evicted),
            (Evicted, Restoring),
            (Restoring, Restored),
            (Restored, Active),
            (Active, Idle)
        ]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_restarted_runtime_continues_with_the_same_tokens() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    let runtime = reopen(runtime, config(directory.path())).await;
    let kv = runtime.kv("s").await.unwrap();
    assert_eq!(kv.state, KvState::Evicted);
    let turn = say(&runtime, "s", SECOND, 24).await;
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
    assert!(turn.restores[0].tokens_loaded > 0, "{:?}", turn.restores);
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_lost_packs_are_recomputed() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    for pack in packs(directory.path()) {
        fs::remove_file(pack).unwrap();
    }
    let turn = say(&runtime, "s", SECOND, 24).await;
    let report = &turn.restores[0];
    check(report);
    assert_eq!(report.cells_loaded, 0);
    assert!(report.cells_refused() > 0, "the report says what was missing: {report:?}");
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_a_flipped_bit_is_refused_by_name_and_recomputed() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    for pack in packs(directory.path()) {
        let mut bytes = fs::read(&pack).unwrap();
        // The middle of a file of many cells lies in some payload or header.
        let middle = bytes.len() / 2;
        for at in [middle, middle + 100_000] {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 0x10;
            }
        }
        fs::write(&pack, bytes).unwrap();
    }
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    check(&report);
    assert!(report.refused.iter().any(|refusal| refusal.reason == "corrupt"), "{report:?}");
    say(&runtime, "s", SECOND, 24).await;
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_a_truncated_pack_is_recomputed() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    for pack in packs(directory.path()) {
        let file = fs::OpenOptions::new().write(true).open(&pack).unwrap();
        let length = file.metadata().unwrap().len();
        file.set_len(length / 3).unwrap();
    }
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    check(&report);
    assert!(report.cells_refused() > 0, "{report:?}");
    say(&runtime, "s", SECOND, 24).await;
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn i3_cells_of_another_contract_are_refused_by_the_field() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    let other = Config { tenant_salt: "another".to_owned(), ..config(directory.path()) };
    let runtime = reopen(runtime, other).await;
    assert_eq!(runtime.kv("s").await.unwrap().state, KvState::Stale);
    let turn = say(&runtime, "s", SECOND, 24).await;
    let report = &turn.restores[0];
    check(report);
    assert_eq!(report.cells_loaded, 0);
    assert_eq!(report.refused[0].reason, "contract: tenant_salt");
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_kv_of_every_type_comes_back_as_it_was_and_is_not_taken_for_f16() {
    for kv_type in [KvType::F32, KvType::Int8] {
        let directory = tempfile::tempdir().unwrap();
        let of_type = || Config { kv_type, ..config(directory.path()) };
        let runtime = Runtime::open(of_type()).await.unwrap();
        for id in ["s", "control"] {
            create(&runtime, id).await;
            say(&runtime, id, &story(1), 16).await;
        }
        say(&runtime, "control", SECOND, 24).await;
        runtime.evict("s").await.unwrap();
        let runtime = reopen(runtime, of_type()).await;
        let report = runtime.restore("s", RestoreMode::Cut(7)).await.unwrap();
        check(&report);
        assert!(report.cells_loaded > 0 && report.cells_recomputed > 0, "{report:?}");
        say(&runtime, "s", SECOND, 24).await;
        assert_eq!(runtime.tokens("s").await.unwrap(), runtime.tokens("control").await.unwrap());
        runtime.evict("s").await.unwrap();
        let runtime = reopen(runtime, config(directory.path())).await;
        let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
        assert_eq!((report.cells_loaded, &*report.refused[0].reason), (0, "contract: kv_layout"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i3_a_session_of_another_tokenizer_is_refused_by_the_field() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    let other = Config { model: "qwen2.5-coder-0.5b".to_owned(), ..config(directory.path()) };
    let runtime = reopen(runtime, other).await;
    let error =
        runtime.start_turn("s", session_runtime::session::spec::TurnRequest::default()).await.unwrap_err();
    assert_eq!(error.code, "contract_mismatch");
    assert!(error.message.contains("tokenizer_digest"), "{error}");
    assert_eq!(runtime.session("s").await.unwrap().turns, 1, "nothing is lost");
}

/// Both checkpoints have one tokenizer: the tokens go on under the other weights, the KV does not.
#[tokio::test(flavor = "multi_thread")]
async fn i3_kv_of_other_weights_is_refused_by_the_fields_and_recomputed() {
    let (first, second) = (TinyCheckpoint::new("qwen2"), TinyCheckpoint::new("qwen3"));
    let directory = tempfile::tempdir().unwrap();
    let with = |checkpoint: &TinyCheckpoint| Config { model: checkpoint.name(), ..config(directory.path()) };
    let runtime = Runtime::open(with(&first)).await.unwrap();
    create(&runtime, "s").await;
    say(&runtime, "s", "The sea at night.", 200).await;
    for fork in ["control", "first"] {
        runtime.fork_session("s", Some(fork.into()), None).await.unwrap();
    }
    say(&runtime, "first", SECOND, 24).await;
    let under_first = runtime.tokens("first").await.unwrap();
    runtime.evict("s").await.unwrap();
    let runtime = reopen(runtime, with(&second)).await;
    let before = runtime.session("s").await.unwrap();
    assert_eq!((before.model, before.kv.state), (first.name(), KvState::Stale));
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    check(&report);
    assert_eq!(report.cells_loaded, 0);
    let reason = &*report.refused[0].reason;
    assert_eq!(reason, "contract: weights_digest, architecture, rope");
    runtime.restore("control", RestoreMode::Recompute).await.unwrap();
    for id in ["s", "control"] {
        say(&runtime, id, SECOND, 24).await;
    }
    let under_second = runtime.tokens("s").await.unwrap();
    assert_eq!(under_second, runtime.tokens("control").await.unwrap());
    assert_ne!(under_second, under_first, "the other model writes something else");
    assert_eq!(runtime.session("s").await.unwrap().model, second.name());
    // What was recomputed is the second model's own, and is used as such.
    runtime.evict("s").await.unwrap();
    let runtime = reopen(runtime, with(&second)).await;
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    check(&report);
    assert!(report.cells_loaded > 0, "{report:?}");
    assert!(report.refused.iter().all(|refusal| refusal.reason == "absent"), "the unsealed tail: {report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_evicted_session_can_be_evicted_again_and_one_without_kv_cannot() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    let saved = runtime.session("s").await.unwrap().kv.saved_tokens;
    let transitions = runtime.transitions("s").await.unwrap().len();
    let again = runtime.evict("s").await.unwrap();
    assert_eq!((again.from, again.to, again.bytes), (KvState::Evicted, KvState::Evicted, 0));
    assert_eq!(again.tokens, saved);
    assert_eq!(
        runtime.transitions("s").await.unwrap().len(),
        transitions,
        "nothing changed, nothing is on record"
    );
    create(&runtime, "new").await;
    assert_eq!(&*runtime.evict("new").await.unwrap_err().code, "not_resident");
}

#[tokio::test(flavor = "multi_thread")]
async fn i4_a_tier_that_hardly_moves_is_overtaken_by_recompute() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = evicted(directory.path()).await;
    // The planner believes in a fast disk; every read then takes an hour.
    runtime.restore("s", RestoreMode::Load).await.unwrap();
    runtime.evict("s").await.unwrap();
    runtime.store().cells().set_fault(store::TierFault::DelayReads(Duration::from_secs(3600)));
    let turn = say(&runtime, "s", SECOND, 24).await;
    let report = &turn.restores[0];
    check(report);
    assert_eq!(report.cells_loaded, 0);
    assert!(report.refused.iter().any(|refusal| refusal.reason == "slow"), "{report:?}");
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_fork_shares_pages_and_neither_side_disturbs_the_other() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    create(&runtime, "s").await;
    say(&runtime, "s", &story(1), 16).await;
    let free_before = runtime.info().await.unwrap().device.pages_free;
    let fork = runtime.fork_session("s", Some("f".into()), None).await.unwrap();
    assert_eq!(runtime.info().await.unwrap().device.pages_free, free_before, "a fork copies nothing");
    assert!(fork.kv.shared_pages > 0);
    say(&runtime, "f", "Tell me about the sea instead.", 24).await;
    say(&runtime, "s", SECOND, 24).await;
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
    runtime.delete_session("s").await.unwrap();
    say(&runtime, "f", "Go on.", 8).await;
    runtime.delete_session("f").await.unwrap();
    let device = runtime.info().await.unwrap().device;
    assert_eq!(device.pages_free, device.pages_total, "every page is free again");
}
