//! What an agent is told by each of its imports, and the real assistant, over a small real model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/guests.rs"]
mod guests;
mod support;

use std::sync::Arc;
use std::time::Duration;

use guests::component;
use session_runtime::kv::state::KvState;
use session_runtime::models::progress::Silent;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::restore::report::{RestoreReport, TierLoads};
use session_runtime::scheduler::IdlePolicyName;
use session_runtime::seams::Seams;
use session_runtime::session::spec::{KvReuse, OnBusy, SegmentKind, SessionSpec, TurnRequest};
use session_runtime::session::view::{TurnStatus, TurnView};
use session_runtime::{Config, Runtime};
use store::ManualClock;

/// A runtime with one session `s` of the agent in a component.
async fn open(agent: &str, tools: &[&str]) -> (Runtime, tempfile::TempDir) {
    open_with(agent, tools, 0).await
}

/// As [`open`], with so many bytes of host memory.
async fn open_with(agent: &str, tools: &[&str], host_budget_bytes: u64) -> (Runtime, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let config = Config { host_budget_bytes, ..support::config(directory.path()) };
    let runtime = open_on(config, Seams::default(), agent, tools).await;
    (runtime, directory)
}

async fn open_on(mut config: Config, seams: Seams, agent: &str, tools: &[&str]) -> Runtime {
    config.components = [agent].iter().chain(tools).map(|name| component(name)).collect();
    let runtime = Runtime::open_on(config, seams, Arc::new(Silent)).await.unwrap();
    let spec = SessionSpec {
        id: Some("s".to_owned()),
        agent: agent.rsplit('/').next().map(str::to_owned),
        tools: tools.iter().map(|tool| (*tool).to_owned()).collect(),
        ..SessionSpec::default()
    };
    runtime.create_session(spec).await.unwrap();
    runtime
}

