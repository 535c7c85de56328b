//! The chat template of a model: rendering a conversation, and the frames around its messages.
//!
//! A session never renders its history again: it appends (invariant I2). So the template is read
//! once, through [`Frames`], for the text it puts before and after a message of each role. Owns
//! the Jinja environment that model templates expect (Python string methods, Python's JSON).
//! Knows no tokens' ids beyond what the tokenizer tells and no sessions.

mod frames;
mod json;

use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};

use super::checkpoint::{Checkpoint, CheckpointError};
use super::gguf::{Gguf, GgufError};
use super::tokenizer::TokenizerError;

pub use frames::{Frames, Opening, ToolCallFrame};

/// Why a template could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The metadata lacks the template.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file of the checkpoint is absent or malformed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The template is not valid, or does not render this conversation.
    #[error("chat template: {problem}")]
    Render {
        /// What the template engine said.
        problem: String,
    },
    /// The template does not append: an earlier part of its output depends on later messages.
    #[error("chat template cannot be appended to: {problem}")]
    Frames {
        /// Where it differs.
        problem: String,
    },
    /// A frame could not be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Who a message is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions from the application.
    System,
    /// The person or program that asks.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name templates use.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// A tool call inside an assistant message.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// Its arguments, a JSON object.
    pub arguments: serde_json::Value,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who it is from.
    pub role: Role,
    /// Its text.
    pub content: String,
    /// Calls, for an assistant message.
    pub tool_calls: Vec<ToolCall>,
}

impl Message {
    /// A message without tool calls.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message { role, content: content.into(), tool_calls: Vec::new() }
    }

    fn to_value(&self) -> serde_json::Value {
        let mut value = serde_json::json!({ "role": self.role.name(), "content": self.content });
        if !self.tool_calls.is_empty() {
            let call = |call: &ToolCall| {
                let function = serde_json::json!({ "name": call.name, "arguments": call.arguments });
                serde_json::json!({ "type": "function", "function": function })
            };
            value["tool_calls"] = self.tool_calls.iter().map(call).collect();
        }
        value
    }
}

/// Steps a template may take; a conversation of thousands of messages needs far fewer.
const FUEL: u64 = 10_000_000;
/// Longest template source in bytes.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Name of the template inside its environment.
const NAME: &str = "chat";

/// The chat template of a model, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("source", &self.source).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Reads and compiles the template of a model file.
    ///
    /// # Errors
    /// The file has no template, or it is not valid.
    pub fn from_gguf(gguf: &Gguf) -> Result<ChatTemplate, TemplateError> {
        let source = gguf.str("tokenizer.chat_template")?;
        let tokens = gguf.strings("tokenizer.ggml.tokens")?;
        let token = |key: &str| -> Result<String, GgufError> {
            let id = gguf.optional_u32(key)?;
            Ok(id.and_then(|id| tokens.get(id as usize)).cloned().unwrap_or_default())
        };
        ChatTemplate::new(
            source,
            token("tokenizer.ggml.bos_token_id")?,
            token("tokenizer.ggml.eos_token_id")?,
        )
    }

    /// Reads and compiles the template of a checkpoint: `chat_template.jinja`, or the one in
    /// `tokenizer_config.json` (of several, `default`).
    ///
    /// # Errors
    /// The checkpoint has no template, or it is not valid.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<ChatTemplate, TemplateError> {
        let config = checkpoint.optional_json("tokenizer_config.json")?.unwrap_or_default();
        let stored = config.get("chat_template");
        let named = stored.and_then(serde_json::Value::as_array).and_then(|templates| {
            let default = templates.iter().find(|one| one.get("name").is_some_and(|name| name == "default"));
            default?.get("template")
        });
        let source = match checkpoint.optional_text("chat_template.jinja")? {
            Some(source) => Some(source),
            None => named.or(stored).and_then(serde_json::Value::as_str).map(str::to_owned),
        };
        let source = source.ok_or_else(|| CheckpointError::Missing {
            path: checkpoint.folder().join("chat_template.jinja"),
            what: "the chat template (or one in tokenizer_config.json)",
        })?;
        let token = |name: &str| {
            let value = config.get(name);
            let text = value.and_then(|value| value.get("content").or(Some(value)));
            text.and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
        };
        ChatTemplate::new(&source, token("bos_token"), token("eos_token"))
    }

    /// Compiles a template; `bos` and `eos` are the texts of those tokens.
    ///
    /// # Errors
    /// The template is not valid.
    pub fn new(
        source: &str,
        bos: impl Into<String>,
        eos: impl Into<String>,
    ) -> Result<ChatTemplate, TemplateError> {
        if source.len() > MAX_SOURCE_BYTES {
            let problem = format!("{} bytes long (at most {MAX_SOURCE_BYTES})", source.len());
            return Err(TemplateError::Render { problem });
        }
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::filter);
        environment.add_function("raise_exception", raise_exception);
        environment.add_template_owned(NAME, source.to_string()).map_err(|error| render_error(&error))?;
        Ok(ChatTemplate { environment, source: source.to_string(), bos: bos.into(), eos: eos.into() })
    }

    /// The source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template knows tools: their descriptions, calls and results.
    pub fn supports_tools(&self) -> bool {
        self.source.contains("tool")
    }

    /// Renders a whole conversation. `tools` are function descriptions in the OpenAI shape.
    ///
    /// # Errors
    /// [`TemplateError::Render`] when the template refuses the conversation.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        self.render_with_bos(&self.bos, messages, tools, add_generation_prompt)
    }

    fn render_with_bos(
        &self,
        bos: &str,
        messages: &[Message],
        tools: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let messages: Vec<serde_json::Value> = messages.iter().map(Message::to_value).collect();
        let tools = if tools.is_empty() { Value::from(()) } else { Value::from_serialize(tools) };
        let context = minijinja::context! {
            messages => messages,
            tools => tools,
            add_generation_prompt => add_generation_prompt,
            bos_token => bos,
            eos_token => self.eos,
        };
        let template = self.environment.get_template(NAME).map_err(|error| render_error(&error))?;
        template.render(context).map_err(|error| render_error(&error))
    }
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

fn render_error(error: &minijinja::Error) -> TemplateError {
    TemplateError::Render { problem: error.to_string() }
}
