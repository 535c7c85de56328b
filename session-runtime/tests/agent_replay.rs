//! Turns of agents that a killed server interrupted: they run again, are told what they were told, and go on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/guests.rs"]
mod guests;
#[path = "support/killable.rs"]
mod killable;
mod support;

use std::collections::HashMap;
use std::path::Path;

use guests::{TextTool, component};
use killable::{Server, streamed, tokens};
use serde_json::{Value, json};

/// A server with the project's guests and those in `more`, and a session `s` of the agent `probe`.
fn start(directory: &Path, more: &Path) -> Server {
    let probe = component("tests/probe");
    let of_tests = probe.parent().unwrap();
    let folders = [of_tests, of_tests.parent().unwrap(), more];
    let options: Vec<&str> =
        folders.iter().flat_map(|folder| ["--guests", folder.to_str().unwrap()]).collect();
    Server::start(&directory.join("data"), &options)
}

fn create(server: &Server, tools: &[&str]) {
    server.call("POST", "/v1/sessions", &json!({"id": "s", "agent": "probe", "tools": tools}));
}

fn of_kind<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["type"] == kind).map(|event| &event["data"]).collect()
}

/// What the agent was told for each line of its script: the lines of its answer.
fn told(events: &[Value]) -> Vec<(String, String)> {
    let answers: Vec<&Value> =
        of_kind(events, "segment.appended").into_iter().filter(|data| data["kind"] == "answer").collect();
    assert_eq!(answers.len(), 1);
    let lines = answers[0]["text"].as_str().unwrap().lines();
    lines.map(|line| line.split_once(": ").unwrap()).map(|(word, told)| (word.into(), told.into())).collect()
}

