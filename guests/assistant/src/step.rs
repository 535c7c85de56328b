//! One step: a call of one of the tools on offer, or the decision to answer. The form is a JSON Schema that the
//! sampler cannot leave.

use serde_json::{Map, Value, json};
use tools_sdk::Error;
use tools_sdk::agent::chat::{self, Constraint, Options, SegmentKind};
use tools_sdk::agent::tools::Info;

use crate::prompt::is_required;

/// The name that stands for no more calls.
const ANSWER: &str = "answer";
/// Most characters of a text that a schema leaves unbounded.
const TEXT_CHARACTERS: u32 = 200;
/// Most items of a list that a schema leaves unbounded.
const LIST_ITEMS: u32 = 16;
/// Most tokens of a step.
const STEP_TOKENS: u32 = 320;
/// Schemas inside each other that are still looked at.
const DEPTH: u32 = 16;

/// What the model decided.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// To call a tool.
    Call {
        /// Which.
        name: String,
        /// With what.
        arguments: Value,
    },
    /// To answer.
    Answer,
    /// Nothing that can be used: the step was cut off.
    CutOff,
}

/// What the model may decide.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer<'a> {
    /// Tools it may call.
    pub(crate) tools: &'a [&'a Info],
    /// Whether it may answer instead.
    pub(crate) answer: bool,
    /// Whether it may fill in arguments that are not required.
    pub(crate) optional_arguments: bool,
}

impl Offer<'_> {
    /// Lets the model write a step.
    pub(crate) fn write(&self) -> Result<Step, Error> {
        let options = Options {
            constraint: Constraint::JsonSchema(self.schema().to_string()),
            temperature: Some(0.0),
            ..Options::new(SegmentKind::ToolCall, STEP_TOKENS)
        };
        let written = chat::generate(&options)?.finish()?;
        Ok(read(&written.text))
    }

    fn schema(&self) -> Value {
        let calls = self.tools.iter().map(|tool| {
            let arguments = arguments(&tool.input_schema, self.optional_arguments);
            object(json!({"name": {"const": tool.name}, "arguments": arguments}))
        });
        let answer = self.answer.then(|| object(json!({"name": {"const": ANSWER}})));
        let mut choices: Vec<Value> = calls.chain(answer).collect();
        match choices.len() {
            1 => choices.swap_remove(0),
            _ => json!({"anyOf": choices}),
        }
    }
}

/// An object with all of these properties and no others.
fn object(properties: Value) -> Value {
    let names: Vec<String> =
        properties.as_object().map(|properties| properties.keys().cloned().collect()).unwrap_or_default();
    json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false})
}

fn read(text: &str) -> Step {
    let Ok(Value::Object(mut step)) = serde_json::from_str(text) else { return Step::CutOff };
    match (step.remove("name"), step.remove("arguments")) {
        (Some(Value::String(name)), Some(arguments)) => Step::Call { name, arguments },
        (Some(_), None) => Step::Answer,
        _ => Step::CutOff,
    }
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
    fn an_offer_is_its_tools_and_the_answer() {
        let tool = Info { name: "t".to_owned(), description: String::new(), input_schema: SCHEMA.to_owned() };
        let one = Offer { tools: &[&tool], answer: false, optional_arguments: false };
        assert_eq!(one.schema()["properties"]["name"], json!({"const": "t"}));
        assert_eq!(one.schema()["required"], json!(["name", "arguments"]));
        let both = Offer { answer: true, ..one };
        assert_eq!(both.schema()["anyOf"].as_array().unwrap().len(), 2);
        assert_eq!(both.schema()["anyOf"][1]["required"], json!(["name"]));
    }

    #[test]
    fn a_step_is_read_or_cut_off() {
        let call = Step::Call { name: "t".to_owned(), arguments: json!({"free": "x"}) };
        assert_eq!(read(r#"{"name": "t", "arguments": {"free": "x"}}"#), call);
        assert_eq!(read(r#"{"name": "answer"}"#), Step::Answer);
        assert_eq!(read(r#"{"name": "t", "argum"#), Step::CutOff);
        assert_eq!(read("[]"), Step::CutOff);
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
