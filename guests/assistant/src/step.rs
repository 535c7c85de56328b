//! One step of a plan: a call of its tool. The form is a JSON Schema that the sampler cannot leave.

use serde_json::{Map, Value, json};
use tools_sdk::Error;
use tools_sdk::agent::chat::{self, Constraint, Options, SegmentKind};
use tools_sdk::agent::tools::Info;

use crate::prompt::is_required;

/// Most characters of a text that a schema leaves unbounded.
const TEXT_CHARACTERS: u32 = 200;
/// Most items of a list that a schema leaves unbounded.
const LIST_ITEMS: u32 = 16;
/// Most tokens of a step.
const STEP_TOKENS: u32 = 320;
/// Schemas inside each other that are still looked at.
const DEPTH: u32 = 16;

/// Lets the model write the arguments of a call of `tool` for a task; `None` when they were cut off. The task stands
/// in front of the arguments, where a small model heeds it.
pub(crate) fn write(tool: &Info, task: &str, optional_arguments: bool) -> Result<Option<Value>, Error> {
    let options = Options {
        constraint: Constraint::JsonSchema(schema(tool, task, optional_arguments).to_string()),
        temperature: Some(0.0),
        ..Options::new(SegmentKind::ToolCall, STEP_TOKENS)
    };
    let written = chat::generate(&options)?.finish()?;
    Ok(read(&written.text))
}

fn schema(tool: &Info, task: &str, optional_arguments: bool) -> Value {
    let mut call = Map::new();
    if !task.is_empty() {
        call.insert("task".to_owned(), json!({"const": task}));
    }
    call.insert("name".to_owned(), json!({"const": tool.name}));
    call.insert("arguments".to_owned(), arguments(&tool.input_schema, optional_arguments));
    object(Value::Object(call))
}

/// An object with all of these properties and no others.
pub(crate) fn object(properties: Value) -> Value {
    let names: Vec<String> =
        properties.as_object().map(|properties| properties.keys().cloned().collect()).unwrap_or_default();
    json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false})
}

fn read(text: &str) -> Option<Value> {
    serde_json::from_str::<Value>(text).ok()?.get_mut("arguments").map(Value::take)
}

/// The tool's schema with everything bounded that the model writes, and without what only people read.
fn arguments(schema: &str, optional: bool) -> Value {
    let mut schema = serde_json::from_str(schema).unwrap_or_else(|_| json!({"type": "object"}));
    if !optional {
        let whole = schema.clone();
        if let Some(Value::Object(properties)) = schema.get_mut("properties") {
            properties.retain(|name, _| is_required(&whole, name));
        }
    }
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

    const SCHEMA: &str = r#"{"type": "object", "title": "X", "properties": {
        "free": {"type": "string", "description": "d"},
        "short": {"type": "string", "maxLength": 3},
        "choice": {"type": "string", "enum": ["a"]},
        "list": {"type": "array", "items": {"type": "string"}},
        "count": {"type": "integer", "format": "uint32", "minimum": 0}
    }, "required": ["free"]}"#;

    #[test]
    fn everything_the_model_writes_is_bounded() {
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
        assert_eq!(arguments(SCHEMA, true), expected);
        let required = arguments(SCHEMA, false);
        assert_eq!(required["properties"], json!({"free": {"type": "string", "maxLength": 200}}));
        let open = json!({"type": "object", "properties": {}, "additionalProperties": false});
        assert_eq!(arguments("junk", false), open);
    }

    #[test]
    fn a_step_is_a_call_of_its_tool_for_its_task() {
        let tool = Info { name: "t".to_owned(), description: String::new(), input_schema: SCHEMA.to_owned() };
        let with = schema(&tool, "look", false);
        assert_eq!(with["properties"]["task"], json!({"const": "look"}));
        assert_eq!(with["properties"]["name"], json!({"const": "t"}));
        assert_eq!(with["required"], json!(["task", "name", "arguments"]));
        assert_eq!(schema(&tool, "", false)["required"], json!(["name", "arguments"]));
    }

    #[test]
    fn a_step_is_read_or_cut_off() {
        assert_eq!(read(r#"{"name": "t", "arguments": {"free": "x"}}"#), Some(json!({"free": "x"})));
        assert_eq!(read(r#"{"name": "t", "argum"#), None);
        assert_eq!(read(r#"{"name": "t"}"#), None);
        assert_eq!(read("[]"), None);
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
