//! The REST client of the commands. It knows paths and JSON, nothing of the server's inside: the same
//! code talks to a server of another process and to one of this process.

use std::io::BufReader;
use std::time::Duration;

use serde_json::Value;
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body, BodyReader};

use super::failure::{Failure, Outcome};
use super::sse::Reader;

/// Most bytes of one JSON answer.
const ANSWER_LIMIT: u64 = 256 * 1024 * 1024;

/// A server's address and a pool of connections to it.
#[derive(Clone, Debug)]
pub(super) struct Client {
    base: String,
    agent: Agent,
}

/// The events of a response.
pub(super) type Events = Reader<BufReader<BodyReader<'static>>>;

impl Client {
    /// A client of the server at `base`, such as `http://127.0.0.1:8080`.
    pub(super) fn new(base: impl Into<String>) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // The server is on this host: no proxy lies between.
            .proxy(None)
            .timeout_connect(Some(Duration::from_secs(5)))
            .build();
        Self { base: base.into(), agent: config.into() }
    }

    /// The server's address.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    /// Reads a resource.
    pub(super) fn get(&self, path: &str) -> Outcome<Value> {
        json(self.agent.get(self.url(path)).call().map_err(|error| self.lost(&error))?)
    }

    /// Deletes a resource.
    pub(super) fn delete(&self, path: &str) -> Outcome<Value> {
        json(self.agent.delete(self.url(path)).call().map_err(|error| self.lost(&error))?)
    }

    /// Sends `body` and waits for the answer.
    pub(super) fn post(&self, path: &str, body: &Value) -> Outcome<Value> {
        json(self.agent.post(self.url(path)).send_json(body).map_err(|error| self.lost(&error))?)
    }

    /// Sends `body` and reads the answer's events.
    pub(super) fn post_events(&self, path: &str, body: &Value) -> Outcome<Events> {
        let request = self.agent.post(self.url(path)).header("accept", "text/event-stream");
        events(request.send_json(body).map_err(|error| self.lost(&error))?)
    }

    /// Reads a resource's events.
    pub(super) fn get_events(&self, path: &str) -> Outcome<Events> {
        let request = self.agent.get(self.url(path)).header("accept", "text/event-stream");
        events(request.call().map_err(|error| self.lost(&error))?)
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn lost(&self, error: &ureq::Error) -> Failure {
        Failure::new(format!(
            "the server at {} does not answer ({error}): start it again, or run the command again",
            self.base
        ))
    }
}

/// `id` as one member of a path.
pub(super) fn member(id: &str) -> Outcome<&str> {
    if crate::ids::is_valid(id) {
        return Ok(id);
    }
    Err(Failure::usage(format!("'{id}' is not an id: ids have letters, digits, '_', '-' and '.' only")))
}

fn json(mut response: Response<Body>) -> Outcome<Value> {
    let status = response.status();
    let text = response.body_mut().with_config().limit(ANSWER_LIMIT).read_to_string();
    let text =
        text.map_err(|error| Failure::new(format!("the server's answer could not be read: {error}")))?;
    let value = serde_json::from_str::<Value>(&text);
    if status.is_success() {
        return value.map_err(|error| Failure::new(format!("the server's answer is not JSON: {error}")));
    }
    Err(refused(status, &value.unwrap_or_default()))
}

fn events(response: Response<Body>) -> Outcome<Events> {
    if !response.status().is_success() {
        return match json(response) {
            Err(failure) => Err(failure),
            Ok(_) => Err(Failure::new("the server's answer is no stream of events")),
        };
    }
    Ok(Reader::new(BufReader::new(response.into_body().into_reader())))
}

fn refused(status: StatusCode, body: &Value) -> Failure {
    match body["detail"].as_str() {
        Some(detail) => Failure::new(detail),
        None => Failure::new(format!("the server answered {status}")),
    }
}
