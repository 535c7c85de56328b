//! Whole turns against a model that says what the test gives it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use assistant::Assistant;
use tools_sdk::agent::chat::SegmentKind::{self, Answer, Reasoning, System, ToolCall, ToolResult, User};
use tools_sdk::agent::chat::{Constraint, Retention, Role};
use tools_sdk::testing::{Host, Message};
use tools_sdk::{Error, ErrorKind};

const ADD: &str = r#"{"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}"#;
const WAIT: &str = r#"{"name": "wait", "arguments": {}}"#;
/// A plan without calls.
const ANSWER: &str = r#"{"plan": [{"task": "say it", "tool": "answer"}]}"#;

fn host() -> Host {
    Host::new()
        .tool("add", "Adds.", ADD, |input| {
            if input.contains("bad") {
                Err(Error::invalid_input("syntax", "not a sum"))
            } else {
                Ok("= 5".to_owned())
            }
        })
        .tool("wait", "Waits.", r#"{"type": "object", "properties": {}}"#, |_| Ok("Waited.".to_owned()))
}

fn add(sum: &str) -> String {
    format!(r#"{{"name": "add", "arguments": {{"sum": "{sum}"}}}}"#)
}

/// A plan with a task for each tool, numbered.
fn plan(tools: &[&str]) -> String {
    let tasks: Vec<String> = tools
        .iter()
        .enumerate()
        .map(|(index, tool)| format!(r#"{{"task": "task {index}", "tool": "{tool}"}}"#))
        .collect();
    format!(r#"{{"plan": [{}]}}"#, tasks.join(", "))
}

fn kinds(messages: &[Message]) -> Vec<SegmentKind> {
    messages.iter().map(|message| message.kind).collect()
}

/// The thought the model has about results, before it answers.
const THOUGHT: &str = " it is done.";

/// Starts the assistant and gives it one message.
fn turn(host: &Host, text: &str) {
    host.start::<Assistant>().unwrap();
    host.user_message::<Assistant>(text).unwrap();
}

/// The JSON Schema under which the message at `index` was written.
fn schema(messages: &[Message], index: usize) -> String {
    match &messages[index].options.as_ref().unwrap().constraint {
        Constraint::JsonSchema(schema) => schema.clone(),
        other => panic!("{other:?}"),
    }
}

fn called(host: &Host) -> Vec<String> {
    host.tool_calls().into_iter().map(|(name, _)| name).collect()
}

#[test]
fn a_turn_plans_calls_tools_and_answers() {
    let host = host().reply(&plan(&["add", "wait", "answer"])).reply(&add("2 + 3")).reply(WAIT);
    let host = host.reply(THOUGHT).reply("It is 5.");
    turn(&host, "What are 2 and 3 together?");
    let messages = host.messages();
    assert_eq!(
        kinds(&messages),
        [System, User, Reasoning, ToolCall, ToolResult, ToolCall, ToolResult, Reasoning, System, Answer]
    );
    assert!(schema(&messages, 2).contains(r#""enum":["add","wait","answer"]"#));
    assert!(schema(&messages, 3).contains(r#""task":{"const":"task 0"},"name":{"const":"add"}"#));
    assert!(schema(&messages, 5).contains(r#""task":{"const":"task 1"},"name":{"const":"wait"}"#));
    assert_eq!((messages[4].role, messages[4].text.as_str()), (Role::Tool, "= 5"));
    assert_eq!(
        host.tool_calls(),
        [("add".into(), r#"{"sum":"2 + 3"}"#.into()), ("wait".into(), "{}".into())]
    );
    assert!(matches!(messages[9].options.as_ref().unwrap().constraint, Constraint::Regex(_)));
}

#[test]
fn a_request_without_tools_is_only_answered() {
    let host = host().reply(ANSWER).reply("Hello.");
    turn(&host, "Say hello.");
    assert_eq!(kinds(&host.messages()), [System, User, Reasoning, Answer]);
    let never = self::host().params(r#"{"tool_policy": "never"}"#).reply("Hello.");
    turn(&never, "Say hello.");
    assert_eq!(kinds(&never.messages()), [System, User, Answer]);
    assert_eq!(never.messages()[2].options.as_ref().unwrap().constraint, Constraint::None);
}

#[test]
fn a_given_plan_is_followed_without_asking_the_model() {
    let host = host().params(r#"{"plan": ["wait", "add"], "thought": ""}"#);
    let host = host.reply(WAIT).reply(&add("1 + 1")).reply("Done.");
    turn(&host, "Go.");
    assert_eq!(called(&host), ["wait", "add"]);
    assert!(!kinds(&host.messages()).contains(&Reasoning));
}

#[test]
fn a_plan_repeats_no_task_and_no_tool_too_often() {
    let same = r#"{"plan": [{"task": "do it", "tool": "add"}, {"task": "do it", "tool": "wait"}]}"#;
    let host = host().reply(same).reply(&add("1 + 1")).reply(THOUGHT).reply("Done.");
    turn(&host, "Go.");
    assert_eq!(called(&host), ["add"], "the same task with another tool");
    let often = self::host().params(r#"{"calls_per_tool": 2}"#).reply(&plan(&["add", "add", "add"]));
    let often = often.reply(&add("1 + 1")).reply(&add("2 + 2")).reply(THOUGHT).reply("Done.");
    turn(&often, "Go.");
    assert_eq!(called(&often), ["add", "add"]);
}

#[test]
fn tools_the_message_names_are_called_also_where_the_plan_forgets_them() {
    let host = host().reply(&plan(&["add"])).reply(&add("1 + 1")).reply(WAIT).reply(THOUGHT).reply("Done.");
    turn(&host, "Please wait, then add.");
    assert_eq!(called(&host), ["add", "wait"]);
    let free = self::host().params(r#"{"named_tools": false}"#).reply(ANSWER).reply("Done.");
    turn(&free, "Please wait.");
    assert!(called(&free).is_empty());
}

#[test]
fn with_more_plans_the_model_sees_the_results_and_may_plan_again() {
    let host = host().params(r#"{"plans": 3}"#).reply(&plan(&["wait"])).reply(WAIT);
    let host =
        host.reply(&plan(&["add"])).reply(&add("2 + 3")).reply(ANSWER).reply(THOUGHT).reply("It is 5.");
    turn(&host, "Go.");
    let kinds = kinds(&host.messages());
    assert_eq!(kinds[2..5], [Reasoning, ToolCall, ToolResult]);
    assert_eq!(kinds[5..], [Reasoning, ToolCall, ToolResult, Reasoning, Reasoning, System, Answer]);
}

#[test]
fn a_call_whose_result_is_in_view_is_not_made_again() {
    let silent = r#"{"thought": ""}"#;
    let plan = plan(&["add"]);
    let host = host().params(silent).reply(&plan).reply(&add("1 + 1")).reply("It is 5.");
    let other = r#"{"plan": [{"task": "something else", "tool": "add"}]}"#;
    let host = host.reply(&plan).reply("Done.").reply(other).reply(&add("1 + 1")).reply("Done.");
    turn(&host, "Go.");
    host.user_message::<Assistant>("And now?").unwrap();
    let messages = host.messages();
    assert_eq!(kinds(&messages)[7..], [User, Reasoning, System, Answer], "the task was done");
    assert!(messages[9].text.ends_with("And now?"), "{}", messages[9].text);
    host.user_message::<Assistant>("And then?").unwrap();
    assert_eq!(host.tool_calls().len(), 1, "the call was made");
    let failed = self::host().params(silent).reply(&plan).reply(&add("bad")).reply(&add("bad"));
    let failed = failed.reply("It does not work.");
    turn(&failed, "Go.");
    assert_eq!(failed.tool_calls().len(), 1);
    let again = self::host().params(r#"{"repeat_calls": true, "thought": ""}"#);
    let again = again.reply(&self::plan(&["wait", "wait"])).reply(WAIT).reply(WAIT).reply("Done.");
    turn(&again, "Go twice.");
    assert_eq!(again.tool_calls().len(), 2);
}

#[test]
fn a_refused_call_is_shown_and_may_be_tried_again() {
    let host =
        host().reply(&plan(&["add"])).reply(&add("bad")).reply(&add("1 + 1")).reply(THOUGHT).reply("Done.");
    turn(&host, "Go.");
    assert_eq!(host.tool_calls().len(), 2);
    assert!(host.messages().iter().any(|message| message.text == "Error: syntax: not a sum"));
}

#[test]
fn calls_are_bounded_and_a_cut_off_plan_or_call_is_not_used() {
    let host = host().params(r#"{"max_steps": 1}"#).reply(&plan(&["wait", "add"])).reply(WAIT);
    let host = host.reply(THOUGHT).reply("Done.");
    turn(&host, "Go.");
    assert_eq!(host.tool_calls().len(), 1);
    let call = self::host().reply(&plan(&["add"])).reply(r#"{"name": "add", "argu"#).reply("Done.");
    let torn = self::host().reply(r#"{"plan": [{"task": "#).reply("Done.");
    for cut in [call, torn] {
        turn(&cut, "Go.");
        assert!(cut.tool_calls().is_empty());
        assert_eq!(cut.messages().last().unwrap().text, "Done.");
    }
}

#[test]
fn plans_and_thoughts_are_kept_for_a_while() {
    for (ttl, retention) in [(60, Retention::Expire(60)), (0, Retention::DropAfterTurn)] {
        let params = format!(r#"{{"thought": "Well,", "reasoning_ttl_seconds": {ttl}}}"#);
        let host = host().params(&params).reply(&plan(&["wait"])).reply(WAIT).reply(THOUGHT).reply("Done.");
        turn(&host, "Go.");
        let messages = host.messages();
        let reasoning: Vec<&Message> = messages.iter().filter(|message| message.kind == Reasoning).collect();
        assert_eq!(reasoning.len(), 2);
        assert_eq!(reasoning[1].text, "Well, it is done.");
        for message in reasoning {
            assert_eq!(message.options.as_ref().unwrap().retention, retention);
        }
    }
}

#[test]
fn parameters_are_checked_and_a_stopped_turn_says_so() {
    for (params, code) in [
        (r#"{"max_steps": 0}"#, "parameter_out_of_range"),
        (r#"{"plans": 0}"#, "parameter_out_of_range"),
        (r#"{"plan": ["fly"]}"#, "unknown_tool"),
        (r#"{"colour": "red"}"#, "params_mismatch"),
    ] {
        assert_eq!(host().params(params).start::<Assistant>().unwrap_err().code, code);
    }
    let taken = host().tool("answer", "Answers.", ADD, |_| Ok(String::new()));
    assert_eq!(taken.start::<Assistant>().unwrap_err().code, "tool_name_taken");
    let host = host().reply(ANSWER).cancelled(true);
    host.start::<Assistant>().unwrap();
    assert_eq!(host.user_message::<Assistant>("Go.").unwrap_err().kind, ErrorKind::Cancelled);
    assert!(host.tool_calls().is_empty());
}
