//! The REST API. Only this module knows HTTP: it turns requests into calls of [`crate::runtime::Runtime`]
//! and results into JSON or server-sent events. It holds no state of its own, so what it answers is
//! what the journal holds.
//!
//! Native routes (`/v1/sessions/...`) show sessions, turns, events, segments and KV; `/v1/chat/completions`
//! and `/v1/models` serve stock OpenAI clients. What is not built is absent (404); fields that are known
//! and not offered are refused by name.

mod catalog;
mod chat;
mod context;
mod events;
mod extract;
mod follow;
mod health;
mod kv;
mod native;
mod openapi;
mod page;
mod problem;
mod server;
mod sessions;
mod sse;
mod turns;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::DefaultBodyLimit;
use axum::routing::{MethodRouter, get, post};
use axum::{Router, middleware};
use tokio::sync::watch;

pub use server::Server;

use crate::runtime::Runtime;

type Route = (&'static str, fn() -> MethodRouter<context::App>);

/// Every path and its methods.
const ROUTES: &[Route] = &[
    ("/v1/sessions", || post(sessions::create).get(sessions::list)),
    ("/v1/sessions/{id}", || get(sessions::read).delete(sessions::delete)),
    ("/v1/sessions/{id}/fork", || post(sessions::fork)),
    ("/v1/sessions/{id}/turns", || post(turns::create).get(turns::list)),
    ("/v1/sessions/{id}/turns/{turn}", || get(turns::read)),
    ("/v1/sessions/{id}/turns/{turn}/cancel", || post(turns::cancel)),
    ("/v1/sessions/{id}/events", || get(events::list)),
    ("/v1/sessions/{id}/segments", || get(events::segments)),
    ("/v1/sessions/{id}/kv", || get(kv::read)),
    ("/v1/sessions/{id}/kv/transitions", || get(kv::transitions)),
    ("/v1/sessions/{id}/kv/evict", || post(kv::evict)),
    ("/v1/sessions/{id}/kv/restore", || post(kv::restore)),
    ("/v1/chat/completions", || post(chat::completions)),
    ("/v1/models", || get(catalog::models)),
    ("/v1/models/{id}", || get(catalog::model)),
    ("/v1/tools", || get(catalog::tools)),
    ("/v1/agents", || get(catalog::agents)),
    ("/livez", || get(health::live)),
    ("/readyz", || get(health::ready)),
    ("/health", || get(health::health)),
    ("/version", || get(health::version)),
    ("/metrics", || get(health::metrics)),
    ("/openapi.json", || get(openapi::document)),
];

/// The API as a service of an application's own server. `local_only` refuses requests that name another
/// host or come from another site's page: keep it where the server listens on the loopback interface.
pub fn router(runtime: Runtime, local_only: bool) -> Router {
    routes(runtime, Arc::new(watch::Sender::new(false)), local_only)
}

/// The API of a server that announces its stop through `draining`.
fn routes(runtime: Runtime, draining: Arc<watch::Sender<bool>>, local_only: bool) -> Router {
    let app =
        context::App { runtime, draining, counters: Arc::default(), started: Instant::now(), local_only };
    let router = ROUTES.iter().fold(Router::new(), |router, (path, methods)| router.route(path, methods()));
    router
        .fallback(context::no_route)
        .method_not_allowed_fallback(context::no_method)
        .layer(DefaultBodyLimit::max(extract::BODY_LIMIT))
        .layer(middleware::from_fn_with_state(app.clone(), context::envelope))
        .with_state(app)
}
