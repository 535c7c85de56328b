//! Helpers of the integration tests: runtimes on a small real model in directories of their own.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use session_runtime::session::spec::{SessionSpec, TurnRequest};
use session_runtime::session::view::{TurnStatus, TurnView};
use session_runtime::{Config, Runtime};

/// The model of tests that need no particular one.
pub const MODEL: &str = "smollm2-135m";

/// A configuration over `directory`.
pub fn config(directory: &Path) -> Config {
    Config {
        data_dir: directory.to_owned(),
        model: MODEL.to_owned(),
        device_budget_bytes: 64 << 20,
        // What is saved comes back from disk; tests of the host tier give it room.
        host_budget_bytes: 0,
        // A control session computes everything itself.
        share_prefixes: false,
        ..Config::default()
    }
}

/// A runtime over `directory`.
pub async fn open(directory: &Path) -> Runtime {
    Runtime::open(config(directory)).await.unwrap()
}

/// A prompt of some hundred tokens that differs by `salt`.
pub fn story(salt: usize) -> String {
    let places = ["the harbour", "a quiet library", "the night train", "an old mill"];
    (0..24)
        .map(|line| {
            format!(
                "Day {line}: the keeper of {} counted {} lamps and wrote {} letters. ",
                places[(line + salt) % places.len()],
                line * 3 + salt,
                line + 2 * salt
            )
        })
        .collect()
}

/// Runs a turn to its end.
pub async fn say(runtime: &Runtime, session: &str, input: &str, max_tokens: u32) -> TurnView {
    let request =
        TurnRequest { input: input.to_owned(), max_tokens: Some(max_tokens), ..TurnRequest::default() };
    let turn = runtime.start_turn(session, request).await.unwrap();
    let turn = runtime.wait_turn(session, &turn.id).await.unwrap();
    assert_eq!(turn.status, TurnStatus::Completed, "{:?}", turn.error);
    turn
}

/// A session with this id.
pub async fn create(runtime: &Runtime, id: &str) {
    let spec = SessionSpec { id: Some(id.to_owned()), ..SessionSpec::default() };
    runtime.create_session(spec).await.unwrap();
}

/// The tokens of a session that talked about `story(salt)` and was then asked a second question,
/// without ever leaving the device.
pub async fn control(salt: usize) -> Vec<u32> {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    create(&runtime, "control").await;
    say(&runtime, "control", &story(salt), 16).await;
    say(&runtime, "control", SECOND, 24).await;
    let tokens = runtime.tokens("control").await.unwrap();
    runtime.shutdown().await.unwrap();
    tokens
}

/// The second question of [`control`].
pub const SECOND: &str = "Which place had the most lamps, and why?";
