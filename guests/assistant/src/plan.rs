//! A plan: tasks in order, each with the tool that does it. The model writes it before it calls anything, under a
//! JSON Schema that holds it to tools the session may call. Tasks matter: a model of half a billion parameters that
//! lists tools alone lists them all.

use serde_json::{Value, json};
use tools_sdk::Error;
use tools_sdk::agent::chat::{self, Constraint, Options, SegmentKind};

use crate::prompt::NO_TOOL;
use crate::{Params, step};

/// Most characters of a task.
const TASK_CHARACTERS: u32 = 80;
/// Most tokens of a task with the form around it.
const TASK_TOKENS: u32 = 48;

/// One step of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    /// What to do, in the model's words; empty where no words were given.
    pub(crate) text: String,
    /// The tool that does it.
    pub(crate) tool: String,
}

/// Lets the model write a plan of at most `most` tasks for these tools. Tasks that need no tool are left out, so it
/// is empty when there is nothing to call, and when it was cut off.
pub(crate) fn write(tools: &[&str], most: u32, params: &Params) -> Result<Vec<Task>, Error> {
    let options = Options {
        retention: params.reasoning_retention(),
        constraint: Constraint::JsonSchema(schema(tools, most).to_string()),
        temperature: Some(0.0),
        ..Options::new(SegmentKind::Reasoning, (most + 1) * TASK_TOKENS)
    };
    let written = chat::generate(&options)?.finish()?;
    Ok(read(&written.text))
}

fn schema(tools: &[&str], most: u32) -> Value {
    let tools: Vec<&str> = tools.iter().copied().chain([NO_TOOL]).collect();
    let task = json!({"type": "string", "minLength": 1, "maxLength": TASK_CHARACTERS});
    let task = step::object(json!({"task": task, "tool": {"enum": tools}}));
    // One more, because the last task may be to answer.
    step::object(json!({"plan": {"type": "array", "items": task, "minItems": 1, "maxItems": most + 1}}))
}

fn read(text: &str) -> Vec<Task> {
    let plan: Value = serde_json::from_str(text).unwrap_or_default();
    let tasks = plan.get("plan").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let member = |task: &Value, name: &str| task.get(name).and_then(Value::as_str).map(str::to_owned);
    tasks
        .iter()
        .filter_map(|task| Some(Task { text: member(task, "task")?, tool: member(task, "tool")? }))
        .filter(|task| task.tool != NO_TOOL)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_bounded_and_held_to_the_tools() {
        let schema = schema(&["a", "b"], 3);
        let plan = &schema["properties"]["plan"];
        assert_eq!((&plan["minItems"], &plan["maxItems"]), (&json!(1), &json!(4)));
        assert_eq!(plan["items"]["properties"]["tool"], json!({"enum": ["a", "b", "answer"]}));
        assert_eq!(plan["items"]["properties"]["task"]["maxLength"], 80);
        assert_eq!(plan["items"]["required"], json!(["task", "tool"]));
    }

    #[test]
    fn a_plan_is_read_without_its_answers_and_a_torn_one_is_empty() {
        let task = |text: &str, tool: &str| Task { text: text.to_owned(), tool: tool.to_owned() };
        let text =
            r#"{"plan": [{"task": "look", "tool": "a"}, {"task": "say", "tool": "answer"}, {"tool": "b"}]}"#;
        assert_eq!(read(text), [task("look", "a")]);
        assert!(read(r#"{"plan": [{"task": "look", "to"#).is_empty());
        assert!(read("{}").is_empty());
    }
}
