//! One call of a tool: the form the model fills in, and what it is shown of the result.

use serde_json::{Map, Value, json};
use tools_sdk::Error;
use tools_sdk::agent::chat::{self, Constraint, Options, SegmentKind};
use tools_sdk::agent::tools::Info;

/// How the models' own templates begin a call. The host closes it in the same form.
const OPENING: &str = "<tool_call>\n";
/// Most characters of a text that a schema leaves unbounded.
const TEXT_CHARACTERS: u32 = 200;
/// Most items of a list that a schema leaves unbounded.
const LIST_ITEMS: u32 = 16;
/// Most tokens of a call.
const CALL_TOKENS: u32 = 320;
/// Schemas inside each other that are still looked at.
const DEPTH: u32 = 16;

/// Lets the model fill in the arguments; `None` when it did not get to the end.
pub(crate) fn write(tool: &Info) -> Result<Option<Value>, Error> {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments(&tool.input_schema)},
        "required": ["name", "arguments"],
        "additionalProperties": false,
    });
    let options = Options {
        constraint: Constraint::JsonSchema(schema.to_string()),
        temperature: Some(0.0),
        prefix: OPENING.to_owned(),
        ..Options::new(SegmentKind::ToolCall, CALL_TOKENS)
    };
    let written = chat::generate(&options)?.finish()?;
    let call: Option<Value> = serde_json::from_str(&written.text).ok();
    Ok(call.and_then(|call| call.get("arguments").cloned()))
}

/// The tool's schema with everything bounded that the model writes, and without what only people read.
fn arguments(schema: &str) -> Value {
    let mut schema = serde_json::from_str(schema).unwrap_or_else(|_| json!({"type": "object"}));
    bound(&mut schema, DEPTH);
    schema
}

fn bound(schema: &mut Value, depth: u32) {
    let (Value::Object(schema), Some(depth)) = (schema, depth.checked_sub(1)) else { return };
    for silent in ["description", "title", "default", "format", "examples", "$schema"] {
        schema.remove(silent);
    }
    match schema.get("type").and_then(Value::as_str) {
        Some("string") if !schema.contains_key("enum") && !schema.contains_key("const") => {
            schema.entry("maxLength").or_insert_with(|| json!(TEXT_CHARACTERS));
        }
        Some("array") => {
            schema.entry("maxItems").or_insert_with(|| json!(LIST_ITEMS));
        }
        Some("object") => {
            schema.entry("properties").or_insert_with(|| Value::Object(Map::new()));
            schema.entry("additionalProperties").or_insert(Value::Bool(false));
        }
        _ => {}
    }
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        for property in properties.values_mut() {
            bound(property, depth);
        }
    }
    if let Some(items) = schema.get_mut("items") {
        bound(items, depth);
    }
    for choice in ["anyOf", "oneOf", "allOf"] {
        if let Some(Value::Array(schemas)) = schema.get_mut(choice) {
            for schema in schemas {
                bound(schema, depth);
            }
        }
    }
}

/// What the model is shown of a result: at most `limit` characters, with a note when that is not all.
pub(crate) fn shown(result: &Result<String, Error>, limit: u32) -> String {
    let text = match result {
        Ok(text) => text.clone(),
        Err(error) => format!("Error: {error}"),
    };
    let limit = limit as usize;
    match text.char_indices().nth(limit) {
        Some((cut, _)) => {
            let left = text.chars().count() - limit;
            format!("{}\n[{left} more characters are not shown]", text.get(..cut).unwrap_or_default())
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_the_model_writes_is_bounded() {
        let schema = r#"{"type": "object", "title": "X", "properties": {
            "free": {"type": "string", "description": "d"},
            "short": {"type": "string", "maxLength": 3},
            "choice": {"type": "string", "enum": ["a"]},
            "list": {"type": "array", "items": {"type": "string"}},
            "count": {"type": "integer", "format": "uint32", "minimum": 0}
        }, "required": ["free"]}"#;
        let expected = json!({
            "type": "object",
            "properties": {
                "free": {"type": "string", "maxLength": 200},
                "short": {"type": "string", "maxLength": 3},
                "choice": {"type": "string", "enum": ["a"]},
                "list": {"type": "array", "items": {"type": "string", "maxLength": 200}, "maxItems": 16},
                "count": {"type": "integer", "minimum": 0},
            },
            "required": ["free"],
            "additionalProperties": false,
        });
        assert_eq!(arguments(schema), expected);
        assert_eq!(
            arguments("junk"),
            json!({"type": "object", "properties": {}, "additionalProperties": false})
        );
    }

    #[test]
    fn results_are_cut_between_characters_and_failures_are_told() {
        assert_eq!(shown(&Ok("short".to_owned()), 100), "short");
        assert_eq!(
            shown(&Ok("\u{20ac}".repeat(5)), 3),
            "\u{20ac}\u{20ac}\u{20ac}\n[2 more characters are not shown]"
        );
        let error = Error::not_found("no_such_file", "there is no a.txt");
        assert_eq!(shown(&Err(error), 100), "Error: no_such_file: there is no a.txt");
    }
}
