//! A server killed with SIGKILL in the middle of a turn: what was streamed is on record, and the turn
//! goes on with exactly the tokens of a server that was not killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{MODEL, SECOND, story};

struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(directory: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Command::new(env!("CARGO_BIN_EXE_session-runtime"))
            .arg("--data-dir")
            .arg(directory)
            .args(["--model", MODEL, "--device-budget", "64MiB", "serve", "--listen"])
            .arg(format!("127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { child, port };
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(120), "the server does not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        server
    }

    /// SIGKILL: nothing is flushed, nothing is said.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn open(&self, method: &str, path: &str, body: &Value, accept: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\naccept: {accept}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        BufReader::new(stream)
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let mut answer = String::new();
        self.open(method, path, body, "application/json").read_to_string(&mut answer).unwrap();
        let (head, text) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 2"), "{method} {path}: {answer}");
        serde_json::from_str(text).unwrap_or(Value::Null)
    }

    fn events(&self) -> Vec<Value> {
        let page = self.call("GET", "/v1/sessions/s/events?limit=1000", &Value::Null);
        page["data"].as_array().unwrap().clone()
    }

    fn wait_turn(&self, turn: &str) {
        let path = format!("/v1/sessions/s/turns/{turn}");
        let begun = Instant::now();
        loop {
            match self.call("GET", &path, &Value::Null)["status"].as_str().unwrap() {
                "running" | "queued" => std::thread::sleep(Duration::from_millis(100)),
                "completed" => return,
                other => panic!("the turn is {other}"),
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "the turn does not end");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tokens that events appended, in order.
fn tokens(events: &[Value]) -> Vec<u64> {
    events
        .iter()
        .filter(|event| {
            let kind = event["type"].as_str().unwrap();
            kind == "segment.appended" || kind.starts_with("generation.")
        })
        .flat_map(|event| event["data"]["ids"].as_array().cloned().unwrap_or_default())
        .filter_map(|id| id.as_u64())
        .collect()
}

fn begin(server: &Server, turn: &str, input: &str, max_tokens: u32) {
    let body = json!({"turn_id": turn, "input": input, "max_tokens": max_tokens, "background": true});
    server.call("POST", "/v1/sessions/s/turns", &body);
}

/// Reads the session's event stream until `count` token events came; the last sequence number seen.
fn stream_until(server: &Server, count: usize) -> (u64, usize) {
    let mut stream = server.open("GET", "/v1/sessions/s/events", &Value::Null, "text/event-stream");
    let (mut seen, mut last, mut streamed) = (0, 0, 0);
    let mut line = String::new();
    while seen < count {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the stream ended early");
        if let Some(id) = line.strip_prefix("id:") {
            last = id.trim().parse().unwrap();
        }
        if let Some(data) = line.strip_prefix("data:") {
            let event: Value = serde_json::from_str(data.trim()).unwrap();
            if event["type"] == "generation.tokens" {
                seen += 1;
                streamed += event["data"]["ids"].as_array().unwrap().len();
            }
        }
    }
    (last, streamed)
}

#[test]
fn i6_a_turn_killed_in_the_middle_goes_on_exactly() {
    let control = {
        let directory = tempfile::tempdir().unwrap();
        let server = Server::start(directory.path());
        server.call("POST", "/v1/sessions", &json!({"id": "s"}));
        for (turn, input, max_tokens) in [("one", story(1), 16), ("two", SECOND.to_owned(), 120)] {
            begin(&server, turn, &input, max_tokens);
            server.wait_turn(turn);
        }
        tokens(&server.events())
    };
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path());
    server.call("POST", "/v1/sessions", &json!({"id": "s"}));
    begin(&server, "one", &story(1), 16);
    server.wait_turn("one");
    begin(&server, "two", SECOND, 120);
    let (last, streamed) = stream_until(&server, 5);
    server.kill();

    let server = Server::start(directory.path());
    let sessions = server.call("GET", "/v1/sessions", &Value::Null);
    assert_eq!(sessions["data"][0]["id"], "s");
    let events = server.events();
    let streamed_again: usize = events
        .iter()
        .filter(|event| event["type"] == "generation.tokens" && event["seq"].as_u64().unwrap() <= last)
        .map(|event| event["data"]["ids"].as_array().unwrap().len())
        .sum();
    assert!(streamed_again >= streamed, "what was streamed is on record");
    server.wait_turn("two");
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
