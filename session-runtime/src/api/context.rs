//! What every request passes through: a request id, the check of where it comes from, the rendering of
//! failures, and counters. Knows no route.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use tokio::sync::watch;

use super::problem::Problem;
use crate::ids;
use crate::runtime::Runtime;

/// What the handlers share.
#[derive(Clone)]
pub(super) struct App {
    pub(super) runtime: Runtime,
    /// True once the server is stopping.
    pub(super) draining: Arc<watch::Sender<bool>>,
    pub(super) counters: Arc<Counters>,
    pub(super) started: Instant,
    /// Whether only names of this host are accepted in `Host` and `Origin`.
    pub(super) local_only: bool,
}

impl App {
    /// The loaded model's name.
    pub(super) fn model(&self) -> &str {
        &self.runtime.config().model
    }

    /// Refuses new work while the server is stopping.
    pub(super) fn check_open(&self) -> Result<(), Problem> {
        if *self.draining.borrow() { Err(Problem::draining()) } else { Ok(()) }
    }

    /// Resolves when the server is stopping.
    pub(super) async fn drained(&self) {
        // It cannot fail: `self` keeps the sending half.
        let _ = self.draining.subscribe().wait_for(|stopping| *stopping).await;
    }
}

/// Requests answered, by class of status.
#[derive(Debug, Default)]
pub(super) struct Counters {
    classes: [AtomicU64; 5],
}

impl Counters {
    fn count(&self, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(1, 5) - 1;
        self.classes[class].fetch_add(1, Ordering::Relaxed);
    }

    /// Pairs such as (`2xx`, 17).
    pub(super) fn read(&self) -> [(&'static str, u64); 5] {
        let names = ["1xx", "2xx", "3xx", "4xx", "5xx"];
        std::array::from_fn(|class| (names[class], self.classes[class].load(Ordering::Relaxed)))
    }
}

/// What a handler may read and note about its own request.
#[derive(Clone, Debug)]
pub(super) struct RequestContext {
    pub(super) id: String,
    pub(super) path: String,
    ignored: Arc<Mutex<Vec<String>>>,
}

impl RequestContext {
    /// Notes fields of the body that mean nothing here; they are listed in `x-ignored-params`.
    pub(super) fn note_ignored(&self, fields: Vec<String>) {
        if let Ok(mut ignored) = self.ignored.lock() {
            ignored.extend(fields);
        }
    }

    fn ignored_header(&self) -> Option<HeaderValue> {
        let ignored = self.ignored.lock().ok()?;
        if ignored.is_empty() {
            return None;
        }
        HeaderValue::from_str(&ignored.join(", ")).ok()
    }
}

/// The outermost layer.
pub(super) async fn envelope(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let context = RequestContext {
        id: ids::fresh("req"),
        path: request.uri().path().to_owned(),
        ignored: Arc::default(),
    };
    request.extensions_mut().insert(context.clone());
    let mut response = match check_origin(&app, request.headers(), request.uri()) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.render(&context.path, &context.id),
    };
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        if problem.status.is_server_error() {
            let (code, path, request_id) = (&problem.code, &context.path, &context.id);
            tracing::warn!(%code, %path, %request_id, "{}", problem.detail);
        }
        let allow = response.headers_mut().remove(header::ALLOW);
        response = problem.render(&context.path, &context.id);
        if let Some(allow) = allow {
            response.headers_mut().insert(header::ALLOW, allow);
        }
    }
    if let Ok(id) = HeaderValue::from_str(&context.id) {
        response.headers_mut().insert("x-request-id", id);
    }
    if let Some(ignored) = context.ignored_header() {
        response.headers_mut().insert("x-ignored-params", ignored);
    }
    app.counters.count(response.status());
    response
}

/// There are no keys yet, so a server on the loopback interface must not be reachable through a web
/// page: neither by a name that resolves to this host nor from a foreign origin.
fn check_origin(app: &App, headers: &HeaderMap, uri: &Uri) -> Result<(), Problem> {
    if !app.local_only {
        return Ok(());
    }
    let host = headers.get(header::HOST).and_then(|value| value.to_str().ok()).or_else(|| uri.host());
    if let Some(host) = host
        && !is_local_authority(host)
    {
        let detail =
            format!("requests for host '{host}' are refused: use http://127.0.0.1 or http://localhost");
        return Err(Problem::new(StatusCode::FORBIDDEN, "host_not_allowed", detail));
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let authority = origin.to_str().ok().and_then(|text| text.split_once("://")).map(|(_, rest)| rest);
    if authority.is_some_and(is_local_authority) {
        return Ok(());
    }
    let detail = "requests from pages of another site are refused: the server has no authentication";
    Err(Problem::new(StatusCode::FORBIDDEN, "origin_not_allowed", detail))
}

/// Whether `authority` (`HOST` or `HOST:PORT`) names this host.
fn is_local_authority(authority: &str) -> bool {
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Answer to a path that does not exist.
pub(super) async fn no_route(method: Method, uri: Uri) -> Problem {
    let detail =
        format!("there is no route {method} {}; GET /openapi.json lists what this server offers", uri.path());
    Problem::new(StatusCode::NOT_FOUND, "route_not_found", detail)
}

/// Answer to a method a path does not have.
pub(super) async fn no_method(method: Method, uri: Uri) -> Problem {
    let detail = format!("{} has no method {method}; the header 'allow' lists those it has", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_host_are_local() {
        for local in ["127.0.0.1:8080", "127.8.9.1", "localhost", "LOCALHOST:1", "[::1]:8080", "[::1]"] {
            assert!(is_local_authority(local), "{local}");
        }
        for foreign in
            ["example.org", "127.0.0.1.example.org", "localhost.example.org:80", "10.0.0.1", "", "[::2]:1"]
        {
            assert!(!is_local_authority(foreign), "{foreign}");
        }
    }
}
