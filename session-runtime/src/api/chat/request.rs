//! The body of a chat completion: what it may say, and what is refused by name.

use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::Value;

use crate::api::extract::Fields;
use crate::api::native::{self, ResponseFormat, Stop};
use crate::api::problem::Problem;
use crate::session::spec::{OnBusy, Role, Sampling, TurnRequest};

/// Most messages of one request.
const MAX_MESSAGES: usize = 4096;

/// A chat completion. Fields that OpenAI clients send and this server does not offer are refused by
/// name unless their value changes nothing.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
pub(in crate::api) struct ChatRequest {
    /// The loaded model.
    pub(super) model: String,
    /// The conversation; the last message is the user's.
    messages: Vec<Message>,
    #[serde(default)]
    pub(super) stream: bool,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    /// Default 0: greedy.
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Option<Stop>,
    response_format: Option<ResponseFormat>,
    /// The session to continue, also as header `x-session-id`; made when missing.
    pub(super) session_id: Option<String>,
    #[schema(value_type = Option<u32>)]
    n: Option<Value>,
    #[schema(value_type = Option<bool>)]
    logprobs: Option<Value>,
    #[schema(value_type = Option<bool>)]
    store: Option<Value>,
    #[schema(value_type = Option<f32>)]
    frequency_penalty: Option<Value>,
    #[schema(value_type = Option<f32>)]
    presence_penalty: Option<Value>,
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Value>,
    #[schema(value_type = Option<String>)]
    tool_choice: Option<Value>,
    #[schema(value_type = Option<Object>)]
    logit_bias: Option<Value>,
    #[schema(value_type = Option<Vec<String>>)]
    modalities: Option<Value>,
    #[schema(value_type = Option<String>)]
    service_tier: Option<Value>,
}

impl Fields for ChatRequest {
    const KNOWN: &'static [&'static str] = &[
        "model",
        "messages",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
        "stop",
        "response_format",
        "session_id",
        "n",
        "logprobs",
        "store",
        "frequency_penalty",
        "presence_penalty",
        "tools",
        "tool_choice",
        "logit_bias",
        "modalities",
        "service_tier",
        "parallel_tool_calls",
    ];
    const REFUSED: &'static [(&'static str, &'static str)] = &[
        ("top_logprobs", "leave it out"),
        ("functions", "create a session with an agent and tools: POST /v1/sessions"),
        ("function_call", "create a session with an agent and tools: POST /v1/sessions"),
        ("audio", "only text is offered"),
        ("prediction", "leave it out"),
        ("web_search_options", "leave it out"),
        ("reasoning_effort", "the loaded models have no levels of reasoning"),
        ("verbosity", "ask for it in a message"),
        ("prompt_cache_options", "name a session with 'session_id' to reuse its KV"),
        ("prompt_cache_retention", "name a session with 'session_id' to reuse its KV"),
        ("moderation", "leave it out"),
    ];
}

#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(default)]
struct StreamOptions {
    /// Whether a last chunk carries the usage.
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
struct Message {
    /// `system`, `developer`, `user` or `assistant`.
    role: String,
    content: Option<Content>,
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Value>,
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize, utoipa::ToSchema)]
struct Part {
    /// `text`.
    r#type: String,
    text: Option<String>,
}

/// A message as the session keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) role: Role,
    pub(super) text: String,
}

/// A conversation whose last message is the user's.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Conversation {
    /// Leading system messages, joined.
    pub(super) instructions: Option<String>,
    /// What was said between the instructions and the last message.
    pub(super) before: Vec<Said>,
    /// The last message.
    pub(super) input: String,
}

