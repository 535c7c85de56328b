//! Turns, their one writer, their limits, and segments with a time to live.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use session_runtime::ErrorKind;
use session_runtime::session::spec::{ConstraintSpec, OnBusy, Sampling, SessionSpec, TurnRequest};
use session_runtime::session::view::{SessionStatus, TurnStatus};
use session_runtime::{Config, Runtime};
use support::{config, create, open, say, story};

fn request(input: &str, max_tokens: u32) -> TurnRequest {
    TurnRequest { input: input.to_owned(), max_tokens: Some(max_tokens), ..TurnRequest::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn i5_a_second_turn_is_refused_or_queued() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    create(&runtime, "s").await;
    let first = runtime.start_turn("s", request(&story(0), 64)).await.unwrap();
    assert_eq!(runtime.session("s").await.unwrap().status, SessionStatus::Running);
    let error = runtime.start_turn("s", request("And now?", 8)).await.unwrap_err();
    assert_eq!((error.kind, &*error.code), (ErrorKind::Conflict, "session_busy"));
    let queued = TurnRequest { on_busy: OnBusy::Enqueue, ..request("And now?", 8) };
    let second = runtime.start_turn("s", queued).await.unwrap();
    assert_eq!(second.status, TurnStatus::Queued);
    assert_eq!(runtime.wait_turn("s", &first.id).await.unwrap().status, TurnStatus::Completed);
    let second = runtime.wait_turn("s", &second.id).await.unwrap();
    assert_eq!((second.status, second.number), (TurnStatus::Completed, 2));
    let numbers: Vec<u64> =
        runtime.events("s", 0, 10_000).await.unwrap().iter().map(|event| event.seq).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>(), "events have no gaps");
}

