//! The description of the API, generated from the handlers.

use axum::Json;
use utoipa::OpenApi;

use super::{catalog, chat, events, health, kv, sessions, turns};

/// The whole API.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "session-runtime",
        description = "Sessions of agents whose KV cache is durable, observable state. Failures have one \
            body everywhere: RFC 9457 members plus an OpenAI `error` object.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0")
    ),
    paths(
        sessions::create,
        sessions::list,
        sessions::read,
        sessions::delete,
        sessions::fork,
        turns::create,
        turns::list,
        turns::read,
        turns::cancel,
        events::list,
        events::segments,
        kv::read,
        kv::transitions,
        kv::evict,
        kv::restore,
        chat::completions,
        catalog::models,
        catalog::model,
        catalog::tools,
        catalog::agents,
        health::live,
        health::ready,
        health::health,
        health::version,
        health::metrics,
        document,
    )
)]
struct Api;

/// This description, OpenAPI 3.1.
#[utoipa::path(
    get, path = "/openapi.json", operation_id = "openapi", tag = "health", responses((status = 200))
)]
pub(super) async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(Api::openapi())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_have_names_of_their_own() {
        let document = serde_json::to_value(Api::openapi()).unwrap();
        let mut names = Vec::new();
        for path in document["paths"].as_object().unwrap().values() {
            names.extend(path.as_object().unwrap().values().map(|method| method["operationId"].to_string()));
        }
        let count = names.len();
        names.sort();
        names.dedup();
        assert!(count > 20 && names.len() == count && !names.contains(&"null".to_owned()));
    }

    /// The routes as the router has them; the integration tests call each.
    #[test]
    fn every_route_is_described() {
        let document = Api::openapi();
        for (path, _) in super::super::ROUTES {
            assert!(document.paths.paths.contains_key(*path), "{path}");
        }
        assert_eq!(document.paths.paths.len(), super::super::ROUTES.len());
    }
}
