//! Routes of sessions: create, list, read, delete, fork.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, StatusCode, header};

use super::context::App;
use super::extract::{Body, PathOf, QueryOf};
use super::native::{CreateSession, Deleted, ForkSession, IfExists, ListSessions, SessionObject};
use super::page::{self, Page};
use super::problem::{Answer, Problem};
use crate::session::view::SessionView;

type Created = (StatusCode, [(HeaderName, String); 1], Json<SessionObject>);

fn created(view: SessionView) -> Created {
    let place = format!("/v1/sessions/{}", view.id);
    (StatusCode::CREATED, [(header::LOCATION, place)], Json(SessionObject::new(view)))
}

/// Makes a session.
#[utoipa::path(
    post, path = "/v1/sessions", operation_id = "createSession", tag = "sessions",
    request_body = CreateSession,
    responses((status = 201, body = SessionObject), (status = 200, description = "existed", body = SessionObject), Problem)
)]
pub(super) async fn create(
    State(app): State<App>,
    Body(body): Body<CreateSession>,
) -> Result<Created, Problem> {
    app.check_open()?;
    if let Some(model) = &body.model {
        super::catalog::check_model(&app, model)?;
    }
    let (id, if_exists) = (body.id.clone(), body.if_exists);
    match app.runtime.create_session(body.into_spec()?).await {
        Ok(view) => Ok(created(view)),
        Err(error) if error.code == "session_exists" && if_exists == IfExists::Return => {
            let view = app.runtime.session(&id.unwrap_or_default()).await?;
            let mut answer = created(view);
            answer.0 = StatusCode::OK;
            Ok(answer)
        }
        Err(error) => Err(error.into()),
    }
}

/// Lists sessions.
#[utoipa::path(
    get, path = "/v1/sessions", operation_id = "listSessions", tag = "sessions", params(ListSessions),
    responses((status = 200, body = Page<SessionObject>), Problem)
)]
pub(super) async fn list(
    State(app): State<App>,
    QueryOf(query): QueryOf<ListSessions>,
) -> Answer<Page<SessionObject>> {
    let limit = page::limit(query.limit, 100, 1000)?;
    let mut views = app.runtime.sessions().await;
    views.retain(|view| {
        query.status.is_none_or(|status| view.status == status)
            && query.kv_state.is_none_or(|state| view.kv.state == state)
            && query.agent.as_ref().is_none_or(|agent| view.spec.agent.as_ref() == Some(agent))
    });
    let objects = views.into_iter().map(SessionObject::new).collect();
    let id = |object: &SessionObject| object.view.id.clone();
    Ok(Json(page::window(objects, query.order, query.after.as_deref(), limit, id)?))
}

/// Reads a session.
#[utoipa::path(
    get, path = "/v1/sessions/{id}", operation_id = "readSession", tag = "sessions",
    params(("id" = String, Path)),
    responses((status = 200, body = SessionObject), Problem)
)]
pub(super) async fn read(State(app): State<App>, PathOf(id): PathOf<String>) -> Answer<SessionObject> {
    let view = app.runtime.session(&id).await?;
    Ok(Json(SessionObject::new(view)))
}

/// Deletes a session with its history, KV and log.
#[utoipa::path(
    delete, path = "/v1/sessions/{id}", operation_id = "deleteSession", tag = "sessions",
    params(("id" = String, Path)),
    responses((status = 200, body = Deleted), Problem)
)]
pub(super) async fn delete(State(app): State<App>, PathOf(id): PathOf<String>) -> Answer<Deleted> {
    app.runtime.delete_session(&id).await?;
    Ok(Json(Deleted { id, object: "session.deleted", deleted: true }))
}

/// Makes a session that continues from the same history and shares its KV.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/fork", operation_id = "forkSession", tag = "sessions",
    params(("id" = String, Path)), request_body = ForkSession,
    responses((status = 201, body = SessionObject), Problem)
)]
pub(super) async fn fork(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    Body(body): Body<ForkSession>,
) -> Result<Created, Problem> {
    app.check_open()?;
    let view = app.runtime.fork_session(&id, body.id, body.title).await?;
    Ok(created(view))
}
