//! Turns driven by agents inside a real runtime: tools, failures, cancellation.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

#[path = "support/guests.rs"]
mod guests;

use std::path::PathBuf;
use std::sync::Arc;

use guests::{TextAgent, component};
use session_runtime::Runtime;
use session_runtime::agent::{GuestLimits, NativeTool, ToolContext, ToolInfo};
use session_runtime::session::spec::{SessionSpec, TurnRequest};
use session_runtime::session::tool::{Effect, ToolFailure};
use session_runtime::session::view::{Event, TurnStatus, TurnView};

async fn open(components: Vec<PathBuf>, limits: GuestLimits) -> (Runtime, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let mut config = support::config(directory.path());
    config.components = components;
    config.limits = limits;
    (Runtime::open(config).await.unwrap(), directory)
}

async fn session(runtime: &Runtime, id: &str, agent: &str, tools: &[&str]) {
    let spec = SessionSpec {
        id: Some(id.to_owned()),
        agent: Some(agent.to_owned()),
        tools: tools.iter().map(|tool| (*tool).to_owned()).collect(),
        ..SessionSpec::default()
    };
    runtime.create_session(spec).await.unwrap();
}

fn request(input: &str) -> TurnRequest {
    TurnRequest { input: input.to_owned(), ..TurnRequest::default() }
}

async fn turn(runtime: &Runtime, id: &str, input: &str) -> TurnView {
    let turn = runtime.start_turn(id, request(input)).await.unwrap();
    runtime.wait_turn(id, &turn.id).await.unwrap()
}

