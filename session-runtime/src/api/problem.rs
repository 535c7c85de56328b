//! The one error body: RFC 9457 members plus an OpenAI `error` object in the same JSON, so that both
//! kinds of client find what they look for. Owns the mapping from error codes to statuses and retry
//! headers; knows nothing of sessions.

use std::borrow::Cow;
use std::collections::BTreeMap;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::openapi::response::Response as Described;
use utoipa::openapi::{ContentBuilder, Ref, RefOr, ResponseBuilder};
use utoipa::{IntoResponses, ToSchema};

use crate::error::{Error, ErrorKind};

/// A failure on its way to a client. The outermost layer renders it, because only that layer knows the
/// request's id and path.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    pub(super) status: StatusCode,
    pub(super) code: Cow<'static, str>,
    pub(super) detail: String,
    /// The field of the request that is at fault.
    pub(super) param: Option<String>,
    pub(super) retryable: bool,
}

/// The JSON of a failure.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct ProblemBody {
    /// `urn:session-runtime:error:CODE`.
    r#type: String,
    /// The status in words.
    title: &'static str,
    /// HTTP status.
    status: u16,
    /// One sentence that names the thing and, where there is one, the fix.
    detail: String,
    /// Path of the request.
    instance: String,
    /// Stable code, such as `session_busy`.
    code: String,
    /// Whether the same request can succeed later.
    retryable: bool,
    /// Also in the header `x-request-id`.
    request_id: String,
    /// The same failure as OpenAI clients read it.
    error: OpenAiError,
}

/// The member OpenAI clients parse.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(super) struct OpenAiError {
    message: String,
    /// `invalid_request`, `not_found`, `too_many_requests`, `model_error` or `server_error`.
    r#type: &'static str,
    param: Option<String>,
    code: String,
}

/// What a handler answers: a JSON document or a problem.
pub(super) type Answer<T> = Result<Json<T>, Problem>;

/// How the description of the API has the problems of a route.
impl IntoResponses for Problem {
    fn responses() -> BTreeMap<String, RefOr<Described>> {
        let schema = Ref::from_schema_name(ProblemBody::name());
        let content = ContentBuilder::new().schema(Some(schema)).build();
        let response =
            ResponseBuilder::new().description("a problem").content("application/problem+json", content);
        BTreeMap::from([("4XX".to_owned(), response.build().into())])
    }
}

impl Problem {
    pub(super) fn new(
        status: StatusCode,
        code: impl Into<Cow<'static, str>>,
        detail: impl Into<String>,
    ) -> Self {
        Self { status, code: code.into(), detail: detail.into(), param: None, retryable: false }
    }

    /// A wrong request that names the field at fault.
    pub(super) fn invalid(param: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", detail).about(param)
    }