#[tokio::test(flavor = "multi_thread")]
async fn i6_an_event_that_is_read_has_taken_effect() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    create(&runtime, "s").await;
    let mut seen = 0;
    for number in 1..=8 {
        let turn = runtime.start_turn("s", request("Hi.", 2)).await.unwrap().id;
        // Read without waiting, so that the journal is caught at every moment that it has.
        let finished = loop {
            let events = runtime.events("s", seen, 100).await.unwrap();
            seen = events.last().map_or(seen, |event| event.seq);
            let session = runtime.session("s").await.unwrap();
            assert!(
                session.last_event >= seen,
                "event {seen} was read, the session is at {}",
                session.last_event
            );
            if events.iter().any(|event| event.kind == "turn.finished") {
                break session;
            }
        };
        assert_eq!((finished.status, finished.turns), (SessionStatus::Idle, number));
        assert_eq!(runtime.turn("s", &turn).await.unwrap().status, TurnStatus::Completed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i5_one_turn_id_runs_once() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    create(&runtime, "s").await;
    let request = TurnRequest { turn_id: Some("mine".into()), ..request("Say hello.", 8) };
    let (left, right) =
        tokio::join!(runtime.start_turn("s", request.clone()), runtime.start_turn("s", request.clone()));
    assert_eq!((left.unwrap().id, right.unwrap().id), ("mine".to_owned(), "mine".to_owned()));
    runtime.wait_turn("s", "mine").await.unwrap();
    let again = runtime.start_turn("s", request).await.unwrap();
    assert_eq!(again.status, TurnStatus::Completed);
    assert_eq!(runtime.turns("s").await.unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_the_queue_of_turns_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path());
    config.sessions.queued_turns = 2;
    let runtime = Runtime::open(config).await.unwrap();
    create(&runtime, "s").await;
    runtime.start_turn("s", request(&story(0), 64)).await.unwrap();
    let queued = TurnRequest { on_busy: OnBusy::Enqueue, ..request("Go on.", 1) };
    for _ in 0..2 {
        runtime.start_turn("s", queued.clone()).await.unwrap();
    }
    let error = runtime.start_turn("s", queued).await.unwrap_err();
    assert_eq!((error.kind, &*error.code, error.retryable), (ErrorKind::Limit, "queue_full", true));
}

#[tokio::test(flavor = "multi_thread")]
async fn i8_sessions_and_messages_are_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path());
    config.sessions.sessions = 1;
    config.sessions.message_bytes = 4096;
    config.context_length = 256;
    let runtime = Runtime::open(config).await.unwrap();
    create(&runtime, "s").await;
    let error = runtime.create_session(SessionSpec::default()).await.unwrap_err();
    assert_eq!(error.code, "too_many_sessions");
    let error = runtime.start_turn("s", request(&"x".repeat(5000), 1)).await.unwrap_err();
    assert_eq!(error.code, "message_too_large");
    let error = runtime.start_turn("s", request(&"word ".repeat(400), 1)).await.unwrap_err();
    assert_eq!(error.code, "context_length_exceeded");
    assert_eq!(runtime.session("s").await.unwrap().tokens, 0, "a refused message leaves nothing behind");
    let turn = say(&runtime, "s", "Count from one upwards and never stop.", 100_000).await;
    assert!(turn.usage.output_tokens < 256, "the context bounds what is written");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_turn_keeps_its_tokens_and_the_session_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    create(&runtime, "s").await;
    let turn = runtime.start_turn("s", request(&story(0), 2000)).await.unwrap();
    loop {
        let events = runtime.events("s", 0, 10_000).await.unwrap();
        if events.iter().any(|event| event.kind == "generation.tokens") {
            break;
        }
        runtime.wait_events("s", events.last().map_or(0, |event| event.seq)).await.unwrap();
    }
    runtime.cancel_turn("s", &turn.id).await.unwrap();
    assert_eq!(runtime.wait_turn("s", &turn.id).await.unwrap().status, TurnStatus::Cancelled);
    say(&runtime, "s", "Say hello.", 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_constrained_answer_matches_its_schema() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    create(&runtime, "s").await;
    let schema = r#"{"type":"object","properties":{"city":{"type":"string","maxLength":20},"people":{"type":"integer"}},"required":["city","people"],"additionalProperties":false}"#;
    let request = TurnRequest {
        constraint: ConstraintSpec::JsonSchema(schema.to_owned()),
        ..request("Name a city and how many people live there, as JSON.", 80)
    };
    let turn = runtime.start_turn("s", request).await.unwrap();
    let turn = runtime.wait_turn("s", &turn.id).await.unwrap();
    let value: serde_json::Value = serde_json::from_str(&turn.output_text).unwrap();
    assert!(value["city"].is_string() && value["people"].is_i64(), "{value}");
    let bad = TurnRequest {
        constraint: ConstraintSpec::JsonSchema("{\"type\":".to_owned()),
        ..TurnRequest::default()
    };
    assert_eq!(runtime.start_turn("s", bad).await.unwrap_err().code, "constraint_invalid");
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_sampled_turns_repeat_with_their_seed() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    let mut answers = Vec::new();
    for (id, seed) in [("a", 7), ("b", 7), ("c", 8)] {
        create(&runtime, id).await;
        let request = TurnRequest {
            sampling: Sampling { temperature: Some(1.0), seed: Some(seed), ..Sampling::default() },
            ..request("Write a line about the sea.", 24)
        };
        let turn = runtime.start_turn(id, request).await.unwrap();
        answers.push(runtime.wait_turn(id, &turn.id).await.unwrap().output_text);
    }
    assert_eq!(answers[0], answers[1]);
    assert_ne!(answers[0], answers[2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn i6_a_turn_is_on_record_when_it_is_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    create(&runtime, "s").await;
    let turn = runtime.start_turn("s", request("Say hello.", 4)).await.unwrap();
    let events = runtime.events("s", 0, 100).await.unwrap();
    let started = events.iter().find(|event| event.kind == "turn.started").unwrap();
    assert_eq!(started.data["turn"], turn.id.as_str());
    assert_eq!(events[0].kind, "session.created");
    runtime.wait_turn("s", &turn.id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_names_are_refused_with_the_fix() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = open(directory.path()).await;
    let spec = SessionSpec { agent: Some("nobody".into()), ..SessionSpec::default() };
    assert_eq!(runtime.create_session(spec).await.unwrap_err().code, "agent_not_found");
    let spec = SessionSpec { tools: vec!["nothing".into()], ..SessionSpec::default() };
    assert_eq!(runtime.create_session(spec).await.unwrap_err().code, "tool_not_found");
    assert_eq!(runtime.session("nowhere").await.unwrap_err().code, "session_not_found");
    let second = Runtime::open(config(directory.path())).await.err().unwrap();
    assert_eq!(second.code, "data_dir_in_use");
    let model = Config { model: "no-such-model".into(), ..config(&directory.path().join("other")) };
    let error = Runtime::open(model).await.err().unwrap();
    assert!(error.message.contains("no-such-model"), "{error}");
}
