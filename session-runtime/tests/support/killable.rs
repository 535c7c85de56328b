//! A server in a process of its own that a test kills with SIGKILL, and its session `s`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::MODEL;

pub struct Server {
    child: Child,
    port: u16,
}

impl Server {
    pub fn start(directory: &Path, options: &[&str]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Command::new(env!("CARGO_BIN_EXE_session-runtime"))
            .arg("--data-dir")
            .arg(directory)
            .args(["--model", MODEL, "--device-budget", "64MiB", "serve", "--listen"])
            .arg(format!("127.0.0.1:{port}"))
            .args(options)
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
    pub fn kill(mut self) {
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

    pub fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let mut answer = String::new();
        self.open(method, path, body, "application/json").read_to_string(&mut answer).unwrap();
        let (head, text) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 2"), "{method} {path}: {answer}");
        serde_json::from_str(text).unwrap_or(Value::Null)
    }

    pub fn events(&self) -> Vec<Value> {
        let page = self.call("GET", "/v1/sessions/s/events?limit=1000", &Value::Null);
        page["data"].as_array().unwrap().clone()
    }

    pub fn begin(&self, turn: &str, input: &str, max_tokens: u32) {
        let body = json!({"turn_id": turn, "input": input, "max_tokens": max_tokens, "background": true});
        self.call("POST", "/v1/sessions/s/turns", &body);
    }

    /// A turn once it has ended.
    pub fn ended(&self, turn: &str) -> Value {
        let path = format!("/v1/sessions/s/turns/{turn}");
        let begun = Instant::now();
        loop {
            let view = self.call("GET", &path, &Value::Null);
            if !matches!(view["status"].as_str().unwrap(), "running" | "queued") {
                return view;
            }
            assert!(begun.elapsed() < Duration::from_secs(120), "the turn does not end");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn completed(&self, turn: &str) {
        let view = self.ended(turn);
        assert_eq!(view["status"], "completed", "{view}");
    }

    /// Reads the session's event stream from its beginning until `last` is true; the events read.
    pub fn follow_until(&self, mut last: impl FnMut(&Value) -> bool) -> Vec<Value> {
        let mut stream = self.open("GET", "/v1/sessions/s/events", &Value::Null, "text/event-stream");
        let mut events: Vec<Value> = Vec::new();
        let mut line = String::new();
        loop {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0, "the stream ended early");
            let Some(data) = line.strip_prefix("data:") else { continue };
            let event = serde_json::from_str(data.trim()).unwrap();
            let found = last(&event);
            events.push(event);
            if found {
                return events;
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tokens that events sampled, in order.
pub fn streamed(events: &[Value]) -> Vec<u64> {
    let sampled: Vec<Value> =
        events.iter().filter(|event| event["type"] == "generation.tokens").cloned().collect();
    tokens(&sampled)
}

/// Tokens that events appended, in order.
pub fn tokens(events: &[Value]) -> Vec<u64> {
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
