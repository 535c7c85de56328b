//! A server killed with SIGKILL in the middle of a turn: what was streamed is on record, and the turn
//! goes on with exactly the tokens of a server that was not killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/killable.rs"]
mod killable;
mod support;

use killable::{Server, streamed, tokens};
use serde_json::{Value, json};
use support::{SECOND, story};

#[test]
fn i6_a_turn_killed_in_the_middle_goes_on_exactly() {
    let control = {
        let directory = tempfile::tempdir().unwrap();
        let server = Server::start(directory.path(), &[]);
        server.call("POST", "/v1/sessions", &json!({"id": "s"}));
        for (turn, input, max_tokens) in [("one", story(1), 16), ("two", SECOND.to_owned(), 120)] {
            server.begin(turn, &input, max_tokens);
            server.completed(turn);
        }
        tokens(&server.events())
    };
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path(), &[]);
    server.call("POST", "/v1/sessions", &json!({"id": "s"}));
    server.begin("one", &story(1), 16);
    server.completed("one");
    server.begin("two", SECOND, 120);
    let mut pieces = 0;
    let seen = server.follow_until(|event| {
        pieces += usize::from(event["type"] == "generation.tokens" && event["data"]["turn"] == "two");
        pieces == 5
    });
    server.kill();

    let server = Server::start(directory.path(), &[]);
    let sessions = server.call("GET", "/v1/sessions", &Value::Null);
    assert_eq!(sessions["data"][0]["id"], "s");
    let events = server.events();
    let last = seen.last().unwrap()["seq"].as_u64().unwrap() as usize;
    assert_eq!(streamed(&events[..last]), streamed(&seen), "what was streamed is on record");
    server.completed("two");
    let events = server.events();
    assert_eq!(tokens(&events), control, "the turn went on exactly");
    let restore = events.iter().rfind(|event| event["type"] == "kv.restore").unwrap();
    assert!(
        restore["data"]["tokens_loaded"].as_u64().unwrap() > 0,
        "KV of the first turn came from disk: {restore}"
    );
    let starts = events.iter().filter(|event| event["type"] == "turn.started").count();
    assert_eq!(starts, 2, "no turn began twice");
}