async fn events(runtime: &Runtime, id: &str, kind: &str) -> Vec<Event> {
    let events = runtime.events(id, 0, 10_000).await.unwrap();
    events.into_iter().filter(|event| event.kind == kind).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_agents_that_misbehave_fail_their_turn_by_name() {
    let made = tempfile::tempdir().unwrap();
    let agent = |name, imports, fields, event| TextAgent { name, imports, fields, event }.build(made.path());
    let clock = r#"(import "session-runtime:agent/clock@0.2.0" "now-ms" (func $now (result i64)))"#;
    let cases = [
        (agent("spins", "", "", "(loop $l (br $l)) (unreachable)"), "agent_deadline"),
        (agent("traps", "", "", "(unreachable)"), "agent_trap"),
        (
            agent("grows", "", "", "(loop $l (drop (memory.grow (i32.const 16))) (br $l)) (unreachable)"),
            "agent_memory_limit",
        ),
        (
            agent(
                "recurses",
                "",
                "(func $deep (param i64 i64) (result i64)
                   (i64.add (call $deep (local.get 1) (local.get 0)) (local.get 0)))",
                "(drop (call $deep (i64.const 1) (i64.const 2))) (call $fine)",
            ),
            "agent_stack_overflow",
        ),
        (
            agent("asks", clock, "", "(loop $l (drop (call $now)) (br $l)) (unreachable)"),
            "agent_host_call_limit",
        ),
        (agent("fails", "", "", "(call $wrong)"), "agent_failed"),
    ];
    let limits = GuestLimits { deadline_ms: 100, host_calls: 50, ..GuestLimits::default() };
    let components = cases.iter().map(|(path, _)| path.clone()).collect();
    let (runtime, _directory) = open(components, limits).await;
    for (path, code) in &cases {
        let agent = path.file_stem().unwrap().to_str().unwrap();
        session(&runtime, agent, agent, &[]).await;
        let ended = turn(&runtime, agent, "go").await;
        assert_eq!(ended.status, TurnStatus::Failed, "{agent}");
        let error = ended.error.unwrap();
        assert_eq!(error.code, *code, "{agent}: {}", error.message);
        assert!(error.message.contains(&format!("agent '{agent}'")), "{}", error.message);
    }
    // The host lives.
    support::create(&runtime, "plain").await;
    support::say(&runtime, "plain", "Say hello.", 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_runs_for_an_agent_and_the_journal_holds_it() {
    let made = tempfile::tempdir().unwrap();
    let agent = TextAgent::calling("caller").build(made.path());
    let (runtime, _directory) = open(vec![agent, component("calculator")], GuestLimits::default()).await;
    session(&runtime, "s", "caller", &["calculator"]).await;
    let ended = turn(&runtime, "s", "calculator\n{\"expression\": \"6 * 7\"}").await;
    assert_eq!(ended.status, TurnStatus::Completed, "{:?}", ended.error);
    assert!(runtime.transcript("s").await.unwrap().contains("6 * 7 = 42"));
    let started = events(&runtime, "s", "tool.started").await;
    let finished = events(&runtime, "s", "tool.finished").await;
    assert_eq!((started.len(), finished.len()), (1, 1));
    assert_eq!(started[0].data["effect"], "pure");
    assert_eq!(finished[0].data["call_id"], started[0].data["call_id"]);
    assert_eq!((&finished[0].data["ok"], &finished[0].data["text"]), (&true.into(), &"6 * 7 = 42".into()));
    // Failures reach the agent as values, and the journal.
    let ended = turn(&runtime, "s", "calculator\n{}").await;
    assert_eq!(ended.status, TurnStatus::Completed, "{:?}", ended.error);
    assert!(runtime.transcript("s").await.unwrap().contains("invalid_input"));
    let finished = events(&runtime, "s", "tool.finished").await;
    assert_eq!(
        (&finished[1].data["ok"], &finished[1].data["error"]["code"]),
        (&false.into(), &"invalid_input".into())
    );
    assert_eq!(events(&runtime, "s", "agent.started").await.len(), 1, "start runs once a session");
}

#[tokio::test(flavor = "multi_thread")]
async fn i7_a_session_reaches_only_the_tools_it_was_given() {
    let made = tempfile::tempdir().unwrap();
    let agent = TextAgent::calling("caller").build(made.path());
    let components = vec![agent, component("calculator"), component("wait")];
    let (runtime, _directory) = open(components, GuestLimits::default()).await;
    session(&runtime, "s", "caller", &["wait"]).await;
    let ended = turn(&runtime, "s", "calculator\n{\"expression\": \"6 * 7\"}").await;
    assert_eq!(ended.status, TurnStatus::Completed, "{:?}", ended.error);
    assert!(runtime.transcript("s").await.unwrap().contains("tool_not_found"));
    assert_eq!(events(&runtime, "s", "tool.started").await.len(), 0);
}

struct Greeter;

#[async_trait::async_trait]
impl NativeTool for Greeter {
    fn info(&self) -> ToolInfo {
        ToolInfo::native("greet", "Greets.", Effect::Effect)
    }

    async fn call(&self, _input: &str, cx: ToolContext) -> Result<String, ToolFailure> {
        Ok(format!("Hello, {}", cx.session_id()))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_calls_a_tool_of_the_application() {
    let made = tempfile::tempdir().unwrap();
    let agent = TextAgent::calling("caller").build(made.path());
    let (runtime, _directory) = open(vec![agent], GuestLimits::default()).await;
    runtime.register_tool(Arc::new(Greeter)).unwrap();
    session(&runtime, "s", "caller", &["greet"]).await;
    let ended = turn(&runtime, "s", "greet\n{}").await;
    assert_eq!(ended.status, TurnStatus::Completed, "{:?}", ended.error);
    assert!(runtime.transcript("s").await.unwrap().contains("Hello, s"));
}

/// Cancels a turn once an event of this kind is on record.
async fn cancel_after(runtime: &Runtime, id: &str, input: &str, kind: &str) -> TurnView {
    let turn = runtime.start_turn(id, request(input)).await.unwrap();
    loop {
        let seen = runtime.events(id, 0, 10_000).await.unwrap();
        if seen.iter().any(|event| event.kind == kind) {
            break;
        }
        let last = seen.last().map_or(0, |event| event.seq);
        runtime.wait_events(id, last).await.unwrap();
    }
    runtime.cancel_turn(id, &turn.id).await.unwrap();
    runtime.wait_turn(id, &turn.id).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_turn_stops_its_tool() {
    let made = tempfile::tempdir().unwrap();
    let agent = TextAgent::calling("caller").build(made.path());
    let (runtime, _directory) = open(vec![agent, component("wait")], GuestLimits::default()).await;
    session(&runtime, "s", "caller", &["wait"]).await;
    let input = "wait\n{\"seconds\": 90, \"reason\": \"nothing\"}";
    let ended = cancel_after(&runtime, "s", input, "tool.progress").await;
    assert_eq!(ended.status, TurnStatus::Cancelled);
    let finished = events(&runtime, "s", "tool.finished").await;
    assert_eq!(finished[0].data["error"]["code"], "cancelled");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_turn_stops_an_agent_that_computes() {
    let made = tempfile::tempdir().unwrap();
    // It says on record that it begins, then never stops.
    let agent = TextAgent {
        name: "spins",
        imports: r#"(import "session-runtime:agent/clock@0.2.0" "now-ms" (func $now (result i64)))"#,
        event: "(drop (call $now)) (loop $l (br $l)) (unreachable)",
        ..TextAgent::default()
    };
    let limits = GuestLimits { deadline_ms: 3_600_000, ..GuestLimits::default() };
    let (runtime, _directory) = open(vec![agent.build(made.path())], limits).await;
    session(&runtime, "s", "spins", &[]).await;
    let ended = cancel_after(&runtime, "s", "go", "host.call").await;
    assert_eq!(ended.status, TurnStatus::Cancelled);
}
