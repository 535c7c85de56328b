//! Routes of a session's KV: state, transitions, evict, restore.

use axum::Json;
use axum::extract::State;

use super::context::App;
use super::extract::{Body, PathOf};
use super::native::{Evict, Evicted, Restore, Restored, TransitionObject};
use super::page::Page;
use super::problem::{Answer, Problem};
use crate::session::view::KvView;

/// Where the session's KV is.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/kv", operation_id = "readKv", tag = "kv", params(("id" = String, Path)),
    responses((status = 200, body = KvView), Problem)
)]
pub(super) async fn read(State(app): State<App>, PathOf(id): PathOf<String>) -> Answer<KvView> {
    Ok(Json(app.runtime.kv(&id).await?))
}

/// Every change of the KV's state, oldest first.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/kv/transitions", operation_id = "listKvTransitions", tag = "kv",
    params(("id" = String, Path)),
    responses((status = 200, body = Page<TransitionObject>), Problem)
)]
pub(super) async fn transitions(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
) -> Answer<Page<TransitionObject>> {
    let transitions = app.runtime.transitions(&id).await?;
    let objects = transitions
        .into_iter()
        .map(|(seq, time_ms, transition)| TransitionObject { seq, time_ms, transition })
        .collect();
    Ok(Json(Page::whole(objects, |object: &TransitionObject| object.seq.to_string())))
}

/// Moves the KV from the device to disk; of a session that is evicted nothing is left to do.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/kv/evict", operation_id = "evictKv", tag = "kv",
    params(("id" = String, Path)), request_body = Evict,
    responses((status = 200, body = Evicted), Problem)
)]
pub(super) async fn evict(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    Body(Evict {}): Body<Evict>,
) -> Answer<Evicted> {
    app.check_open()?;
    let transition = app.runtime.evict(&id).await?;
    let kv = app.runtime.kv(&id).await?;
    Ok(Json(Evicted { transition, kv }))
}

/// Brings the KV back to the device and reports what was loaded, recomputed and refused.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/kv/restore", operation_id = "restoreKv", tag = "kv",
    params(("id" = String, Path)), request_body = Restore,
    responses((status = 200, body = Restored), Problem)
)]
pub(super) async fn restore(
    State(app): State<App>,
    PathOf(id): PathOf<String>,
    Body(body): Body<Restore>,
) -> Answer<Restored> {
    app.check_open()?;
    let mode = body.mode()?;
    let report = app.runtime.restore(&id, mode).await?;
    let kv = app.runtime.kv(&id).await?;
    Ok(Json(Restored { mode: mode.to_string(), report, kv }))
}
