//! Server-sent events of a session's log: `id` is the sequence number, so that `Last-Event-ID` resumes
//! without loss or repetition.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderMap, header};
use axum::response::sse::{Event as Frame, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};

use super::context::RequestContext;
use super::problem::Problem;
use crate::session::view::Event;

/// Milliseconds a client should wait before it connects again.
const RECONNECT: Duration = Duration::from_millis(2000);
/// A comment is sent after this long without an event.
const PING: Duration = Duration::from_secs(15);

/// Whether the client asked for a stream.
pub(super) fn is_wanted(headers: &HeaderMap) -> bool {
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepts.flat_map(|value| value.split(',')).any(|kind| {
        kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("text/event-stream")
    })
}

/// The sequence number after which a client resumes.
pub(super) fn last_event_id(headers: &HeaderMap) -> Result<Option<u64>, Problem> {
    let Some(value) = headers.get("last-event-id") else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    number.map(Some).ok_or_else(|| {
        Problem::invalid("last-event-id", "'Last-Event-ID' must be the number of an event, such as 17")
    })
}

/// A keep-alive comment at fixed intervals.
pub(super) fn keep_alive() -> KeepAlive {
    KeepAlive::new().interval(PING).text("ping")
}

/// A response that sends `events` as they come.
pub(super) fn respond(
    events: impl Stream<Item = Result<Event, Problem>> + Send + 'static,
    context: RequestContext,
) -> Response {
    let opening = futures::stream::once(async { Frame::default().comment("events").retry(RECONNECT) });
    let frames = events.filter_map(move |item| {
        let frame = match item {
            Ok(event) => Some(frame_of(&event)),
            // A client that was cut off by a stop connects again and resumes.
            Err(problem) if problem.code == "draining" => None,
            Err(problem) => Some(error_frame(&problem, &context)),
        };
        async move { frame }
    });
    let frames = opening.chain(frames).map(Ok::<Frame, Infallible>);
    Sse::new(frames).keep_alive(keep_alive()).into_response()
}

fn frame_of(event: &Event) -> Frame {
    let frame = Frame::default().id(event.seq.to_string()).event(&event.kind);
    match serde_json::to_string(event) {
        Ok(json) => frame.data(json),
        Err(error) => frame.data(format!("{{\"unreadable\":{:?}}}", error.to_string())),
    }
}

/// The last frame of a stream that failed.
pub(super) fn error_frame(problem: &Problem, context: &RequestContext) -> Frame {
    let body = problem.body(&context.path, &context.id);
    let json = serde_json::to_string(&body).unwrap_or_else(|_| "{\"code\":\"internal\"}".to_owned());
    Frame::default().event("error").data(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_wanted_by_its_media_type_alone() {
        let headers = |value: &'static str| HeaderMap::from_iter([(header::ACCEPT, value.parse().unwrap())]);
        assert!(is_wanted(&headers("text/event-stream")));
        assert!(is_wanted(&headers("application/json, text/event-stream;q=0.5")));
        assert!(!is_wanted(&headers("*/*")));
        assert!(!is_wanted(&HeaderMap::new()));
    }

    #[test]
    fn a_resume_point_must_be_a_number() {
        let mut headers = HeaderMap::new();
        assert_eq!(last_event_id(&headers).unwrap(), None);
        headers.insert("last-event-id", "17".parse().unwrap());
        assert_eq!(last_event_id(&headers).unwrap(), Some(17));
        headers.insert("last-event-id", "evt_x".parse().unwrap());
        assert!(last_event_id(&headers).is_err());
    }
}
