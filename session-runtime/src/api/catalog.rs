//! Routes of what the host offers: models, tools, agents.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use serde_json::Value;

use super::context::App;
use super::extract::PathOf;
use super::page::Page;
use super::problem::{Answer, Problem, ProblemBody};

/// A model in OpenAI's shape, with what else there is to know.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct ModelObject {
    id: String,
    /// Always `model`.
    object: &'static str,
    /// Seconds since the Unix epoch; the time the server started.
    created: u64,
    owned_by: &'static str,
    /// Architecture, context length, vocabulary, bytes of KV per token, digest, backend.
    #[schema(value_type = Object)]
    meta: Value,
}

async fn loaded(app: &App) -> Result<ModelObject, Problem> {
    let info = app.runtime.info().await?;
    let id = info.model.alias.clone();
    let mut meta = serde_json::to_value(&info.model).map_err(crate::error::Error::from)?;
    if let Value::Object(members) = &mut meta {
        members.insert("backend".to_owned(), info.backend.clone().into());
        members.insert("numerics_class".to_owned(), info.numerics_class.clone().into());
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let created = now.saturating_sub(app.started.elapsed()).as_secs();
    Ok(ModelObject { id, object: "model", created, owned_by: "local", meta })
}

/// Refuses any model but the loaded one.
pub(super) fn check_model(app: &App, model: &str) -> Result<(), Problem> {
    let loaded = app.model();
    if model == loaded {
        return Ok(());
    }
    let detail = format!(
        "model '{model}' is not loaded; this server runs '{loaded}': use it, or start another with --model"
    );
    Err(Problem::new(StatusCode::NOT_FOUND, "model_not_found", detail).about("model"))
}

/// Lists the loaded model.
#[utoipa::path(
    get, path = "/v1/models", operation_id = "listModels", tag = "catalog",
    responses((status = 200, body = Page<ModelObject>))
)]
pub(super) async fn models(State(app): State<App>) -> Answer<Page<ModelObject>> {
    Ok(Json(Page::whole(vec![loaded(&app).await?], |model: &ModelObject| model.id.clone())))
}

/// Reads a model.
#[utoipa::path(
    get, path = "/v1/models/{id}", operation_id = "readModel", tag = "catalog",
    params(("id" = String, Path)),
    responses((status = 200, body = ModelObject), (status = 404, body = ProblemBody))
)]
pub(super) async fn model(State(app): State<App>, PathOf(id): PathOf<String>) -> Answer<ModelObject> {
    check_model(&app, &id)?;
    Ok(Json(loaded(&app).await?))
}

fn objects<T: Serialize>(items: Vec<T>) -> Result<Page<Value>, Problem> {
    let values: Result<Vec<Value>, _> = items.iter().map(serde_json::to_value).collect();
    let values = values.map_err(crate::error::Error::from)?;
    Ok(Page::whole(values, |value: &Value| value["name"].as_str().unwrap_or_default().to_owned()))
}

/// Lists the tools, those that could not be loaded with their error.
#[utoipa::path(
    get, path = "/v1/tools", operation_id = "listTools", tag = "catalog",
    responses((status = 200, body = Page<Object>))
)]
pub(super) async fn tools(State(app): State<App>) -> Answer<Page<Value>> {
    Ok(Json(objects(app.runtime.tools())?))
}

/// Lists the agents, those that could not be loaded with their error.
#[utoipa::path(
    get, path = "/v1/agents", operation_id = "listAgents", tag = "catalog",
    responses((status = 200, body = Page<Object>))
)]
pub(super) async fn agents(State(app): State<App>) -> Answer<Page<Value>> {
    Ok(Json(objects(app.runtime.agents())?))
}
