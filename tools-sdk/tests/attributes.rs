//! What `#[tool]` and `#[agent]` make of a function and of an `impl` block.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use tools_sdk::agent::{self, chat};
use tools_sdk::prelude::*;
use tools_sdk::testing::Host;
use tools_sdk::tool;

/// Input.
#[derive(Deserialize, JsonSchema)]
pub struct Words {
    /// The words.
    words: Vec<String>,
    separator: Option<String>,
}

/// Output.
#[derive(Serialize, JsonSchema)]
pub struct Joined {
    text: String,
}

/// Joins words,
/// one after the other.
///
/// Keeps their order.
#[tool(name = "join-words", effect = "read", wants = ["files"], text = shown, expected_ms = 2000)]
pub fn join(input: Words, cx: &Context) -> Result<Joined, ToolError> {
    if input.words.is_empty() {
        return Err(ToolError::invalid_input("no_words", format!("call {} has no words", cx.call_id)));
    }
    Ok(Joined { text: input.words.join(input.separator.as_deref().unwrap_or(" ")) })
}

/// Input.
#[derive(Deserialize, JsonSchema)]
pub struct Length {
    seconds: f64,
}

/// Pauses.
#[tool(effect = "pure", expected_seconds_of = "seconds")]
pub fn pause(input: Length, _cx: &Context) -> Result<Joined, ToolError> {
    Ok(Joined { text: input.seconds.to_string() })
}

fn shown(output: &Joined) -> String {
    output.text.to_uppercase()
}

#[test]
fn a_tool_says_what_its_attribute_and_its_types_say() {
    let info = tool::describe::<join>().unwrap();
    assert_eq!(
        (info.name.as_str(), info.effect, info.wants),
        ("join-words", tool::Effect::Read, vec!["files".into()])
    );
    assert_eq!((info.expected_ms, info.expected_seconds_of), (Some(2_000), None));
    let info_of_pause = tool::describe::<pause>().unwrap();
    assert_eq!(
        (info_of_pause.expected_ms, info_of_pause.expected_seconds_of),
        (None, Some("seconds".into()))
    );
    assert_eq!(info.description, "Joins words, one after the other.\n\nKeeps their order.");
    let input: serde_json::Value = serde_json::from_str(&info.input_schema).unwrap();
    assert_eq!(input["required"], serde_json::json!(["words"]));
    let names: Vec<&String> = input["properties"].as_object().unwrap().keys().collect();
    assert_eq!(
        names,
        ["words", "separator"],
        "the order of the fields is the order the model writes them in"
    );
    assert_eq!(input["properties"]["words"]["description"], "The words.");
    let output: serde_json::Value = serde_json::from_str(&info.output_schema).unwrap();
    assert_eq!(output["properties"]["text"]["type"], "string");
}

#[test]
fn a_call_reads_json_and_gives_json_and_text() {
    let host = Host::new();
    let output = host.call::<join>(r#"{"words": ["a", "b"], "separator": "-"}"#).unwrap();
    assert_eq!((output.json.as_str(), output.text.as_str()), (r#"{"text":"a-b"}"#, "A-B"));
    assert_eq!(host.call::<join>(r#"{"words": []}"#).unwrap_err().message, "call call_test has no words");
    let mismatch = host.call::<join>(r#"{"words": 1}"#).unwrap_err();
    assert_eq!((mismatch.kind, mismatch.code.as_str()), (ErrorKind::InvalidInput, "input_mismatch"));
    let large = format!(r#"{{"words": ["{}"]}}"#, "x".repeat(tool::MAX_INPUT_BYTES));
    assert_eq!(host.call::<join>(&large).unwrap_err().code, "input_too_large");
}

/// Parameters.
#[derive(Deserialize, JsonSchema)]
pub struct Greeting {
    #[serde(default)]
    word: String,
}

/// The agent.
pub struct Echo;

/// Answers with the same words.
#[agent(name = "echo")]
impl Echo {
    fn on_event(event: Event, params: Greeting) -> Result<(), AgentError> {
        let Event::UserMessage(text) = event;
        state::set("last", &text)?;
        chat::append(chat::Role::User, chat::SegmentKind::User, chat::Retention::Keep, &text)?;
        let options =
            chat::Options { prefix: params.word, ..chat::Options::new(chat::SegmentKind::Answer, 10) };
        let written = chat::generate(&options)?.finish()?;
        log::info(&written.text);
        Ok(())
    }
}

#[test]
fn an_agent_is_given_its_parameters_and_its_event() {
    let info = agent::describe::<Echo>().unwrap();
    assert_eq!((info.name.as_str(), info.description.as_str()), ("echo", "Answers with the same words."));
    let host = Host::new().params(r#"{"word": "Well: "}"#).reply("a reply of more than eight characters");
    host.start::<Echo>().unwrap();
    host.user_message::<Echo>("hello").unwrap();
    let messages = host.messages();
    assert_eq!(messages[1].text, "Well: a reply of more than eight characters");
    assert_eq!(host.logs(), [(log::Level::Info, "a reply of more than eight characters".to_owned())]);
    let wrong = Host::new().params("[]").start::<Echo>().unwrap_err();
    assert_eq!(wrong.code, "params_mismatch");
    assert_eq!(Host::new().user_message::<Echo>("hello").unwrap_err().code, "no_reply");
}

#[test]
fn outside_of_a_host_doing_fails_and_reading_gives_nothing() {
    assert_eq!(clock::sleep_ms(1).unwrap_err().code, "no_host");
    assert!(files::grants().is_empty() && tools::list().is_empty());
    assert_eq!(state::get("last"), None);
}
