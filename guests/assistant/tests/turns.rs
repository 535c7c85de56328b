//! Whole turns against a model that says what the test gives it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use assistant::Assistant;
use tools_sdk::agent::chat::SegmentKind::{self, Answer, Reasoning, System, ToolCall, ToolResult, User};
use tools_sdk::agent::chat::{Constraint, Retention, Role};
use tools_sdk::testing::{Host, Message};
use tools_sdk::{Error, ErrorKind};

const ADD: &str = r#"{"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}"#;
const ANSWER: &str = r#"{"name": "answer"}"#;
const WAIT: &str = r#"{"name": "wait", "arguments": {}}"#;

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

/// Names of the tools the model was offered for the step at `index`, and whether it could answer.
fn offered(messages: &[Message], index: usize) -> String {
    match &messages[index].options.as_ref().unwrap().constraint {
        Constraint::JsonSchema(schema) => {
            let names = ["add", "wait", "answer"];
            names
                .into_iter()
                .filter(|name| schema.contains(&format!("\"const\":\"{name}\"")))
                .collect::<Vec<_>>()
                .join(" ")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_turn_calls_tools_and_answers() {
    let host = host().reply(&add("2 + 3")).reply(WAIT).reply(THOUGHT).reply("It is 5.");
    turn(&host, "What are 2 and 3 together?");
    let messages = host.messages();
    assert_eq!(
        kinds(&messages),
        [System, User, ToolCall, ToolResult, ToolCall, ToolResult, Reasoning, System, Answer]
    );
    assert_eq!((messages[3].role, messages[3].text.as_str()), (Role::Tool, "= 5"));
    assert_eq!(
        host.tool_calls(),
        [("add".into(), r#"{"sum":"2 + 3"}"#.into()), ("wait".into(), "{}".into())]
    );
    let offers: Vec<String> = [2, 4].into_iter().map(|index| offered(&messages, index)).collect();
    assert_eq!(offers, ["add wait answer", "wait answer"], "a tool that gave a result is not offered again");
    assert!(matches!(messages[8].options.as_ref().unwrap().constraint, Constraint::Regex(_)));
}

#[test]
fn a_request_without_tools_is_only_answered() {
    let host = self::host().reply(ANSWER).reply("Hello.");
    turn(&host, "Say hello.");
    assert_eq!(kinds(&host.messages()), [System, User, ToolCall, Answer]);
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
    let messages = host.messages();
    assert_eq!((offered(&messages, 2), offered(&messages, 4)), ("wait".to_owned(), "add".to_owned()));
    assert_eq!(host.tool_calls().len(), 2);
    assert!(!kinds(&messages).contains(&Reasoning));
}

#[test]
fn a_call_whose_result_is_in_view_is_not_made_again() {
    let silent = r#"{"thought": ""}"#;
    let host = host().params(silent).reply(&add("1 + 1")).reply(ANSWER).reply("It is 5.");
    let host = host.reply(&add("1 + 1")).reply("Done.");
    turn(&host, "Go.");
    host.user_message::<Assistant>("And now?").unwrap();
    assert_eq!(host.tool_calls().len(), 1);
    let failed = self::host().params(silent).reply(&add("bad")).reply(&add("bad")).reply("It does not work.");
    turn(&failed, "Go.");
    assert_eq!(failed.tool_calls().len(), 1);
    let again = r#"{"repeat_calls": true, "calls_per_tool": 2, "thought": ""}"#;
    let again = self::host().params(again).reply(WAIT).reply(WAIT).reply(ANSWER).reply("Done.");
    turn(&again, "Go twice.");
    assert_eq!(again.tool_calls().len(), 2);
}

#[test]
fn tools_the_message_names_come_before_the_answer() {
    let host = host().reply(WAIT).reply(ANSWER).reply(THOUGHT).reply("Done.");
    turn(&host, "Please wait.");
    let messages = host.messages();
    assert_eq!((offered(&messages, 2), offered(&messages, 4)), ("wait".to_owned(), "add answer".to_owned()));
    let free = self::host().params(r#"{"named_first": false}"#).reply(ANSWER).reply("Done.");
    turn(&free, "Please wait.");
    assert_eq!(offered(&free.messages(), 2), "add wait answer");
}

#[test]
fn a_refused_call_is_shown_and_may_be_tried_again() {
    let host = host().reply(&add("bad")).reply(&add("1 + 1")).reply(ANSWER).reply(THOUGHT).reply("Done.");
    turn(&host, "Go.");
    assert_eq!(host.tool_calls().len(), 2);
    assert!(host.messages().iter().any(|message| message.text == "Error: syntax: not a sum"));
}

#[test]
fn calls_are_bounded_and_a_cut_off_call_is_not_made() {
    let host = host().params(r#"{"max_steps": 1}"#).reply(WAIT).reply(THOUGHT).reply("Done.");
    turn(&host, "Go.");
    assert_eq!(host.tool_calls().len(), 1);
    let cut = self::host().reply(r#"{"name": "add", "argu"#).reply("Done.");
    turn(&cut, "Go.");
    assert!(cut.tool_calls().is_empty());
    assert_eq!(cut.messages().last().unwrap().text, "Done.");
}

#[test]
fn thoughts_are_kept_for_a_while() {
    for (ttl, retention) in [(60, Retention::Expire(60)), (0, Retention::DropAfterTurn)] {
        let params = format!(r#"{{"thought": "Well,", "reasoning_ttl_seconds": {ttl}}}"#);
        let host = host().params(&params).reply(WAIT).reply(ANSWER).reply(" it is done.").reply("Done.");
        turn(&host, "Go.");
        let messages = host.messages();
        let thought = messages.iter().find(|message| message.kind == Reasoning).unwrap();
        assert_eq!(thought.text, "Well, it is done.");
        assert_eq!(thought.options.as_ref().unwrap().retention, retention);
    }
}

#[test]
fn parameters_are_checked_and_a_stopped_turn_says_so() {
    for (params, code) in [
        (r#"{"max_steps": 0}"#, "parameter_out_of_range"),
        (r#"{"plan": ["fly"]}"#, "unknown_tool"),
        (r#"{"colour": "red"}"#, "params_mismatch"),
    ] {
        assert_eq!(host().params(params).start::<Assistant>().unwrap_err().code, code);
    }
    let host = host().reply(ANSWER).cancelled(true);
    host.start::<Assistant>().unwrap();
    assert_eq!(host.user_message::<Assistant>("Go.").unwrap_err().kind, ErrorKind::Cancelled);
    assert!(host.tool_calls().is_empty());
}