/// Runs a script of the agent `probe`; what it was told, line by line.
async fn told(runtime: &Runtime, script: &[&str]) -> Vec<String> {
    let request = TurnRequest { input: script.join("\n"), ..TurnRequest::default() };
    let turn = runtime.start_turn("s", request).await.unwrap();
    let turn = runtime.wait_turn("s", &turn.id).await.unwrap();
    assert_eq!(turn.status, TurnStatus::Completed, "{:?}", turn.error);
    let segments = runtime.segments("s").await.unwrap();
    let answer = segments.iter().rfind(|segment| segment.kind == SegmentKind::Answer).unwrap();
    let told: Vec<String> =
        answer.text.lines().map(|line| line.split_once(": ").unwrap().1.to_owned()).collect();
    assert_eq!(told.len(), script.len(), "{told:?}");
    told
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_sees_its_session_its_segments_and_its_messages() {
    let (runtime, _directory) = open("tests/probe", &[]).await;
    let script = ["session", "say The sky over the harbour was grey.", "write 6", "segments", "leave 5"];
    let lines = told(&runtime, &script).await;
    assert_eq!(lines[0], "s 1 false ");
    let segments = runtime.segments("s").await.unwrap();
    let range = |index: usize| format!("{}..{}", segments[index].start, segments[index].end);
    assert_eq!(lines[1], range(1));
    // The range of a message that was read to its end has its frame in it.
    assert_eq!(lines[2], format!("{} MaxTokens {:?}", range(2), segments[2].text));
    let (system, user, written) = (range(0), range(1), range(2));
    assert_eq!(lines[3], format!("System {system} Keep, User {user} Keep, Reasoning {written} Keep"));
    assert_eq!((lines[4].as_str(), segments[3].kind), ("left", SegmentKind::Reasoning));
    let ends = segments.iter().map(|segment| segment.end);
    let starts = segments.iter().skip(1).map(|segment| segment.start);
    assert!(starts.zip(ends).all(|(start, end)| start == end), "segments follow each other");
    // A message that nobody reads on is written to its end all the same.
    let events = runtime.events("s", 0, 10_000).await.unwrap();
    let finished: Vec<_> = events.iter().filter(|event| event.kind == "generation.finished").collect();
    assert_eq!((finished.len(), &finished[1].data["usage"]["output_tokens"]), (2, &5.into()));
    let last = events.iter().find(|event| event.kind == "turn.finished").unwrap();
    assert_eq!(
        last.data["finish"], finished[1].data["finish"],
        "the end of a turn says why its message ended"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_read_to_its_end_before_anything_follows_it() {
    let (runtime, _directory) = open("tests/probe", &[]).await;
    let lines = told(&runtime, &["say Hello.", "interrupt 3", "stream 6", "drop", "segments"]).await;
    assert_eq!(lines[1], "generation_running generation_in_progress generation_done");
    assert!(!lines[2].starts_with("refused"), "{}", lines[2]);
    assert_eq!(lines[3], "done");
    assert!(lines[4].ends_with("DropAfterTurn"), "{}", lines[4]);
    let kept = runtime.segments("s").await.unwrap();
    let reasoning = kept.iter().filter(|segment| segment.kind == SegmentKind::Reasoning).count();
    assert_eq!(reasoning, 1, "what was to be dropped after the turn is gone, the rest is there");
}

#[tokio::test(flavor = "multi_thread")]
async fn i10_an_agent_is_told_where_its_kv_is_and_what_a_restore_did() {
    let (runtime, _directory) = open("tests/probe", &[]).await;
    let long = format!("say {}", support::story(2).trim());
    let lines = told(&runtime, &["restore", &long, "write 2", "context"]).await;
    assert_eq!(lines[0], "none");
    let written: u64 = lines[2].split(['.', ' ']).nth(2).unwrap().parse().unwrap();
    let length = runtime.info().await.unwrap().model.context_length;
    // The frame that closes a message is read with the next one; so is the last token.
    let context: Vec<&str> = lines[3].split(' ').collect();
    assert_eq!((context[0], context[1], context[3]), ("Active", &*written.to_string(), &*length.to_string()));
    assert!((written - 4..written).contains(&context[2].parse().unwrap()), "{}", lines[3]);
    runtime.evict("s").await.unwrap();
    let lines = told(&runtime, &["context", "write 2", "restore", "context"]).await;
    assert!(lines[0].starts_with("Evicted ") && lines[0].contains(" 0 "), "{}", lines[0]);
    let report = runtime.kv("s").await.unwrap().last_restore.unwrap();
    assert_eq!(lines[2], shown(&report));
    assert!(report.from_disk.tokens > 0 && report.from_host.tokens == 0, "{report:?}");
    assert!(lines[3].starts_with("Active "), "{}", lines[3]);
}

/// What the agent `probe` says of a report.
fn shown(report: &RestoreReport) -> String {
    let tier = |loads: &TierLoads| format!("{}/{}/{}", loads.tokens, loads.cells, loads.bytes);
    format!(
        "{} = {} + {} + {} + {}; host {} disk {}; cells {} {} {}",
        report.tokens,
        report.tokens_resident,
        report.tokens_loaded,
        report.tokens_mixed,
        report.tokens_recomputed,
        tier(&report.from_host),
        tier(&report.from_disk),
        report.cells_loaded,
        report.cells_recomputed,
        report.cells_refused()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn i10_an_agent_is_told_what_each_tier_brought_and_what_was_recomputed() {
    let (runtime, _directory) = open_with("tests/probe", &[], 64 << 20).await;
    let long = format!("say {}", support::story(2).trim());
    told(&runtime, &[&long, "write 2"]).await;
    runtime.evict("s").await.unwrap();
    // Of the two memories one brings the chunks at an even place; the rest is recomputed.
    runtime.restore("s", RestoreMode::Alternate).await.unwrap();
    let lines = told(&runtime, &["restore"]).await;
    let report = runtime.kv("s").await.unwrap().last_restore.unwrap();
    assert_eq!(lines[0], shown(&report));
    assert!(report.from_host.tokens > 0 && report.from_disk.tokens == 0, "{report:?}");
    assert!(report.tokens_recomputed > 0 && report.tokens_mixed == 0, "{report:?}");
    let parts =
        report.tokens_resident + report.tokens_loaded + report.tokens_mixed + report.tokens_recomputed;
    assert_eq!(report.tokens, parts);
}

/// Waits for something that a session's events tell.
async fn until(runtime: &Runtime, told: impl AsyncFn() -> bool) {
    loop {
        let seen = runtime.session("s").await.unwrap().last_event;
        if told().await {
            return;
        }
        runtime.wait_events("s", seen).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_comes_back_ahead_of_the_return_that_a_component_declares() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(1_700_000_000_000));
    let seams = Seams { clock: Arc::<ManualClock>::clone(&clock), ..Seams::default() };
    let config = Config { idle_policy: IdlePolicyName::Declared, ..support::config(directory.path()) };
    let runtime = open_on(config, seams, "tests/probe", &["wait"]).await;
    let script = format!("say {}\nwrite 2\ntool wait {{\"seconds\": 100}}", support::story(2).trim());
    let request = TurnRequest { input: script, ..TurnRequest::default() };
    let turn = runtime.start_turn("s", request).await.unwrap();
    let begun = async || {
        let events = runtime.events("s", 0, 10_000).await.unwrap();
        events.iter().any(|event| event.kind == "tool.started")
    };
    until(&runtime, begun).await;
    runtime.evict("s").await.unwrap();
    clock.advance(70_000);
    // The second answer is given after the tick that the first one woke.
    runtime.kv("s").await.unwrap();
    assert_eq!(runtime.kv("s").await.unwrap().state, KvState::Evicted, "the call is far from its end");
    clock.advance(15_000);
    until(&runtime, async || runtime.kv("s").await.unwrap().state == KvState::Restored).await;
    let report = runtime.kv("s").await.unwrap().last_restore.unwrap();
    assert!(report.from_disk.tokens > 200 && report.tokens_recomputed == 0, "{report:?}");
    runtime.cancel_turn("s", &turn.id).await.unwrap();
    assert_eq!(runtime.wait_turn("s", &turn.id).await.unwrap().status, TurnStatus::Cancelled);
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_an_agents_state_outlives_its_turn_and_is_bounded() {
    let (runtime, _directory) = open("tests/probe", &[]).await;
    let large = format!("set large {}", "x".repeat(17_000));
    let script =
        ["say Hello.", "get a", "set a one two", "get a", "set b three", "delete b", "get b", &large];
    let lines = told(&runtime, &script).await;
    assert_eq!(
        lines[1..],
        ["nothing", "done", "one two", "done", "done", "nothing", "refused Limit state_limit"]
    );
    let fill: Vec<String> = (0..64).map(|key| format!("set k{key} v")).collect();
    let script: Vec<&str> = ["get a"].into_iter().chain(fill.iter().map(String::as_str)).collect();
    let lines = told(&runtime, &script).await;
    assert_eq!(lines[0], "one two");
    assert!(lines[1..64].iter().all(|line| line == "done"));
    assert_eq!(lines[64], "refused Limit state_limit", "64 keys are there");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_turn_decides_about_segments_of_earlier_turns_counts() {
    let (runtime, _directory) = open("tests/probe", &[]).await;
    told(&runtime, &["say First.", "say Second.", "say Third."]).await;
    let ids: Vec<String> = runtime.segments("s").await.unwrap().into_iter().map(|s| s.id).collect();
    let drop = format!("drop {}", ids[1]);
    assert_eq!(told(&runtime, &[&drop, "say Fourth."]).await[0], "done");
    let kept: Vec<String> = runtime.segments("s").await.unwrap().into_iter().map(|s| s.text).collect();
    assert!(!kept.contains(&"First.".to_owned()) && kept.contains(&"Second.".to_owned()), "{kept:?}");
}

/// Sweeps until a segment with this text is gone and the scheduler knows. The timer sweeps too, and may be the one that cuts it.
async fn expire(runtime: &Runtime, session: &str, text: &str) {
    loop {
        runtime.sweep().await;
        let segments = runtime.segments(session).await.unwrap();
        let tokens = runtime.tokens(session).await.unwrap().len() as u64;
        let known = runtime.kv(session).await.unwrap().tokens;
        if segments.iter().all(|segment| segment.text != text) && known == tokens {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Runs a turn to its end, once whoever cuts a segment has let go of the session.
async fn go_on(runtime: &Runtime, session: &str, script: &str) -> TurnView {
    let on_busy = OnBusy::Enqueue;
    let request = TurnRequest { input: script.to_owned(), on_busy, ..TurnRequest::default() };
    let turn = runtime.start_turn(session, request).await.unwrap();
    let turn = runtime.wait_turn(session, &turn.id).await.unwrap();
    assert_eq!(turn.status, TurnStatus::Completed, "{:?}", turn.error);
    turn
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_expires_in_its_session_and_in_a_fork() {
    let (runtime, _directory) = open("tests/probe", &[]).await;
    let lines = told(&runtime, &["say First.", "expire 0", "say Second.", "write 2"]).await;
    assert_eq!(lines[1], "done");
    let before = runtime.tokens("s").await.unwrap();
    runtime.fork_session("s", Some("fork".to_owned()), None).await.unwrap();
    for session in ["s", "fork"] {
        expire(&runtime, session, "First.").await;
        let segments = runtime.segments(session).await.unwrap();
        let texts: Vec<&str> = segments.iter().map(|segment| segment.text.as_str()).collect();
        assert!(!texts.contains(&"First.") && texts.contains(&"Second."), "{session}: {texts:?}");
        let tokens = runtime.tokens(session).await.unwrap();
        assert!(tokens.len() < before.len());
        assert_eq!(segments.last().unwrap().end, tokens.len() as u64);
    }
    for session in ["s", "fork"] {
        go_on(&runtime, session, "say Third.\nwrite 2").await;
    }
    assert_eq!(runtime.tokens("s").await.unwrap(), runtime.tokens("fork").await.unwrap());
}

/// What follows an expired segment is moved, on the device or when it comes back, where the session takes that.
#[tokio::test(flavor = "multi_thread")]
async fn what_follows_an_expired_segment_is_not_computed_again_where_near_is_enough() {
    let (runtime, _directory) = open("tests/probe", &[]).await;
    for (id, kv_reuse, leaves) in [
        ("exact", KvReuse::Exact, false),
        ("near", KvReuse::Approximate, false),
        ("away", KvReuse::Approximate, true),
    ] {
        let spec = SessionSpec {
            id: Some(id.to_owned()),
            agent: Some("probe".to_owned()),
            kv_reuse,
            ..SessionSpec::default()
        };
        runtime.create_session(spec).await.unwrap();
        let story = support::story(3);
        let script = format!("say First.\nexpire 0\nsay {}\nwrite 2", story.trim());
        support::say(&runtime, id, &script, 64).await;
        if leaves {
            runtime.evict(id).await.unwrap();
        }
        expire(&runtime, id, "First.").await;
        let turn = go_on(&runtime, id, "say Third.\nwrite 2").await;
        let events = runtime.events(id, 0, 10_000).await.unwrap();
        let moved: Vec<u64> = events
            .iter()
            .filter(|event| event.kind == "kv.relocated")
            .map(|event| event.data["tokens"].as_u64().unwrap())
            .collect();
        let computed = turn.usage.input_tokens - turn.usage.cached_tokens;
        match kv_reuse {
            KvReuse::Exact => assert!(moved.is_empty() && computed > 500, "{moved:?}, {:?}", turn.usage),
            KvReuse::Approximate => {
                assert!(moved.len() == 1 && moved[0] > 500 && computed < 64, "{moved:?}, {:?}", turn.usage);
            }
        }
        assert_eq!(turn.restores.len(), usize::from(leaves));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn time_and_chance_come_from_the_host_and_are_on_record() {
    let (runtime, _directory) = open("tests/probe", &[]).await;
    let lines = told(&runtime, &["random", "random", "clock", "log the tide turns"]).await;
    assert_ne!(lines[0], lines[1]);
    let events = runtime.events("s", 0, 10_000).await.unwrap();
    let recorded: Vec<String> = events
        .iter()
        .filter(|event| event.kind == "host.call")
        .map(|event| event.data["result"].to_string())
        .collect();
    assert_eq!(recorded, lines[..3]);
    let logged = events.iter().find(|event| event.kind == "agent.log").unwrap();
    assert_eq!(logged.data["message"], "the tide turns");
    let begun = events.iter().find(|event| event.kind == "turn.started").unwrap().time_ms;
    let clock: u64 = lines[2].parse().unwrap();
    assert!((begun..=logged.time_ms).contains(&clock), "{begun} {clock} {}", logged.time_ms);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_assistant_calls_a_tool_and_answers() {
    let (runtime, _directory) = open("assistant", &["calculator"]).await;
    let request = TurnRequest {
        input: "What is 12 + 30? Use the calculator.".to_owned(),
        max_tokens: Some(48),
        ..TurnRequest::default()
    };
    let turn = runtime.start_turn("s", request).await.unwrap();
    let turn = runtime.wait_turn("s", &turn.id).await.unwrap();
    assert_eq!(turn.status, TurnStatus::Completed, "{:?}", turn.error);
    assert!(!turn.output_text.trim().is_empty());
    let events = runtime.events("s", 0, 10_000).await.unwrap();
    let of = |kind: &str| events.iter().filter(|event| event.kind == kind).collect::<Vec<_>>();
    let (started, finished) = (of("tool.started"), of("tool.finished"));
    assert_eq!((started.len(), finished.len()), (1, 1), "a tool that is named is called, once");
    // Whatever so small a model wants to calculate, it asks for it in the form the tool takes.
    let input: serde_json::Value = serde_json::from_str(started[0].data["input"].as_str().unwrap()).unwrap();
    assert!(input["expression"].is_string(), "{input}");
    assert_ne!(finished[0].data["error"]["code"], "invalid_input");
    let kinds: Vec<SegmentKind> =
        runtime.segments("s").await.unwrap().iter().map(|segment| segment.kind).collect();
    for kind in [SegmentKind::ToolCall, SegmentKind::ToolResult, SegmentKind::Answer] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
}
