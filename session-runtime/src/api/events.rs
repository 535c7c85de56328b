//! Routes of a session's log: events as pages or as a resumable stream, and segments.

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::context::App;
use super::extract::{Context, PathOf, QueryOf};
use super::follow::follow;
use super::page::{self, Page};
use super::problem::{Answer, Problem};
use super::sse;
use crate::session::view::{Event, SegmentView};

/// Query of a session's events.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ListEvents {
    /// Only events with a higher sequence number. In a stream `Last-Event-ID` wins.
    after: Option<u64>,
    /// From 1 to 1000; default 100. A stream has no limit.
    limit: Option<u32>,
}

/// The session's log: a page of it, or with `accept: text/event-stream` all of it and what follows.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/events", operation_id = "listEvents", tag = "events",
    params(("id" = String, Path), ListEvents),
    responses((status = 200, body = Page<Event>), Problem)
)]
pub(super) async fn list(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    Context(context): Context,
    headers: HeaderMap,
    QueryOf(query): QueryOf<ListEvents>,
) -> Result<Response, Problem> {
    let limit = page::limit(query.limit, 100, 1000)?;
    let after = query.after.unwrap_or(0);
    if !sse::is_wanted(&headers) {
        let mut events = app.runtime.events(&id, after, limit + 1).await?;
        let has_more = events.len() > limit;
        events.truncate(limit);
        return Ok(Json(Page::new(events, has_more, |event: &Event| event.seq.to_string())).into_response());
    }
    let after = sse::last_event_id(&headers)?.unwrap_or(after);
    let last = app.runtime.session(&id).await?.last_event;
    if after > last {
        let detail = format!("the log of session '{id}' ends at event {last}; {after} is not in it");
        return Err(Problem::invalid("after", detail));
    }
    Ok(sse::respond(follow(app, id, after, None), context))
}

/// The session's segments, in token order.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/segments", operation_id = "listSegments", tag = "events",
    params(("id" = String, Path)),
    responses((status = 200, body = Page<SegmentView>), Problem)
)]
pub(super) async fn segments(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
) -> Answer<Page<SegmentView>> {
    let segments = app.runtime.segments(&id).await?;
    Ok(Json(Page::whole(segments, |segment: &SegmentView| segment.id.clone())))
}
