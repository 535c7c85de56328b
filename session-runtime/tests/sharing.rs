//! Sessions that begin alike: the second takes the KV of the first from the device or from the disk, and writes what it
//! would have written alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;

use session_runtime::kv::state::KvState;
use session_runtime::session::view::TurnView;
use session_runtime::{Config, Runtime};
use support::{config, create, say, story};

/// Begins as the story does and ends otherwise.
fn other_end() -> String {
    format!("{} And what became of the keeper?", story(1))
}

async fn sharing(directory: &Path) -> Runtime {
    Runtime::open(Config { share_prefixes: true, ..config(directory) }).await.unwrap()
}

/// What the second session writes where nothing is shared.
async fn alone() -> Vec<u32> {
    let directory = tempfile::tempdir().unwrap();
    let runtime = support::open(directory.path()).await;
    create(&runtime, "first").await;
    say(&runtime, "first", &story(1), 16).await;
    create(&runtime, "t").await;
    let turn = say(&runtime, "t", &other_end(), 24).await;
    assert_eq!((turn.usage.cached_tokens, turn.restores.len()), (0, 0), "nothing is shared unasked");
    runtime.tokens("t").await.unwrap()
}

async fn second(runtime: &Runtime) -> TurnView {
    create(runtime, "t").await;
    say(runtime, "t", &other_end(), 24).await
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_session_that_begins_like_one_on_the_device_shares_its_pages() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = sharing(directory.path()).await;
    create(&runtime, "s").await;
    say(&runtime, "s", &story(1), 16).await;
    let turn = second(&runtime).await;
    let tokens = runtime.tokens("t").await.unwrap();
    let first = runtime.tokens("s").await.unwrap();
    let common = first.iter().zip(&tokens).take_while(|(a, b)| a == b).count() as u64;
    assert!(common > 200, "{common}");
    assert_eq!(turn.usage.cached_tokens, common / 16 * 16, "whole pages");
    assert!(turn.restores.is_empty());
    assert!(runtime.kv("t").await.unwrap().shared_pages > 0);
    assert_eq!(tokens, alone().await);
    // The first goes on as if nobody had looked, and every page is freed once.
    say(&runtime, "s", "And then?", 8).await;
    runtime.evict("s").await.unwrap();
    say(&runtime, "t", "And then?", 8).await;
    for id in ["s", "t"] {
        runtime.delete_session(id).await.unwrap();
    }
    let device = runtime.info().await.unwrap().device;
    assert_eq!(device.pages_free, device.pages_total);
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_session_that_begins_like_one_on_disk_restores_from_its_cells() {
    let expected = alone().await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = sharing(directory.path()).await;
    create(&runtime, "s").await;
    say(&runtime, "s", &story(1), 16).await;
    runtime.evict("s").await.unwrap();
    // Also those of an earlier process.
    runtime.shutdown().await.unwrap();
    let runtime = sharing(directory.path()).await;
    let turn = second(&runtime).await;
    let report = &turn.restores[0];
    assert!(report.tokens >= 192, "{report:?}");
    assert_eq!(report.cells_refused(), 0, "{report:?}");
    assert_eq!(runtime.tokens("t").await.unwrap(), expected);
    let changes = runtime.transitions("t").await.unwrap();
    let found = &changes[0].2;
    assert_eq!((found.from, found.to, &*found.reason), (KvState::None, KvState::Evicted, "shared"));
}
