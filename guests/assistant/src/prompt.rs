//! What the model is told, in as few tokens as it can do with.

use serde_json::{Map, Value};
use tools_sdk::agent::tools::Info;

use crate::{Params, ToolPolicy};

/// Who the assistant is when the session does not say.
const DEFAULT_INSTRUCTIONS: &str = "You are a helpful assistant.";

/// The system message: instructions, then the tools with the names of their arguments.
pub(crate) fn system(params: &Params, tools: &[Info]) -> String {
    let instructions = params.instructions.trim();
    let mut text = if instructions.is_empty() { DEFAULT_INSTRUCTIONS } else { instructions }.to_owned();
    if tools.is_empty() || params.tool_policy == ToolPolicy::Never {
        return text;
    }
    text.push_str("\n\nTools you can call:");
    for tool in tools {
        text.push_str(&format!("\n- {} {}: {}", tool.name, arguments(&tool.input_schema), tool.description));
    }
    text.push_str("\n\nCall one tool at a time. Use only numbers and facts from the user and the tools.");
    text
}

/// The arguments of a tool in short: names, and what they hold.
fn arguments(schema: &str) -> String {
    let schema: Value = serde_json::from_str(schema).unwrap_or_default();
    let none = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let members: Vec<String> =
        properties.iter().map(|(name, property)| format!("\"{name}\": {}", kind(property))).collect();
    format!("{{{}}}", members.join(", "))
}

fn kind(property: &Value) -> String {
    if let Some(choices) = property.get("enum").and_then(Value::as_array) {
        return choices.iter().map(Value::to_string).collect::<Vec<_>>().join("|");
    }
    match property.get("type") {
        Some(Value::String(kind)) => kind.clone(),
        // A value that may be null is the first of its types.
        Some(Value::Array(kinds)) => kinds.first().and_then(Value::as_str).unwrap_or("value").to_owned(),
        _ => "value".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_listed_with_their_arguments() {
        let schema = r#"{"type": "object", "properties": {
            "mode": {"type": "string", "enum": ["a", "b"]},
            "count": {"type": ["integer", "null"]},
            "any": {}
        }}"#;
        let tool = Info {
            name: "t".to_owned(),
            description: "Does it.".to_owned(),
            input_schema: schema.to_owned(),
        };
        let text = system(&Params::default(), std::slice::from_ref(&tool));
        assert!(text.starts_with("You are a helpful assistant.\n\nTools you can call:\n"), "{text}");
        assert!(
            text.contains("\n- t {\"mode\": \"a\"|\"b\", \"count\": integer, \"any\": value}: Does it."),
            "{text}"
        );
        let never = Params {
            tool_policy: ToolPolicy::Never,
            instructions: "Be brief.".to_owned(),
            ..Params::default()
        };
        assert_eq!(system(&never, &[tool]), "Be brief.");
        assert_eq!(arguments("not json"), "{}");
    }
}
