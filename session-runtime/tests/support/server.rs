//! Helpers of the API's tests: a server over a real model on a free loopback port, a plain HTTP client,
//! and a reader of server-sent events that others wrote.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use eventsource_stream::Eventsource;
use futures::StreamExt;
use serde_json::Value;
use session_runtime::api::Server;
use session_runtime::{Config, Runtime};
use tokio::sync::oneshot;

use crate::support::{MODEL, config};

/// A server and the threads it runs on.
pub struct TestServer {
    tokio: tokio::runtime::Runtime,
    pub runtime: Runtime,
    pub base: String,
    stop: Option<oneshot::Sender<()>>,
    serving: Option<tokio::task::JoinHandle<()>>,
}

impl TestServer {
    pub fn start(config: Config) -> Self {
        let tokio = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let (runtime, server) = tokio.block_on(async {
            let runtime = Runtime::open(config).await.unwrap();
            let server = Server::bind(runtime.clone(), "127.0.0.1:0".parse().unwrap(), false).await.unwrap();
            (runtime, server)
        });
        let base = server.url();
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio.spawn(async move {
            let stopped = async move { stopped.await.unwrap_or(()) };
            server.serve(stopped).await.unwrap();
        });
        Self { tokio, runtime, base, stop: Some(stop), serving: Some(serving) }
    }

    /// Announces the stop; answers under way go on.
    pub fn announce_stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// Stops server and runtime.
    pub fn stop(mut self) {
        if self.stop.is_some() {
            self.announce_stop();
        }
        let serving = self.serving.take().unwrap();
        self.tokio.block_on(async {
            serving.await.unwrap();
            self.runtime.clone().shutdown().await.unwrap();
        });
    }

    /// Runs a future of the library beside the server.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.tokio.block_on(future)
    }
}

/// The server that the tests of one file share; each uses sessions of its own.
pub fn shared() -> &'static TestServer {
    static SHARED: OnceLock<TestServer> = OnceLock::new();
    SHARED.get_or_init(|| TestServer::start(config(&fresh_dir("shared"))))
}

/// An empty directory that belongs to this process.
pub fn fresh_dir(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

/// A response with its body read.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: ureq::http::HeaderMap,
    pub text: String,
    pub json: Value,
}

impl Answer {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build().into()
}

/// Sends a request with these headers and a body as it is.
pub fn send(method: &str, url: &str, headers: &[(&str, &str)], body: Option<&str>) -> Answer {
    let mut response = open(method, url, headers, body);
    let text = response.body_mut().read_to_string().unwrap();
    let json = serde_json::from_str(&text).unwrap_or_default();
    Answer { status: response.status().as_u16(), headers: response.headers().clone(), text, json }
}

/// Sends a request and leaves the body to be read.
pub fn open(
    method: &str,
    url: &str,
    headers: &[(&str, &str)],
    body: Option<&str>,
) -> ureq::http::Response<ureq::Body> {
    let mut request = ureq::http::Request::builder().method(method).uri(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    match body {
        Some(body) => agent().run(request.body(body.to_owned()).unwrap()).unwrap(),
        None => agent().run(request.body(()).unwrap()).unwrap(),
    }
}

const JSON: (&str, &str) = ("content-type", "application/json");

pub fn get(url: &str) -> Answer {
    send("GET", url, &[], None)
}

pub fn delete(url: &str) -> Answer {
    send("DELETE", url, &[], None)
}

pub fn post(url: &str, body: &Value) -> Answer {
    send("POST", url, &[JSON], Some(&body.to_string()))
}

pub fn post_with(url: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
    let headers: Vec<_> = headers.iter().copied().chain([JSON]).collect();
    send("POST", url, &headers, Some(&body.to_string()))
}

/// One server-sent event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    pub id: String,
    pub event: String,
    pub data: String,
}

impl Sent {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap()
    }
}

/// Parses a stream of events, given in pieces as a network would cut it.
pub fn events(text: &str) -> Vec<Sent> {
    let pieces: Vec<Result<Vec<u8>, std::io::Error>> =
        text.as_bytes().chunks(7).map(|piece| Ok(piece.to_vec())).collect();
    let stream = futures::stream::iter(pieces).eventsource();
    let tokio = tokio::runtime::Builder::new_current_thread().build().unwrap();
    tokio
        .block_on(stream.collect::<Vec<_>>())
        .into_iter()
        .map(|event| event.unwrap())
        .map(|event| Sent { id: event.id, event: event.event, data: event.data })
        .collect()
}

/// Reads events until one satisfies `last`, then closes the connection.
pub fn events_until(url: &str, headers: &[(&str, &str)], last: impl Fn(&Sent) -> bool) -> Vec<Sent> {
    let headers: Vec<_> = headers.iter().copied().chain([("accept", "text/event-stream")]).collect();
    let response = open("GET", url, &headers, None);
    assert_eq!(response.status().as_u16(), 200);
    let mut reader = BufReader::new(response.into_body().into_reader());
    let mut text = String::new();
    loop {
        let mut line = String::new();
        assert!(reader.read_line(&mut line).unwrap() > 0, "the stream ended early: {text}");
        let ends_event = line.trim_end().is_empty();
        text.push_str(&line);
        if ends_event && events(&text).last().is_some_and(&last) {
            return events(&text);
        }
    }
}

/// A turn that writes until its limit, whatever the model would like.
pub fn long_turn(max_tokens: u32) -> Value {
    serde_json::json!({
        "input": "Count.",
        "max_tokens": max_tokens,
        "response_format": {"type": "regex", "pattern": "[a-z ]{100000}"},
    })
}

/// The model's name.
pub fn model() -> &'static str {
    MODEL
}
