//! Routes for operators: liveness, readiness, version, metrics.

use std::fmt::Write as _;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::context::App;
use super::problem::{Answer, Problem, ProblemBody};
use crate::kv::state::KvState;
use crate::session::view::SessionStatus;

/// The process answers.
#[utoipa::path(get, path = "/livez", operation_id = "livez", tag = "health", responses((status = 200)))]
pub(super) async fn live() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// The server takes new turns.
#[utoipa::path(
    get, path = "/readyz", operation_id = "readyz", tag = "health",
    responses((status = 200), (status = 503, body = ProblemBody))
)]
pub(super) async fn ready(State(app): State<App>) -> Answer<Value> {
    app.check_open()?;
    if let Some(reason) = app.runtime.poisoned() {
        let detail = format!("the store stopped acknowledging: {reason}; restart the server");
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable", detail));
    }
    if let Some(lost) = app.runtime.device_lost() {
        return Err(lost.into());
    }
    Ok(Json(json!({"status": "ok"})))
}

/// Like `/readyz`, with what the runtime is doing.
#[utoipa::path(
    get, path = "/health", operation_id = "health", tag = "health",
    responses((status = 200), (status = 503, body = ProblemBody))
)]
pub(super) async fn health(State(app): State<App>) -> Answer<Value> {
    let _ = ready(State(app.clone())).await?;
    let info = serde_json::to_value(app.runtime.info().await?).map_err(crate::error::Error::from)?;
    Ok(Json(json!({"status": "ok", "uptime_seconds": app.started.elapsed().as_secs(), "runtime": info})))
}

/// The version of the server.
#[utoipa::path(get, path = "/version", operation_id = "version", tag = "health", responses((status = 200)))]
pub(super) async fn version() -> Json<Value> {
    Json(json!({"name": "session-runtime", "version": env!("CARGO_PKG_VERSION")}))
}

const STATUSES: [SessionStatus; 3] =
    [SessionStatus::Idle, SessionStatus::Running, SessionStatus::RequiresAction];

/// Counters and gauges in Prometheus' text format.
#[utoipa::path(
    get, path = "/metrics", operation_id = "metrics", tag = "health",
    responses((status = 200, content_type = "text/plain"))
)]
pub(super) async fn metrics(State(app): State<App>) -> Result<impl IntoResponse, Problem> {
    let info = app.runtime.info().await?;
    let sessions = app.runtime.sessions().await;
    let mut text = Exposition::default();
    text.family("sessions", "gauge", "Sessions by status.");
    for status in STATUSES {
        let count = sessions.iter().filter(|session| session.status == status).count();
        text.sample("sessions", &[("status", &word(status))], count as u64);
    }
    text.family("sessions_kv", "gauge", "Sessions by state of their KV.");
    for state in KvState::ALL {
        let count = sessions.iter().filter(|session| session.kv.state == state).count();
        text.sample("sessions_kv", &[("kv_state", state.as_str())], count as u64);
    }
    text.family("kv_pages", "gauge", "Pages of the device pool by state.");
    let (total, free) = (info.device.pages_total, info.device.pages_free);
    text.sample("kv_pages", &[("state", "free")], free);
    text.sample("kv_pages", &[("state", "used")], total.saturating_sub(free));
    text.family("kv_bytes", "gauge", "Bytes of KV by tier.");
    let page_bytes = info.device.page_bytes;
    text.sample("kv_bytes", &[("tier", "device")], total.saturating_sub(free) * page_bytes);
    text.sample("kv_bytes", &[("tier", "host")], info.host.bytes);
    text.sample("kv_bytes", &[("tier", "disk")], info.disk.bytes);
    text.family("kv_quota_bytes", "gauge", "Most bytes of KV by tier.");
    text.sample("kv_quota_bytes", &[("tier", "device")], total * page_bytes);
    text.sample("kv_quota_bytes", &[("tier", "host")], info.host.budget);
    text.sample("kv_quota_bytes", &[("tier", "disk")], info.disk.quota);
    text.family("kv_cells", "gauge", "Saved cells by tier.");
    text.sample("kv_cells", &[("tier", "host")], info.host.cells);
    text.sample("kv_cells", &[("tier", "disk")], info.disk.cells);
    text.family(
        "tokens_total",
        "counter",
        "Tokens of prompts and answers since the start, by how their KV came about.",
    );
    text.sample("tokens_total", &[("kv", "computed")], info.device.tokens_computed);
    text.sample("tokens_total", &[("kv", "reused")], info.device.tokens_reused);
    text.family(
        "tokens_guessed_total",
        "counter",
        "Tokens guessed from histories, by whether they were right.",
    );
    let [guessed, right] = info.device.tokens_guessed;
    text.sample("tokens_guessed_total", &[("right", "true")], right);
    text.sample("tokens_guessed_total", &[("right", "false")], guessed - right);
    text.family("http_responses_total", "counter", "Responses by class of status.");
    for (class, count) in app.counters.read() {
        text.sample("http_responses_total", &[("class", class)], count);
    }
    text.family("uptime_seconds", "gauge", "Seconds since the server started.");
    text.sample("uptime_seconds", &[], app.started.elapsed().as_secs());
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text.0))
}

/// The word a status has in the API.
fn word(status: SessionStatus) -> String {
    match serde_json::to_value(status) {
        Ok(Value::String(word)) => word,
        _ => String::new(),
    }
}

/// Prometheus' text format. Labels are words of this program: they need no escaping.
#[derive(Default)]
struct Exposition(String);

impl Exposition {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ =
            writeln!(self.0, "# HELP session_runtime_{name} {help}\n# TYPE session_runtime_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: u64) {
        let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}=\"{value}\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "session_runtime_{name}{labels} {value}");
    }
}