impl ChatRequest {
    /// Refuses every known field whose value asks for something that is not offered.
    pub(super) fn check(&self) -> Result<(), Problem> {
        let agent = "create a session with an agent and tools instead: POST /v1/sessions";
        let cases: [Case<'_>; 10] = [
            ("n", &self.n, |value| value == 1, "only one choice is made: send the request again"),
            ("logprobs", &self.logprobs, |value| value == false, "leave it out"),
            (
                "store",
                &self.store,
                |value| value == false,
                "name a session with 'session_id' to keep the history",
            ),
            ("frequency_penalty", &self.frequency_penalty, is_zero, "use 'repetition_penalty'"),
            ("presence_penalty", &self.presence_penalty, is_zero, "use 'repetition_penalty'"),
            ("tools", &self.tools, is_empty, agent),
            ("tool_choice", &self.tool_choice, |value| value == "none" || value == "auto", agent),
            ("logit_bias", &self.logit_bias, is_empty, "use 'response_format' to constrain the text"),
            (
                "modalities",
                &self.modalities,
                |value| *value == serde_json::json!(["text"]),
                "only text is offered",
            ),
            (
                "service_tier",
                &self.service_tier,
                |value| value == "auto" || value == "default",
                "leave it out",
            ),
        ];
        for (name, value, changes_nothing, instead) in cases {
            if value.as_ref().is_some_and(|value| !changes_nothing(value)) {
                return Err(Problem::unsupported(name, format!("'{name}' is not supported: {instead}")));
            }
        }
        if self.session_id.as_deref().is_some_and(|id| !crate::ids::is_valid(id)) {
            return Err(invalid_session_id("session_id"));
        }
        Ok(())
    }

    /// Whether the last chunk of a stream carries the usage.
    pub(super) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }

    /// The messages, checked.
    pub(super) fn conversation(&self) -> Result<Conversation, Problem> {
        if self.messages.len() > MAX_MESSAGES {
            let detail = format!("'messages' has {} members; at most {MAX_MESSAGES}", self.messages.len());
            return Err(Problem::invalid("messages", detail));
        }
        let mut said = Vec::with_capacity(self.messages.len());
        for (place, message) in self.messages.iter().enumerate() {
            said.push(message.read(place)?);
        }
        let Some(last) = said.pop() else {
            return Err(Problem::invalid(
                "messages",
                "'messages' is empty: send at least the user's message",
            ));
        };
        if last.role != Role::User {
            let param = format!("messages[{}].role", said.len());
            return Err(Problem::invalid(param, "the last message must be the user's"));
        }
        let leading = said.iter().take_while(|message| message.role == Role::System).count();
        let instructions: Vec<String> = said.drain(..leading).map(|message| message.text).collect();
        let instructions = if instructions.is_empty() { None } else { Some(instructions.join("\n\n")) };
        Ok(Conversation { instructions, before: said, input: last.text })
    }

    /// The turn that answers `input`.
    pub(super) fn turn(self, input: String) -> Result<TurnRequest, Problem> {
        let sampling = Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        };
        native::check_sampling(&sampling, "")?;
        native::check_max_tokens("max_tokens", self.max_tokens)?;
        native::check_max_tokens("max_completion_tokens", self.max_completion_tokens)?;
        Ok(TurnRequest {
            turn_id: None,
            input,
            on_busy: OnBusy::Reject,
            sampling,
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            stop: Stop::into_list(self.stop)?,
            constraint: ResponseFormat::into_constraint(self.response_format),
        })
    }
}

/// A field, its value, whether a value changes nothing, and what to do instead.
type Case<'a> = (&'static str, &'a Option<Value>, fn(&Value) -> bool, &'static str);

/// A session's name that could not be one.
pub(super) fn invalid_session_id(param: &str) -> Problem {
    let detail = format!("'{param}' must be 1 to 64 characters of letters, digits, '_', '-' and '.'");
    Problem::invalid(param, detail)
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(serde_json::Map::is_empty)
}

