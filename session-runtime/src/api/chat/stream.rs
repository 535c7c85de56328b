//! A turn's events as the chunks of a streamed chat completion.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::pin::Pin;

use axum::response::sse::{Event as Frame, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use serde_json::Value;

use super::answer::Chunks;
use super::cleanup::Guard;
use crate::api::context::RequestContext;
use crate::api::problem::Problem;
use crate::api::sse;
use crate::session::spec::{Finish, SegmentKind};
use crate::session::view::{Event, TurnError, TurnStatus, Usage};

/// What is left to send.
struct Writer {
    events: Pin<Box<dyn Stream<Item = Result<Event, Problem>> + Send>>,
    chunks: Chunks,
    /// What each segment of the turn holds.
    kinds: HashMap<String, SegmentKind>,
    /// Why the last message ended.
    last_finish: Option<Finish>,
    ready: VecDeque<Frame>,
    context: RequestContext,
    /// Ends an ephemeral session when the stream ends or its client leaves.
    guard: Guard,
    done: bool,
}

/// Streams the answer to the turn `turn` of `session`, whose events are `events`.
pub(super) fn respond(
    events: impl Stream<Item = Result<Event, Problem>> + Send + 'static,
    chunks: Chunks,
    guard: Guard,
    context: RequestContext,
) -> Response {
    let role = frame(&chunks.role(guard.session(), guard.turn()));
    let writer = Writer {
        events: Box::pin(events),
        chunks,
        kinds: HashMap::new(),
        last_finish: None,
        ready: VecDeque::from([role]),
        context,
        guard,
        done: false,
    };
    let frames = futures::stream::unfold(writer, |mut writer| async move {
        let frame = writer.next().await?;
        Some((Ok::<Frame, Infallible>(frame), writer))
    });
    Sse::new(frames).keep_alive(sse::keep_alive()).into_response()
}

fn frame(chunk: &Value) -> Frame {
    Frame::default().data(chunk.to_string())
}

impl Writer {
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            if self.done {
                return None;
            }
            match self.events.next().await {
                Some(Ok(event)) => self.take(&event),
                Some(Err(problem)) => self.fail(&problem),
                None => self.done = true,
            }
        }
    }

    fn take(&mut self, event: &Event) {
        let text = |name: &str| event.data.get(name).and_then(Value::as_str).unwrap_or_default();
        match event.kind.as_str() {
            "generation.started" => {
                let kind = event.data.get("kind").cloned().unwrap_or_default();
                if let Ok(kind) = serde_json::from_value(kind) {
                    self.kinds.insert(text("segment").to_owned(), kind);
                    self.say(text("segment"), text("text"));
                }
            }
            "generation.tokens" => self.say(text("segment"), text("text")),
            "generation.finished" => {
                let finish = event.data.get("finish").cloned().unwrap_or_default();
                self.last_finish = serde_json::from_value(finish).ok();
            }
            "turn.finished" => self.finish(event),
            _ => {}
        }
    }

    fn say(&mut self, segment: &str, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.kinds.get(segment) {
            Some(SegmentKind::Answer) => self.ready.push_back(frame(&self.chunks.content(text))),
            Some(SegmentKind::Reasoning) => self.ready.push_back(frame(&self.chunks.reasoning(text))),
            _ => {}
        }
    }

    fn finish(&mut self, event: &Event) {
        let member = |name: &str| event.data.get(name).cloned().unwrap_or_default();
        let status: Option<TurnStatus> = serde_json::from_value(member("status")).ok();
        if status != Some(TurnStatus::Completed) {
            let error: Option<TurnError> = serde_json::from_value(member("error")).ok().flatten();
            self.fail(&super::turn_problem(status, error));
            return;
        }
        let usage: Usage = serde_json::from_value(member("usage")).unwrap_or_default();
        self.ready.push_back(frame(&self.chunks.finish(self.last_finish)));
        self.ready.extend(self.chunks.usage(&usage).as_ref().map(frame));
        self.ready.push_back(Frame::default().data("[DONE]"));
        self.guard.finished();
        self.done = true;
    }

    /// Stock clients raise an error when a frame has a member `error`.
    fn fail(&mut self, problem: &Problem) {
        let body = problem.body(&self.context.path, &self.context.id);
        let json =
            serde_json::to_string(&body).unwrap_or_else(|_| r#"{"error":{"code":"internal"}}"#.to_owned());
        self.ready.push_back(Frame::default().data(json));
        self.done = true;
    }
}
