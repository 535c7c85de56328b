//! The plan of a turn: what to do, step by step, and with which tool. It is a reasoning segment, so it goes when
//! its time is over.

use serde_json::{Value, json};
use tools_sdk::Error;
use tools_sdk::agent::chat::{self, Constraint, Options, Retention, SegmentKind};
use tools_sdk::agent::tools::Info;

use crate::Params;

/// The step that is no call: to answer.
const ANSWER: &str = "answer";
/// Most characters of a step's description.
const STEP_CHARACTERS: u32 = 100;
/// Tokens a step may take, its description and its form.
const STEP_TOKENS: u32 = 64;

/// Names of the tools to call, in order: the session's plan, or one the model writes.
pub(crate) fn make(params: &Params, tools: &[Info]) -> Result<Vec<String>, Error> {
    if !params.plan.is_empty() {
        return Ok(params.plan.iter().take(params.max_steps as usize).cloned().collect());
    }
    let schema = schema(tools, params.max_steps);
    let options = Options {
        retention: match params.reasoning_ttl_seconds {
            0 => Retention::DropAfterTurn,
            seconds => Retention::Expire(seconds),
        },
        constraint: Constraint::JsonSchema(schema.to_string()),
        temperature: Some(0.0),
        ..Options::new(SegmentKind::Reasoning, STEP_TOKENS.saturating_mul(params.max_steps + 1))
    };
    let written = chat::generate(&options)?.finish()?;
    Ok(read(&written.text, tools))
}

/// What a plan looks like: descriptions come before names, so that the name follows from the description.
fn schema(tools: &[Info], max_steps: u32) -> Value {
    let mut names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
    names.push(ANSWER);
    json!({
        "type": "object",
        "properties": {
            "plan": {
                "type": "array",
                "minItems": 1,
                "maxItems": max_steps + 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "step": {"type": "string", "maxLength": STEP_CHARACTERS},
                        "tool": {"type": "string", "enum": names},
                    },
                    "required": ["step", "tool"],
                    "additionalProperties": false,
                },
            },
        },
        "required": ["plan"],
        "additionalProperties": false,
    })
}

/// The tools of a plan up to its answer. A plan that was cut off counts as far as nothing can be misread: not at
/// all, and the model answers without tools.
fn read(text: &str, tools: &[Info]) -> Vec<String> {
    let plan: Value = serde_json::from_str(text).unwrap_or_default();
    let none = Vec::new();
    let steps = plan.get("plan").and_then(Value::as_array).unwrap_or(&none);
    steps
        .iter()
        .map(|step| step.get("tool").and_then(Value::as_str).unwrap_or(ANSWER))
        .take_while(|name| *name != ANSWER)
        .filter(|name| tools.iter().any(|tool| tool.name == *name))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read_up_to_its_answer() {
        let tool = |name: &str| Info {
            name: name.to_owned(),
            description: String::new(),
            input_schema: "{}".to_owned(),
        };
        let tools = [tool("a"), tool("b")];
        let step = |name: &str| format!(r#"{{"step": "s", "tool": "{name}"}}"#);
        let plan = |names: &[&str]| {
            format!(r#"{{"plan": [{}]}}"#, names.iter().map(|name| step(name)).collect::<Vec<_>>().join(", "))
        };
        assert_eq!(read(&plan(&["b", "a", "answer", "a"]), &tools), ["b", "a"]);
        assert_eq!(read(&plan(&["a", "unknown", "b"]), &tools), ["a", "b"]);
        assert!(read(&plan(&["answer"]), &tools).is_empty());
        assert!(read(r#"{"plan": [{"step": "cut o"#, &tools).is_empty());
    }
}
