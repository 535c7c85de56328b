//! What the model is told, in as few tokens as it can do with. The wording was found by trying: a model of half a
//! billion parameters follows this one, and loses itself in lists of steps, in examples (it copies them) and in
//! JSON Schemas.

use serde_json::{Map, Value};
use tools_sdk::agent::tools::Info;

use crate::{Params, ToolPolicy};

/// Who the assistant is when the session does not say.
const DEFAULT_INSTRUCTIONS: &str = "You are a helpful assistant.";

/// The tool of a planned task that needs none.
pub(crate) const NO_TOOL: &str = "answer";

/// How a plan is written. The form of its calls goes without saying: it is held to.
const STEPS: &str = "- answer {}: Says something without a tool.\n\n\
                     First write a plan with as few steps as you can: {\"plan\": [{\"task\": what to do, \"tool\": which \
                     tool}, ...]}. Use only numbers and facts from the user and the tools.";

/// Says to answer where there are results: otherwise the last one is taken for the answer. The message is said
/// again, because it is some way back, and further where its tasks were done in earlier turns.
pub(crate) fn answer(message: &str) -> String {
    format!("Using the results above, answer in one sentence: {message}")
}

/// How a thought begins, and how it goes on: one sentence, with full stops only inside numbers. The space is the
/// model's own, because a text that ends in one is unlike any it has learnt from.
pub(crate) const THOUGHT: &str = "So";
pub(crate) const THOUGHT_FORM: &str = " [a-zA-Z']([^{}<.\\n]|[0-9]\\.[0-9]){1,150}\\.";

/// The system message: instructions, then the tools with the names of their arguments.
pub(crate) fn system(params: &Params, tools: &[Info]) -> String {
    let instructions = params.instructions.trim();
    let mut text = if instructions.is_empty() { DEFAULT_INSTRUCTIONS } else { instructions }.to_owned();
    if tools.is_empty() || params.tool_policy == ToolPolicy::Never {
        return text;
    }
    text.push_str("\n\nTools you can call:");
    for tool in tools {
        let arguments = arguments(&tool.input_schema, params.optional_arguments);
        text.push_str(&format!("\n- {} {arguments}: {}", tool.name, tool.description));
    }
    text.push('\n');
    text.push_str(STEPS);
    text
}

/// The tools a message names, as words of their own in upper or lower case, in the order it first names them.
pub(crate) fn named<'a>(message: &str, tools: &'a [Info]) -> Vec<&'a str> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    let mut named = Vec::new();
    for word in message.split(|c| !is_part(c)) {
        let tool = tools.iter().map(|tool| tool.name.as_str()).find(|name| word.eq_ignore_ascii_case(name));
        named.extend(tool.filter(|name| !named.contains(name)));
    }
    named
}

/// The arguments of a tool in short: names, and what they hold.
fn arguments(schema: &str, optional: bool) -> String {
    let schema: Value = serde_json::from_str(schema).unwrap_or_default();
    let none = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let members: Vec<String> = properties
        .iter()
        .filter(|(name, _)| optional || is_required(&schema, name))
        .map(|(name, property)| format!("\"{name}\": {}", kind(property)))
        .collect();
    format!("{{{}}}", members.join(", "))
}

/// Whether a schema requires a property.
pub(crate) fn is_required(schema: &Value, name: &str) -> bool {
    let required = schema.get("required").and_then(Value::as_array);
    required.is_some_and(|required| required.iter().any(|required| required == name))
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
    fn a_tool_is_named_by_its_whole_name() {
        let tool = |name: &str| Info {
            name: name.to_owned(),
            description: String::new(),
            input_schema: "{}".to_owned(),
        };
        let tools = [tool("calculator"), tool("files"), tool("wait")];
        assert_eq!(named("WAIT, then search the Files, and wait.", &tools), ["wait", "files"]);
        assert!(named("The waiter filed a profile.", &tools).is_empty());
    }

    #[test]
    fn tools_are_listed_with_the_arguments_they_require() {
        let schema = r#"{"type": "object", "properties": {
            "mode": {"type": "string", "enum": ["a", "b"]},
            "count": {"type": ["integer", "null"]},
            "any": {}
        }, "required": ["mode", "any"]}"#;
        let tool = Info {
            name: "t".to_owned(),
            description: "Does it.".to_owned(),
            input_schema: schema.to_owned(),
        };
        let text = system(&Params::default(), std::slice::from_ref(&tool));
        assert!(text.starts_with("You are a helpful assistant.\n\nTools you can call:\n"), "{text}");
        assert!(text.contains("\n- t {\"mode\": \"a\"|\"b\", \"any\": value}: Does it."), "{text}");
        assert_eq!(arguments(schema, true), "{\"mode\": \"a\"|\"b\", \"count\": integer, \"any\": value}");
        assert_eq!(arguments("not json", true), "{}");
        let never = Params {
            tool_policy: ToolPolicy::Never,
            instructions: "Be brief.".to_owned(),
            ..Params::default()
        };
        assert_eq!(system(&never, &[tool]), "Be brief.");
    }
}
