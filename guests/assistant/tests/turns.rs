//! Whole turns against a model that says what the test gives it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use assistant::Assistant;
use tools_sdk::agent::chat::{Constraint, Retention, Role, SegmentKind};
use tools_sdk::testing::{Host, Message};
use tools_sdk::{Error, ErrorKind};

const ADD: &str = r#"{"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}"#;

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

fn plan(tools: &[&str]) -> String {
    let steps: Vec<String> =
        tools.iter().map(|tool| format!(r#"{{"step": "s", "tool": "{tool}"}}"#)).collect();
    format!(r#"{{"plan": [{}]}}"#, steps.join(", "))
}

fn call(name: &str, arguments: &str) -> String {
    format!(r#"{{"name": "{name}", "arguments": {arguments}}}"#)
}

fn kinds(messages: &[Message]) -> Vec<SegmentKind> {
    messages.iter().map(|message| message.kind).collect()
}

#[test]
fn a_turn_plans_calls_and_answers() {
    let host = host()
        .reply(&plan(&["add", "wait", "answer"]))
        .reply(&call("add", r#"{"sum": "2 + 3"}"#))
        .reply(&call("wait", "{}"))
        .reply("It is 5.");
    host.start::<Assistant>().unwrap();
    host.user_message::<Assistant>("Add 2 and 3.").unwrap();
    let messages = host.messages();
    use SegmentKind::{Answer, Reasoning, System, ToolCall, ToolResult, User};
    assert_eq!(
        kinds(&messages),
        [System, User, Reasoning, ToolCall, ToolResult, ToolCall, ToolResult, Answer]
    );
    assert_eq!(messages[3].text, "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"sum\": \"2 + 3\"}}");
    assert_eq!((messages[4].role, messages[4].text.as_str()), (Role::Tool, "= 5"));
    assert_eq!(
        host.tool_calls(),
        [("add".into(), r#"{"sum":"2 + 3"}"#.into()), ("wait".into(), "{}".into())]
    );
    let options = messages[2].options.as_ref().unwrap();
    assert_eq!(options.retention, Retention::Expire(3_600));
    assert!(matches!(options.constraint, Constraint::JsonSchema(_)));
    assert_eq!(messages[7].options.as_ref().unwrap().constraint, Constraint::None);
}

#[test]
fn a_request_without_tools_is_only_answered() {
    let host = host().reply(&plan(&["answer"])).reply("Hello.");
    host.start::<Assistant>().unwrap();
    host.user_message::<Assistant>("Say hello.").unwrap();
    assert!(host.tool_calls().is_empty());
    let never = host_with(r#"{"tool_policy": "never"}"#).reply("Hello.");
    never.start::<Assistant>().unwrap();
    never.user_message::<Assistant>("Say hello.").unwrap();
    assert_eq!(kinds(&never.messages()), [SegmentKind::System, SegmentKind::User, SegmentKind::Answer]);
}

fn host_with(params: &str) -> Host {
    host().params(params)
}

#[test]
fn a_given_plan_is_followed_without_asking_the_model() {
    let host = host_with(r#"{"plan": ["wait"]}"#).reply(&call("wait", "{}")).reply("Done.");
    host.start::<Assistant>().unwrap();
    host.user_message::<Assistant>("Wait.").unwrap();
    assert_eq!(host.tool_calls().len(), 1);
    assert!(!kinds(&host.messages()).contains(&SegmentKind::Reasoning));
}

#[test]
fn the_same_call_is_made_once_and_a_refused_one_tried_again() {
    let repeated = host()
        .reply(&plan(&["add", "add"]))
        .reply(&call("add", r#"{"sum": "1 + 1"}"#))
        .reply(&call("add", r#"{"sum": "1 + 1"}"#))
        .reply("Done.");
    repeated.start::<Assistant>().unwrap();
    repeated.user_message::<Assistant>("Add.").unwrap();
    assert_eq!(repeated.tool_calls().len(), 1);
    assert!(repeated.messages().iter().any(|message| message.text.contains("repeated_call")));
    let refused = host()
        .reply(&plan(&["add"]))
        .reply(&call("add", r#"{"sum": "bad"}"#))
        .reply(&call("add", r#"{"sum": "1 + 1"}"#))
        .reply("Done.");
    refused.start::<Assistant>().unwrap();
    refused.user_message::<Assistant>("Add.").unwrap();
    assert_eq!(refused.tool_calls().len(), 2);
    assert!(refused.messages().iter().any(|message| message.text == "Error: syntax: not a sum"));
}

#[test]
fn calls_are_bounded_and_a_cut_off_call_is_not_made() {
    let host = host_with(r#"{"max_steps": 1}"#)
        .reply(&plan(&["wait", "add"]))
        .reply(&call("wait", "{}"))
        .reply("Done.");
    host.start::<Assistant>().unwrap();
    host.user_message::<Assistant>("Go.").unwrap();
    assert_eq!(host.tool_calls().len(), 1);
    let cut = self::host().reply(&plan(&["add"])).reply(r#"{"name": "add", "argu"#).reply("Done.");
    cut.start::<Assistant>().unwrap();
    cut.user_message::<Assistant>("Go.").unwrap();
    assert!(cut.tool_calls().is_empty());
    assert_eq!(cut.messages().last().unwrap().text, "Done.");
}

#[test]
fn parameters_are_checked_and_a_stopped_turn_says_so() {
    for (params, code) in [
        (r#"{"max_steps": 0}"#, "parameter_out_of_range"),
        (r#"{"plan": ["fly"]}"#, "unknown_tool"),
        (r#"{"colour": "red"}"#, "params_mismatch"),
    ] {
        assert_eq!(host_with(params).start::<Assistant>().unwrap_err().code, code);
    }
    let host = host().reply(&plan(&["wait"])).cancelled(true);
    host.start::<Assistant>().unwrap();
    assert_eq!(host.user_message::<Assistant>("Go.").unwrap_err().kind, ErrorKind::Cancelled);
    assert!(host.tool_calls().is_empty());
}
