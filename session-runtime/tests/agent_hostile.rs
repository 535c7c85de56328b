//! Guests that misbehave: each ends in its own typed failure, and the host and its neighbours live on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/guests.rs"]
mod guests;

use guests::{TextTool, component, open};
use serde_json::json;
use session_runtime::agent::{GuestLimits, Guests, ToolOutput, ToolRequest};
use session_runtime::session::tool::ToolFailure;

fn limits() -> GuestLimits {
    GuestLimits { memory_bytes: 32 << 20, deadline_ms: 200, call_deadline_ms: 3_000, ..Default::default() }
}

async fn misbehave(guests: &Guests, how: &str, amount: u64) -> Result<ToolOutput, ToolFailure> {
    let input = json!({ "misbehaviour": how, "amount": amount }).to_string();
    guests.call_tool("hostile", &input, ToolRequest::default()).await
}

/// The failure, after which the same tool still works.
async fn fails(guests: &Guests, how: &str, amount: u64) -> ToolFailure {
    let failure = misbehave(guests, how, amount).await.expect_err(how);
    assert_eq!(misbehave(guests, "behave", 0).await.unwrap().text, "behaved");
    failure
}

async fn hostile() -> (Guests, tempfile::TempDir) {
    let place = tempfile::tempdir().unwrap();
    let guests = open(vec![component("tests/hostile")], limits(), place.path()).await;
    (guests, place)
}

#[tokio::test]
async fn i8_endless_computing_ends_and_neighbours_run_meanwhile() {
    // One thread: the neighbour can only run because the spinning guest yields.
    let (guests, _place) = hostile().await;
    let spinning = misbehave(&guests, "spin", 0);
    tokio::pin!(spinning);
    let mut answered = 0;
    let failure = loop {
        tokio::select! {
            biased;
            ended = &mut spinning => break ended.unwrap_err(),
            output = misbehave(&guests, "behave", 0) => {
                assert_eq!(output.unwrap().text, "behaved");
                answered += 1;
            }
        }
    };
    assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("limit", "cpu_limit"));
    assert!(failure.message.contains("200 ms"), "{}", failure.message);
    assert!(answered > 0);
}

#[tokio::test]
async fn i8_memory_ends_at_its_limit() {
    let (guests, _place) = hostile().await;
    assert_eq!(misbehave(&guests, "grow-memory", 8).await.unwrap().text, "allocated 8 MiB");
    let failure = fails(&guests, "grow-memory", 0).await;
    assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("limit", "memory_limit"));
    assert!(failure.message.contains("33554432 bytes"), "{}", failure.message);
}

#[tokio::test]
async fn i8_results_end_at_their_limit() {
    let place = tempfile::tempdir().unwrap();
    let small = GuestLimits { output_bytes: 1000, ..limits() };
    let guests = open(vec![component("tests/hostile")], small, place.path()).await;
    // Under the limit; over it; over what one call may carry at all.
    assert_eq!(misbehave(&guests, "huge-output", 900).await.unwrap().text.len(), 900);
    for bytes in [1_500, 4 << 20] {
        let failure = fails(&guests, "huge-output", bytes).await;
        assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("limit", "output_too_large"), "{bytes}");
    }
}

#[tokio::test]
async fn i8_floods_of_log_and_progress_are_dropped() {
    let (guests, _place) = hostile().await;
    assert!(misbehave(&guests, "flood-log", 2_000).await.is_ok());
    let (sink, mut reports) = tokio::sync::mpsc::channel(4);
    let input = json!({ "misbehaviour": "flood-progress", "amount": 2_000 }).to_string();
    let request = ToolRequest { progress: Some(sink), ..ToolRequest::default() };
    assert!(guests.call_tool("hostile", &input, request).await.is_ok());
    let mut kept = 0;
    while let Some(report) = reports.recv().await {
        assert!(report.message.len() <= 512);
        kept += 1;
    }
    assert_eq!(kept, 4);
}

#[tokio::test]
async fn i8_host_calls_are_counted() {
    let place = tempfile::tempdir().unwrap();
    let few = GuestLimits { host_calls: 100, ..limits() };
    let guests = open(vec![component("tests/hostile")], few, place.path()).await;
    assert!(misbehave(&guests, "flood-log", 90).await.is_ok());
    let failure = fails(&guests, "flood-log", 200).await;
    assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("limit", "host_call_limit"));
}

#[tokio::test]
async fn i8_deep_recursion_is_a_stack_overflow() {
    let (guests, _place) = hostile().await;
    assert_eq!(misbehave(&guests, "recurse", 100).await.unwrap().text, "recursed 100 levels");
    let failure = fails(&guests, "recurse", 0).await;
    assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("limit", "stack_overflow"));
}

#[tokio::test]
async fn i8_crashes_are_traps() {
    let (guests, _place) = hostile().await;
    for how in ["trap", "panic"] {
        let failure = fails(&guests, how, 0).await;
        assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("failed", "trap"), "{how}");
        assert!(failure.message.contains("hostile"), "{}", failure.message);
    }
}

#[tokio::test]
async fn i8_sleeping_past_the_deadline_is_refused() {
    let (guests, _place) = hostile().await;
    let failure = fails(&guests, "oversleep", 60_000).await;
    assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("limit", "deadline"));
}

#[tokio::test]
async fn i8_texts_of_failures_are_cut() {
    let (guests, _place) = hostile().await;
    let failure = fails(&guests, "fail", 100_000).await;
    assert_eq!((failure.code.as_str(), failure.message.len()), ("asked_to_fail", 4096));
}

#[tokio::test]
async fn i8_tables_end_at_their_limit() {
    let place = tempfile::tempdir().unwrap();
    let tool = TextTool {
        fields: "(table $t 1 funcref)",
        call: "(loop $again (drop (table.grow $t (ref.null func) (i32.const 1000))) (br $again)) (unreachable)",
        ..TextTool::default()
    };
    let guests = open(vec![tool.build(place.path(), "tables")], limits(), place.path()).await;
    let failure = guests.call_tool("text", "{}", ToolRequest::default()).await.unwrap_err();
    assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("limit", "table_limit"));
}

#[tokio::test]
async fn i8_a_result_that_is_no_json_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let tool = TextTool { call: "(call $reply (i32.const 2561) (i32.const 3))", ..TextTool::default() };
    let guests = open(vec![tool.build(place.path(), "text")], limits(), place.path()).await;
    let failure = guests.call_tool("text", "{}", ToolRequest::default()).await.unwrap_err();
    assert_eq!(failure.code, "output_invalid");
}

#[tokio::test]
async fn i8_a_pointer_outside_of_memory_is_a_trap() {
    let place = tempfile::tempdir().unwrap();
    let tool =
        TextTool { call: "(call $reply (i32.const 0x7ffffff0) (i32.const 64))", ..TextTool::default() };
    let guests = open(vec![tool.build(place.path(), "text")], limits(), place.path()).await;
    let failure = guests.call_tool("text", "{}", ToolRequest::default()).await.unwrap_err();
    assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("failed", "trap"));
}

#[tokio::test]
async fn i8_many_calls_at_once_wait_for_their_place() {
    let place = tempfile::tempdir().unwrap();
    let narrow = GuestLimits { concurrency: 2, ..limits() };
    let guests = open(vec![component("tests/hostile")], narrow, place.path()).await;
    let calls = (0..40).map(|_| misbehave(&guests, "behave", 0));
    for output in futures::future::join_all(calls).await {
        assert_eq!(output.unwrap().text, "behaved");
    }
}
