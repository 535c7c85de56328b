//! Routes of turns: start (wait, stream or background), read, cancel.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::context::App;
use super::extract::{Body, Context, PathOf};
use super::follow::follow;
use super::native::{CreateTurn, Empty, TurnObject};
use super::page::Page;
use super::problem::{Answer, Problem};
use super::sse;
use crate::session::view::TurnView;

fn location(view: &TurnView) -> [(HeaderName, String); 1] {
    [(header::LOCATION, format!("/v1/sessions/{}/turns/{}", view.session, view.id))]
}

/// Starts a turn and answers with its end; with `stream` (or `accept: text/event-stream`) with the
/// session's events from the turn's first one to `turn.finished`; with `background` at once.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/turns", operation_id = "createTurn", tag = "turns",
    params(("id" = String, Path)), request_body = CreateTurn,
    responses((status = 200, body = TurnObject), (status = 202, body = TurnObject), Problem)
)]
pub(super) async fn create(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    Context(context): Context,
    headers: HeaderMap,
    Body(body): Body<CreateTurn>,
) -> Result<Response, Problem> {
    app.check_open()?;
    if headers.contains_key("idempotency-key") {
        let detail =
            "the header 'Idempotency-Key' is not supported: name the turn with 'turn_id' to run it once";
        return Err(Problem::unsupported("idempotency-key", detail));
    }
    let background = body.background;
    let stream = body.stream || (sse::is_wanted(&headers) && !background);
    let view = app.runtime.start_turn(&id, body.into_request()?).await?;
    let place = location(&view);
    if background {
        return Ok((StatusCode::ACCEPTED, place, Json(TurnObject::from(view))).into_response());
    }
    if stream {
        let after = view.first_event.saturating_sub(1);
        let events = follow(app, id, after, Some(view.id));
        return Ok((place, sse::respond(events, context)).into_response());
    }
    let view = wait(&app, &id, &view.id).await?;
    Ok((place, Json(TurnObject::from(view))).into_response())
}

/// Waits for the end of a turn, or of the server.
pub(super) async fn wait(app: &App, session: &str, turn: &str) -> Result<TurnView, Problem> {
    tokio::select! {
        view = app.runtime.wait_turn(session, turn) => Ok(view?),
        () = app.drained() => Err(Problem::draining()),
    }
}

/// Lists a session's turns, oldest first.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/turns", operation_id = "listTurns", tag = "turns",
    params(("id" = String, Path)),
    responses((status = 200, body = Page<TurnObject>), Problem)
)]
pub(super) async fn list(State(app): State<App>, PathOf(id): PathOf<String>) -> Answer<Page<TurnObject>> {
    let turns = app.runtime.turns(&id).await?.into_iter().map(TurnObject::from).collect();
    Ok(Json(Page::whole(turns, |turn: &TurnObject| turn.view.id.clone())))
}

/// Reads a turn.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/turns/{turn}", operation_id = "readTurn", tag = "turns",
    params(("id" = String, Path), ("turn" = String, Path)),
    responses((status = 200, body = TurnObject), Problem)
)]
pub(super) async fn read(
    State(app): State<App>,
    PathOf((id, turn)): PathOf<(String, String)>,
) -> Answer<TurnObject> {
    Ok(Json(app.runtime.turn(&id, &turn).await?.into()))
}

/// Cancels a turn; what the model wrote so far stays in the history.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/turns/{turn}/cancel", operation_id = "cancelTurn", tag = "turns",
    params(("id" = String, Path), ("turn" = String, Path)),
    responses((status = 200, body = TurnObject), Problem)
)]
pub(super) async fn cancel(
    State(app): State<App>,
    PathOf((id, turn)): PathOf<(String, String)>,
    Body(Empty {}): Body<Empty>,
) -> Answer<TurnObject> {
    Ok(Json(app.runtime.cancel_turn(&id, &turn).await?.into()))
}