/// Refused calls of every kind before and after an interruption, and a tool that was interrupted.
const SCRIPT: &str = "say What does a lighthouse keeper do?
say-bytes 1050000
drop nowhere
set colour blue
random
clock
segments
interrupt 4
stream 12
write-under {\"type\": 5}
tool calculator {\"expression\": \"6 * 7\"}
tool nothing {}
drop
tool wait {\"seconds\": 3, \"reason\": \"the tide\"}
get colour
keep nowhere
write 8
say-bytes 1050000
random";

#[test]
fn i1_an_agent_goes_on_after_refused_calls_and_an_interrupted_tool() {
    let made = tempfile::tempdir().unwrap();
    let run = |directory: &Path, kill: bool| {
        let mut server = start(directory, made.path());
        create(&server, &["calculator", "wait"]);
        server.begin("t", SCRIPT, 64);
        let mut before = Vec::new();
        if kill {
            before =
                server.follow_until(|event| event["type"] == "tool.progress" && event["data"]["done"] != 0);
            server.kill();
            server = start(directory, made.path());
        }
        server.completed("t");
        (before, server.events())
    };
    let (control, killed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_, control) = run(control.path(), false);
    let (before, events) = run(killed.path(), true);

    // What the world or the host decides differs from run to run; everything else must not.
    let lines = told(&events);
    for ((word, one), (_, other)) in lines.iter().zip(&told(&control)) {
        if !["random", "clock"].contains(&word.as_str()) {
            assert_eq!(one, other, "{word}");
        }
    }
    assert_eq!(streamed(&events), streamed(&control));
    let refusals: Vec<&str> = lines.iter().filter_map(|(_, told)| told.strip_prefix("refused ")).collect();
    assert_eq!(
        refusals,
        [
            "InvalidInput message_too_large",
            "NotFound segment_not_found",
            "InvalidInput constraint_invalid",
            "NotFound tool_not_found",
            "NotFound segment_not_found",
            "InvalidInput message_too_large",
        ]
    );
    let recorded = of_kind(&events, "call.refused");
    let codes: Vec<&str> = recorded.iter().map(|data| data["error"]["code"].as_str().unwrap()).collect();
    let expected = ["message_too_large", "segment_not_found", "segment_not_found", "message_too_large"];
    assert_eq!(codes, expected, "each refusal that used a number is on record once");

    // What was told before the kill is told again.
    let calls: HashMap<&str, &Value> = of_kind(&before, "host.call")
        .into_iter()
        .map(|data| (data["name"].as_str().unwrap(), &data["result"]))
        .collect();
    let line = |word: &str| &lines.iter().find(|(at, _)| at == word).unwrap().1;
    assert_eq!(*line("random"), calls["random.get-u64"].as_u64().unwrap().to_string());

    // An idempotent tool runs again under the same id.
    let started = of_kind(&events, "tool.started");
    let waits: Vec<&&Value> = started.iter().filter(|data| data["tool"] == "wait").collect();
    assert_eq!((waits.len(), &waits[0]["effect"]), (1, &json!("idempotent")));
    let after = &events[before.len()..];
    let again = of_kind(after, "tool.progress");
    assert!(!again.is_empty() && again.iter().all(|data| data["call_id"] == waits[0]["call_id"]));
    let finished = of_kind(after, "tool.finished");
    assert_eq!((finished.len(), &finished[0]["call_id"]), (1, &waits[0]["call_id"]));
    assert_eq!(line("get"), "blue");
    let calls: Vec<u64> = events.iter().filter_map(|event| event["data"]["call"].as_u64()).collect();
    assert_eq!(calls, (1..=calls.len() as u64).collect::<Vec<_>>(), "every call is on record once");
}

#[test]
fn i1_a_message_with_other_calls_between_its_pieces_goes_on_exactly() {
    let made = tempfile::tempdir().unwrap();
    let script = "say Tell me about the sea and the ships on it.\nstream 60\nget written";
    let run = |directory: &Path, kills: &[usize]| {
        let mut server = start(directory, made.path());
        create(&server, &[]);
        server.begin("t", script, 64);
        for pieces in kills {
            let mut seen = 0;
            server.follow_until(|event| {
                seen += usize::from(event["type"] == "generation.tokens");
                seen == *pieces
            });
            server.kill();
            server = start(directory, made.path());
        }
        server.completed("t");
        server.events()
    };
    let (control, killed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let control = run(control.path(), &[]);
    let events = run(killed.path(), &[4, 12]);
    assert_eq!(tokens(&events), tokens(&control), "not a token is lost or twice");
    assert_eq!(told(&events), told(&control));
    assert_eq!(of_kind(&events, "generation.finished").len(), 1);
}

#[test]
fn a_tool_with_effects_asks_a_person_after_a_crash() {
    let made = tempfile::tempdir().unwrap();
    let pays = TextTool {
        name: "pays",
        effect: 3,
        imports: r#"(import "session-runtime:tool/clock@0.2.0" "sleep-ms" (func $sleep (param i64 i32)))"#,
        call: "(call $sleep (i64.const 60000) (i32.const 512)) (call $ok)",
        ..TextTool::default()
    };
    pays.build(made.path(), "pays");
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), made.path());
    create(&server, &["pays"]);
    server.begin("t", "say Pay the bill.\ntool pays {}\nwrite 4", 64);
    server.follow_until(|event| event["type"] == "tool.started");
    server.kill();

    let server = start(directory.path(), made.path());
    let turn = server.ended("t");
    assert_eq!(
        (&turn["status"], &turn["error"]["code"]),
        (&json!("requires_action"), &json!("outcome_unknown"))
    );
    let message = turn["error"]["message"].as_str().unwrap();
    assert!(message.contains("'pays'") && message.contains("start a new turn"), "{message}");
    let session = server.call("GET", "/v1/sessions/s", &Value::Null);
    assert_eq!(session["status"], "requires_action");
    let events = server.events();
    assert_eq!(
        (of_kind(&events, "tool.started").len(), of_kind(&events, "tool.finished").len()),
        (1, 0),
        "it did not run again"
    );
    // A person looked, and goes on.
    server.begin("next", "say It is paid.\nwrite 4", 64);
    server.completed("next");
    assert_eq!(server.call("GET", "/v1/sessions/s", &Value::Null)["status"], "idle");
}