    /// A field that is known but not offered.
    pub(super) fn unsupported(param: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "unsupported_parameter", detail).about(param)
    }

    /// The server is stopping; the turn named in the sentence goes on after a restart.
    pub(super) fn draining() -> Self {
        let detail = "the server is stopping; what was acknowledged is kept: ask again after the restart";
        let mut problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, "draining", detail);
        problem.retryable = true;
        problem
    }

    /// Names the field at fault.
    pub(super) fn about(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// A failure known by its code alone, such as the one a turn ended with.
    pub(super) fn from_code(code: &str, detail: &str) -> Self {
        let status = status_of(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut problem = Self::new(status, code.to_owned(), detail);
        problem.param = param_of(code).map(str::to_owned);
        problem
    }

    fn error_type(&self) -> &'static str {
        match self.status.as_u16() {
            404 | 405 | 410 => "not_found",
            429 => "too_many_requests",
            502 | 504 => "model_error",
            500.. => "server_error",
            _ => "invalid_request",
        }
    }

    /// The body, for a response or for an error inside a stream.
    pub(super) fn body(&self, instance: &str, request_id: &str) -> ProblemBody {
        ProblemBody {
            r#type: format!("urn:session-runtime:error:{}", self.code),
            title: self.status.canonical_reason().unwrap_or("Error"),
            status: self.status.as_u16(),
            detail: self.detail.clone(),
            instance: instance.to_owned(),
            code: self.code.clone().into_owned(),
            retryable: self.retryable,
            request_id: request_id.to_owned(),
            error: OpenAiError {
                message: self.detail.clone(),
                r#type: self.error_type(),
                param: self.param.clone(),
                code: self.code.clone().into_owned(),
            },
        }
    }

    /// The final response. Stock OpenAI clients repeat 408, 409, 429 and every 5xx on their own;
    /// `x-should-retry` overrules them, so that a busy session is not asked three times.
    pub(super) fn render(&self, instance: &str, request_id: &str) -> Response {
        let mut response = (self.status, Json(self.body(instance, request_id))).into_response();
        let headers = response.headers_mut();
        if !is_openai_shaped(instance) {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        }
        let retry = self.retryable && self.status != StatusCode::CONFLICT;
        headers.insert("x-should-retry", HeaderValue::from_static(if retry { "true" } else { "false" }));
        if retry {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let status = status_of(&error.code).unwrap_or(match error.kind {
            ErrorKind::InvalidInput => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Denied => StatusCode::FORBIDDEN,
            ErrorKind::Limit => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        });
        let param = param_of(&error.code).map(str::to_owned);
        let mut problem = Self::new(status, error.code, error.message);
        problem.param = param;
        problem.retryable = error.retryable || status == StatusCode::TOO_MANY_REQUESTS;
        problem
    }
}

/// Routes whose answers must be `application/json` for OpenAI clients.
fn is_openai_shaped(path: &str) -> bool {
    path.starts_with("/v1/chat/") || path == "/v1/models" || path.starts_with("/v1/models/")
}

/// Codes whose status is not the one of their kind.
fn status_of(code: &str) -> Option<StatusCode> {
    Some(match code {
        "context_length_exceeded" | "invalid_request" | "constraint_invalid" => StatusCode::BAD_REQUEST,
        "session_not_found" | "turn_not_found" | "agent_not_found" | "tool_not_found" | "model_not_found" => {
            StatusCode::NOT_FOUND
        }
        "session_busy" | "session_exists" | "cancelled" | "outcome_unknown" => StatusCode::CONFLICT,
        "request_too_large" | "message_too_large" => StatusCode::PAYLOAD_TOO_LARGE,
        "kv_capacity" | "queue_full" | "too_many_sessions" => StatusCode::TOO_MANY_REQUESTS,
        "agent_deadline" => StatusCode::GATEWAY_TIMEOUT,
        "agent_busy" | "store_unavailable" | "stopped" | "device_lost" => StatusCode::SERVICE_UNAVAILABLE,
        code if code.starts_with("agent_") => StatusCode::BAD_GATEWAY,
        _ => return None,
    })
}

/// The field that codes of the domain are about.
fn param_of(code: &str) -> Option<&'static str> {
    Some(match code {
        "agent_not_found" => "agent",
        "tool_not_found" => "tools",
        "params_invalid" => "params",
        "constraint_invalid" => "response_format",
        "session_exists" => "id",
        code if code.starts_with("grant_") || code == "too_many_grants" => "grants",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conflict_is_never_marked_for_retry() {
        let error = Error::new(ErrorKind::Conflict, "session_busy", "busy").retryable();
        let response = Problem::from(error).render("/v1/sessions/a/turns", "req_1");
        assert_eq!(response.status(), StatusCode::CONFLICT);
        assert_eq!(response.headers()["x-should-retry"], "false");
        assert!(!response.headers().contains_key(header::RETRY_AFTER));
    }

    #[test]
    fn content_type_follows_the_route() {
        let problem = Problem::invalid("model", "wrong");
        let native = problem.render("/v1/sessions", "r");
        assert_eq!(native.headers()[header::CONTENT_TYPE], "application/problem+json");
        for path in ["/v1/chat/completions", "/v1/models", "/v1/models/x"] {
            assert_eq!(problem.render(path, "r").headers()[header::CONTENT_TYPE], "application/json");
        }
    }

    #[test]
    fn a_limit_asks_to_come_back() {
        let problem = Problem::from(Error::new(ErrorKind::Limit, "queue_full", "full"));
        let response = problem.render("/v1/sessions/a/turns", "r");
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()["x-should-retry"], "true");
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    }
}
