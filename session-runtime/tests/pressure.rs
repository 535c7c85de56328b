//! Sessions that together outgrow the device: everyone gets on, nobody's tokens change.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;

use session_runtime::kv::state::KvState;
use session_runtime::session::spec::TurnRequest;
use session_runtime::session::view::TurnStatus;
use session_runtime::{Config, Runtime};
use support::{SECOND, config, control, create, say, story};

/// A runtime whose device holds one session of [`control`]'s length, but not two.
async fn small(directory: &Path) -> Runtime {
    let tokens = 900;
    let bytes_per_token = 2 * 3 * 64 * 2 * 30;
    let config = Config { device_budget_bytes: tokens * bytes_per_token, ..config(directory) };
    Runtime::open(config).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn i9_idle_sessions_make_room_and_come_back_exactly() {
    let expected = [control(1).await, control(2).await];
    let directory = tempfile::tempdir().unwrap();
    let runtime = small(directory.path()).await;
    for (id, salt) in [("a", 1), ("b", 2)] {
        create(&runtime, id).await;
        say(&runtime, id, &story(salt), 16).await;
    }
    assert_eq!(runtime.kv("a").await.unwrap().state, KvState::Evicted, "b forced a out");
    for id in ["a", "b"] {
        say(&runtime, id, SECOND, 24).await;
    }
    assert_eq!(runtime.kv("a").await.unwrap().state, KvState::Evicted);
    for (id, expected) in ["a", "b"].into_iter().zip(expected) {
        assert_eq!(runtime.tokens(id).await.unwrap(), expected, "session {id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i9_sessions_that_run_at_once_and_outgrow_the_device_all_finish() {
    let expected = [control(1).await, control(2).await, control(3).await];
    let directory = tempfile::tempdir().unwrap();
    let runtime = small(directory.path()).await;
    let ids = ["a", "b", "c"];
    for id in ids {
        create(&runtime, id).await;
    }
    for round in 0..2 {
        let mut turns = Vec::new();
        for (index, id) in ids.into_iter().enumerate() {
            let (input, max_tokens) =
                if round == 0 { (story(index + 1), 16) } else { (SECOND.to_owned(), 24) };
            let request = TurnRequest { input, max_tokens: Some(max_tokens), ..TurnRequest::default() };
            turns.push((id, runtime.start_turn(id, request).await.unwrap().id));
        }
        for (id, turn) in turns {
            let turn = runtime.wait_turn(id, &turn).await.unwrap();
            assert_eq!(turn.status, TurnStatus::Completed, "{:?}", turn.error);
        }
    }
    for (id, expected) in ids.into_iter().zip(expected) {
        assert_eq!(runtime.tokens(id).await.unwrap(), expected, "session {id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_a_session_larger_than_the_device_is_refused_with_the_fix() {
    let directory = tempfile::tempdir().unwrap();
    let bytes_per_token = 2 * 3 * 64 * 2 * 30;
    let config = Config { device_budget_bytes: 64 * bytes_per_token, ..config(directory.path()) };
    let runtime = Runtime::open(config).await.unwrap();
    create(&runtime, "s").await;
    let request = TurnRequest { input: story(1), ..TurnRequest::default() };
    let turn = runtime.start_turn("s", request).await.unwrap();
    let turn = runtime.wait_turn("s", &turn.id).await.unwrap();
    let error = turn.error.unwrap();
    assert_eq!((turn.status, error.code.as_str()), (TurnStatus::Failed, "kv_capacity"));
    assert!(error.message.contains("--device-budget"), "{}", error.message);
    let tiny = Config { device_budget_bytes: 1000, ..support::config(&directory.path().join("tiny")) };
    assert_eq!(Runtime::open(tiny).await.err().unwrap().code, "device_budget_too_small");
}