impl Message {
    fn read(&self, place: usize) -> Result<Said, Problem> {
        let role = match self.role.as_str() {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" | "function" => {
                let param = format!("messages[{place}].role");
                let detail =
                    format!("'{param}' is '{}': tools run inside a session with an agent", self.role);
                return Err(Problem::unsupported(param, detail));
            }
            other => {
                let param = format!("messages[{place}].role");
                let detail =
                    format!("'{param}' is '{other}'; it must be system, developer, user or assistant");
                return Err(Problem::invalid(param, detail));
            }
        };
        if self.tool_calls.as_ref().is_some_and(|calls| !is_empty(calls)) {
            let param = format!("messages[{place}].tool_calls");
            let detail = format!("'{param}' is not supported: tools run inside a session with an agent");
            return Err(Problem::unsupported(param, detail));
        }
        let text = match &self.content {
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => join_parts(place, parts)?,
            None => {
                let param = format!("messages[{place}].content");
                let detail = format!("'{param}' is missing: it must be a string or a list of text parts");
                return Err(Problem::new(StatusCode::BAD_REQUEST, "invalid_request", detail).about(param));
            }
        };
        Ok(Said { role, text })
    }
}

fn join_parts(place: usize, parts: &[Part]) -> Result<String, Problem> {
    let mut text = String::new();
    for (number, part) in parts.iter().enumerate() {
        let param = format!("messages[{place}].content[{number}]");
        match (part.r#type.as_str(), &part.text) {
            ("text", Some(piece)) => text.push_str(piece),
            ("text", None) => {
                return Err(Problem::invalid(param.clone(), format!("'{param}' has no 'text'")));
            }
            (other, _) => {
                let detail =
                    format!("'{param}' is of type '{other}': only parts of type 'text' are supported");
                return Err(Problem::unsupported(param, detail));
            }
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request(value: Value) -> ChatRequest {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn leading_system_messages_become_instructions() {
        let request = request(json!({"model": "m", "messages": [
            {"role": "developer", "content": "a"},
            {"role": "system", "content": [{"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
            {"role": "user", "content": "e"}]}));
        let conversation = request.conversation().unwrap();
        assert_eq!(conversation.instructions.as_deref(), Some("a\n\nb"));
        let said = |role, text: &str| Said { role, text: text.to_owned() };
        assert_eq!(conversation.before, [said(Role::User, "c"), said(Role::Assistant, "d")]);
        assert_eq!(conversation.input, "e");
    }

    #[test]
    fn values_that_change_nothing_are_accepted_and_others_refused_by_name() {
        let with = |name: &str, value: Value| {
            let mut body = json!({"model": "m", "messages": []});
            body[name] = value;
            request(body).check()
        };
        for (name, fine, refused) in [
            ("n", json!(1), json!(2)),
            ("logprobs", json!(false), json!(true)),
            ("store", json!(false), json!(true)),
            ("frequency_penalty", json!(0), json!(0.5)),
            ("presence_penalty", json!(0.0), json!(1)),
            ("tools", json!([]), json!([{"type": "function"}])),
            ("tool_choice", json!("none"), json!("required")),
            ("logit_bias", json!({}), json!({"5": 1})),
            ("modalities", json!(["text"]), json!(["audio"])),
            ("service_tier", json!("auto"), json!("flex")),
        ] {
            assert!(with(name, fine).is_ok(), "{name}");
            let problem = with(name, refused).unwrap_err();
            assert_eq!(
                (problem.code.as_ref(), problem.param.as_deref()),
                ("unsupported_parameter", Some(name))
            );
        }
    }

    #[test]
    fn wrong_messages_are_named() {
        let param = |messages: Value| {
            let request = request(json!({"model": "m", "messages": messages}));
            request.conversation().unwrap_err().param
        };
        assert_eq!(param(json!([])).as_deref(), Some("messages"));
        assert_eq!(
            param(json!([{"role": "assistant", "content": "x"}])).as_deref(),
            Some("messages[0].role")
        );
        assert_eq!(param(json!([{"role": "robot", "content": "x"}])).as_deref(), Some("messages[0].role"));
        assert_eq!(param(json!([{"role": "user"}])).as_deref(), Some("messages[0].content"));
        let image = json!([{"role": "user", "content": [{"type": "image_url"}]}]);
        assert_eq!(param(image).as_deref(), Some("messages[0].content[0]"));
    }
}
