//! Reading a request: bodies, paths and queries, with failures that name the field. A body type lists
//! the fields it knows and those it refuses by name; anything else is ignored and reported as ignored.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::context::RequestContext;
use super::problem::Problem;

/// Most bytes a request body may have.
pub(super) const BODY_LIMIT: usize = 4 * 1024 * 1024;

/// A request body.
pub(super) trait Fields: DeserializeOwned {
    /// Fields that mean something.
    const KNOWN: &'static [&'static str];
    /// Fields that other servers know and this one does not offer, each with what to do instead.
    const REFUSED: &'static [(&'static str, &'static str)] = &[];
    /// Whether an empty body stands for `{}`.
    const MAY_BE_EMPTY: bool = false;
}

/// A JSON body of type `T`.
pub(super) struct Body<T>(pub(super) T);

impl<S: Send + Sync, T: Fields> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let context = request.extensions().get::<RequestContext>().cloned();
        let is_json = is_json(&request);
        let has_type = request.headers().contains_key(header::CONTENT_TYPE);
        let bytes = Bytes::from_request(request, state).await.map_err(too_large)?;
        if T::MAY_BE_EMPTY && bytes.iter().all(u8::is_ascii_whitespace) {
            return parse(b"{}").map(|(body, _)| Self(body));
        }
        if !is_json {
            let given = if has_type { "another content type" } else { "no content type" };
            let detail = format!("the body has {given}: send JSON with 'content-type: application/json'");
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail));
        }
        let (body, ignored) = parse(&bytes)?;
        if let Some(context) = context {
            context.note_ignored(ignored);
        }
        Ok(Self(body))
    }
}

fn is_json(request: &Request) -> bool {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json") || kind.to_ascii_lowercase().ends_with("+json")
}

fn too_large(rejection: BytesRejection) -> Problem {
    if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
        let detail = format!("the body is larger than {BODY_LIMIT} bytes: send less at once");
        return Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", detail);
    }
    Problem::new(
        StatusCode::BAD_REQUEST,
        "invalid_request",
        format!("the body could not be read: {rejection}"),
    )
}

/// The body and the names of the fields that were ignored.
fn parse<T: Fields>(bytes: &[u8]) -> Result<(T, Vec<String>), Problem> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| {
        let detail = format!("the body is not JSON: {error}");
        Problem::new(StatusCode::BAD_REQUEST, "invalid_json", detail)
    })?;
    let Value::Object(members) = &value else {
        return Err(Problem::new(
            StatusCode::BAD_REQUEST,
            "invalid_request",
            "the body must be a JSON object",
        ));
    };
    for (field, instead) in T::REFUSED {
        if members.get(*field).is_some_and(|member| !member.is_null()) {
            return Err(Problem::unsupported(*field, format!("'{field}' is not supported: {instead}")));
        }
    }
    let known = |name: &str| T::KNOWN.contains(&name) || T::REFUSED.iter().any(|(field, _)| *field == name);
    let ignored: Vec<String> = members.keys().filter(|name| !known(name)).take(32).cloned().collect();
    let body = serde_path_to_error::deserialize(&value).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        match path.as_str() {
            "." | "" => Problem::new(
                StatusCode::BAD_REQUEST,
                "invalid_request",
                format!("the body is wrong: {inner}"),
            ),
            _ => Problem::invalid(path.clone(), format!("'{path}' is wrong: {inner}")),
        }
    })?;
    Ok((body, ignored))
}

/// Members of the path.
pub(super) struct PathOf<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for PathOf<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(members)) => Ok(Self(members)),
            Err(rejection) => {
                let detail = format!("the path is wrong: {rejection}");
                Err(Problem::new(StatusCode::BAD_REQUEST, "invalid_request", detail))
            }
        }
    }
}

/// Members of the query.
pub(super) struct QueryOf<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for QueryOf<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(members)) => Ok(Self(members)),
            Err(rejection) => {
                let detail = format!("the query is wrong: {}", rejection.body_text());
                Err(Problem::new(StatusCode::BAD_REQUEST, "invalid_request", detail))
            }
        }
    }
}

/// The request's own context; a fresh one cannot be missing behind the outermost layer.
pub(super) struct Context(pub(super) RequestContext);

impl<S: Send + Sync> FromRequestParts<S> for Context {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        parts.extensions.get::<RequestContext>().cloned().map(Self).ok_or_else(|| {
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the request has no context")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Sample {
        #[serde(default)]
        count: u32,
        #[serde(default)]
        inner: Vec<Inner>,
    }

    #[derive(Debug, serde::Deserialize)]
    struct Inner {
        name: String,
    }

    impl Fields for Sample {
        const KNOWN: &'static [&'static str] = &["count", "inner"];
        const REFUSED: &'static [(&'static str, &'static str)] = &[("budget", "leave it out")];
    }

    #[test]
    fn a_wrong_field_is_named_with_its_path() {
        let problem = parse::<Sample>(br#"{"inner":[{"name":"a"},{"name":3}]}"#).unwrap_err();
        assert_eq!(problem.param.as_deref(), Some("inner[1].name"));
        let problem = parse::<Sample>(br#"{"count":-1}"#).unwrap_err();
        assert_eq!(problem.param.as_deref(), Some("count"));
    }

    #[test]
    fn refused_fields_are_named_and_null_is_absent() {
        let problem = parse::<Sample>(br#"{"budget":{}}"#).unwrap_err();
        assert_eq!(
            (problem.code.as_ref(), problem.param.as_deref()),
            ("unsupported_parameter", Some("budget"))
        );
        assert!(parse::<Sample>(br#"{"budget":null}"#).is_ok());
    }

    #[test]
    fn unknown_fields_are_reported_as_ignored() {
        let (sample, ignored) =
            parse::<Sample>(br#"{"count":2,"inner":[{"name":"a"}],"colour":"red"}"#).unwrap();
        assert_eq!((sample.count, sample.inner[0].name.as_str()), (2, "a"));
        assert_eq!(ignored, ["colour"]);
    }

    #[test]
    fn not_json_and_not_an_object_are_told_apart() {
        assert_eq!(parse::<Sample>(b"{").unwrap_err().code, "invalid_json");
        assert_eq!(parse::<Sample>(b"[]").unwrap_err().code, "invalid_request");
        let deep = "[".repeat(100_000);
        assert_eq!(parse::<Sample>(deep.as_bytes()).unwrap_err().code, "invalid_json");
    }
}
