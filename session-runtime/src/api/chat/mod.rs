//! `/v1/chat/completions` for stock OpenAI clients. Without a session's name each request is a session
//! of its own that ends with the answer; with `x-session-id` (or `session_id`) the named session goes on,
//! so that its KV is reused instead of computed again.

mod answer;
mod cleanup;
mod history;
mod request;
mod stream;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};

use super::context::App;
use super::extract::{Body, Context};
use super::follow::follow;
use super::problem::{Problem, ProblemBody};
use super::{catalog, turns};
use crate::session::spec::SessionSpec;
use crate::session::view::{TurnError, TurnStatus};
use answer::ChatCompletion;
use cleanup::Guard;
use request::{ChatRequest, Conversation, Said};

/// Answers a conversation.
#[utoipa::path(
    post, path = "/v1/chat/completions", operation_id = "createChatCompletion", tag = "openai",
    request_body = ChatRequest,
    params(
        ("x-session-id" = Option<String>, Header, description = "the session to continue; made when missing")
    ),
    responses(
        (status = 200, description = "with `stream`: `chat.completion.chunk` events", body = ChatCompletion),
        (status = "4XX", body = ProblemBody)
    )
)]
pub(super) async fn completions(
    State(app): State<App>,
    Context(context): Context,
    headers: HeaderMap,
    Body(body): Body<ChatRequest>,
) -> Result<Response, Problem> {
    app.check_open()?;
    body.check()?;
    catalog::check_model(&app, &body.model)?;
    let named = session_name(&headers, &body)?;
    let conversation = body.conversation()?;
    let (model, stream, include_usage) = (body.model.clone(), body.stream, body.include_usage());
    let turn = body.turn(conversation.input.clone())?;
    let mut guard = prepare(&app, named, &conversation).await?;
    let view = app.runtime.start_turn(guard.session(), turn).await?;
    guard.started(&view.id);
    if stream {
        let after = view.first_event.saturating_sub(1);
        let events = follow(app, guard.session().to_owned(), after, Some(view.id.clone()));
        let chunks = answer::Chunks::new(&view.id, model, include_usage);
        return Ok(stream::respond(events, chunks, guard, context));
    }
    let view = turns::wait(&app, guard.session(), &view.id).await?;
    guard.finished();
    if view.status != TurnStatus::Completed {
        return Err(turn_problem(Some(view.status), view.error));
    }
    let kv = if guard.is_ephemeral() { None } else { app.runtime.kv(guard.session()).await.ok() };
    Ok(Json(answer::completion(model, view, kv)).into_response())
}

/// The session the request names: the body wins over the header.
fn session_name(headers: &HeaderMap, body: &ChatRequest) -> Result<Option<String>, Problem> {
    if let Some(id) = &body.session_id {
        return Ok(Some(id.clone()));
    }
    let Some(value) = headers.get("x-session-id") else { return Ok(None) };
    match value.to_str() {
        Ok(id) if crate::ids::is_valid(id) => Ok(Some(id.to_owned())),
        _ => Err(request::invalid_session_id("x-session-id")),
    }
}

/// A session that holds everything before the conversation's last message.
async fn prepare(app: &App, named: Option<String>, conversation: &Conversation) -> Result<Guard, Problem> {
    let runtime = &app.runtime;
    let ephemeral = named.is_none();
    if let Some(id) = &named
        && let Ok(view) = runtime.session(id).await
    {
        let held = history::spoken(&runtime.segments(id).await?);
        let unseen = history::unseen(&held, view.spec.instructions.as_deref(), conversation)?;
        append(app, id, &unseen).await?;
        return Ok(Guard::new(runtime.clone(), id.clone(), false));
    }
    let instructions = conversation.instructions.clone();
    let spec = SessionSpec { id: named, instructions, ephemeral, ..SessionSpec::default() };
    let view = runtime.create_session(spec).await?;
    // From here on a failure must not leave an ephemeral session behind.
    let guard = Guard::new(runtime.clone(), view.id.clone(), ephemeral);
    append(app, &view.id, &conversation.before).await?;
    Ok(guard)
}

async fn append(app: &App, session: &str, messages: &[Said]) -> Result<(), Problem> {
    for message in messages {
        app.runtime.append_message(session, message.role, &message.text).await?;
    }
    Ok(())
}

/// The failure of a turn that did not complete.
fn turn_problem(status: Option<TurnStatus>, error: Option<TurnError>) -> Problem {
    match (status, error) {
        (_, Some(error)) => {
            let mut problem = Problem::from_code(&error.code, &error.message);
            problem.retryable |= error.retryable;
            problem
        }
        (Some(TurnStatus::Cancelled), None) => {
            Problem::new(StatusCode::CONFLICT, "cancelled", "the turn was cancelled before it was complete")
        }
        _ => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the turn ended without an answer"),
    }
}
