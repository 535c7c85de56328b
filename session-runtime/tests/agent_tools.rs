//! Tools called through the registry: the project's own components give right values, and a native tool
//! stands beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/guests.rs"]
mod guests;

use std::sync::Arc;

use guests::{TextTool, component, open};
use serde_json::{Value, json};
use session_runtime::agent::{
    GuestKind, GuestLimits, Guests, GuestsConfig, NativeTool, Progress, ToolContext, ToolInfo, ToolRequest,
};
use session_runtime::session::spec::{FileGrant, SessionSpec};
use session_runtime::session::tool::{Effect, ToolFailure};

async fn call(guests: &Guests, tool: &str, input: Value) -> Value {
    let output = guests.call_tool(tool, &input.to_string(), ToolRequest::default()).await.unwrap();
    serde_json::from_str(&output.json).unwrap()
}

#[tokio::test]
async fn the_calculator_computes_exactly() {
    let place = tempfile::tempdir().unwrap();
    let guests = open(vec![component("calculator")], GuestLimits::default(), place.path()).await;
    assert_eq!(guests.warnings(), Vec::<String>::new());
    for (expression, value) in [
        ("12.50 + 3 * (4 - 1)", "21.5"),
        ("0.1 + 0.2", "0.3"),
        ("2 ^ 100", "1267650600228229401496703205376"),
        ("sum(1, 2, 3.5) / 2", "3.25"),
    ] {
        let output = call(&guests, "calculator", json!({ "expression": expression })).await;
        assert_eq!((&output["value"], &output["exact"]), (&json!(value), &json!(true)), "{expression}");
    }
    let request = ToolRequest::default();
    let failure = guests.call_tool("calculator", r#"{"expression": "1/0"}"#, request).await.unwrap_err();
    assert_eq!(failure.kind, "invalid_input");
    assert!(failure.code.contains("zero"), "{failure:?}");
}

#[tokio::test]
async fn inputs_are_checked_before_the_component_runs() {
    let place = tempfile::tempdir().unwrap();
    let guests = open(vec![component("calculator")], GuestLimits::default(), place.path()).await;
    for (input, says) in [
        ("{}", "property 'expression' is missing"),
        (r#"{"expression": 7}"#, "property 'expression' must be of type string, not number"),
        ("[]", "must be a JSON object"),
        ("1 + 1", "no JSON document"),
    ] {
        let failure = guests.call_tool("calculator", input, ToolRequest::default()).await.unwrap_err();
        assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("invalid_input", "invalid_input"));
        assert!(failure.message.contains(says), "{}", failure.message);
    }
    let failure = guests.call_tool("abacus", "{}", ToolRequest::default()).await.unwrap_err();
    assert_eq!(failure.code, "tool_not_found");
    assert!(failure.message.contains("there are calculator"), "{}", failure.message);
}

#[tokio::test]
async fn what_a_tool_is_comes_from_describe() {
    let place = tempfile::tempdir().unwrap();
    let files = vec![component("calculator"), component("files"), component("wait"), component("assistant")];
    let guests = open(files, GuestLimits::default(), place.path()).await;
    let tools = guests.tools();
    let facts: Vec<(&str, Effect, GuestKind)> =
        tools.iter().map(|tool| (tool.name.as_str(), tool.effect, tool.kind)).collect();
    assert_eq!(
        facts,
        [
            ("calculator", Effect::Pure, GuestKind::Wasm),
            ("files", Effect::Read, GuestKind::Wasm),
            ("wait", Effect::Idempotent, GuestKind::Wasm),
        ]
    );
    for tool in &tools {
        assert_eq!(tool.error, None);
        assert_eq!(tool.input_schema["type"], "object");
        assert!(!tool.description.is_empty());
        let bytes = std::fs::read(component(&tool.name)).unwrap();
        assert_eq!(tool.digest.as_deref(), Some(blake3::hash(&bytes).to_hex().as_str()));
    }
    assert_eq!(tools[1].wants, ["files"]);
    let said = |tool: &ToolInfo| (tool.expected_ms, tool.expected_seconds_of.clone());
    assert_eq!((said(&tools[0]), said(&tools[2])), ((None, None), (None, Some("seconds".to_owned()))));
    assert_eq!(tools[2].expected(r#"{"seconds": 2.5}"#), Some(2500));
    let agents = guests.agents();
    assert_eq!(agents.len(), 1);
    assert_eq!((agents[0].name.as_str(), &agents[0].error), ("assistant", &None));
    assert_eq!(agents[0].params_schema["type"], "object");
}

#[tokio::test]
async fn a_tool_says_how_long_a_call_takes_and_its_input_says_it_of_one() {
    let made = tempfile::tempdir().unwrap();
    let schema = r#"{"type":"object","properties":{"days":{"type":"number"}}}"#;
    // `expected-ms` is at 112, `expected-seconds-of` at 128: whether there is one, then what it is.
    let says = |name, describe| TextTool { name, input_schema: schema, describe, ..TextTool::default() };
    let usual = "(i32.store8 (i32.const 112) (i32.const 1)) (i64.store (i32.const 120) (i64.const 2000))";
    // The schema's text is at 1280, and the property's name 32 bytes into it.
    let both = "(i32.store8 (i32.const 112) (i32.const 1)) (i64.store (i32.const 120) (i64.const 2000))
        (i32.store8 (i32.const 128) (i32.const 1))
        (i32.store (i32.const 132) (i32.const 1312)) (i32.store (i32.const 136) (i32.const 4))";
    let wrong = "(i32.store8 (i32.const 128) (i32.const 1))
        (i32.store (i32.const 132) (i32.const 1280)) (i32.store (i32.const 136) (i32.const 1))";
    let files = [("usual", usual), ("both", both), ("wrong", wrong)]
        .map(|(name, describe)| says(name, describe).build(made.path(), name));
    let guests = open(files.to_vec(), GuestLimits::default(), made.path()).await;
    let tools = guests.tools();
    let tool = |name: &str| tools.iter().find(|tool| tool.name == name).unwrap();
    let expected = |name: &str, input: &str| tool(name).expected(input);
    assert_eq!(expected("usual", r#"{"days":9}"#), Some(2000));
    assert_eq!(tool("both").expected_seconds_of.as_deref(), Some("days"));
    for (input, milliseconds) in [
        (r#"{"days":0.25}"#, 250),
        (r#"{"days":0}"#, 0),
        ("{}", 2000),
        (r#"{"days":-1}"#, 2000),
        (r#"{"days":"many"}"#, 2000),
        (r#"{"days":1e300}"#, 2000),
        ("no document", 2000),
    ] {
        assert_eq!(expected("both", input), Some(milliseconds), "{input}");
    }
    let refused = tool("wrong").error.as_deref().unwrap();
    assert!(
        refused.contains("'{' say how long a call takes") && refused.contains("no such property"),
        "{refused}"
    );
}

#[tokio::test]
async fn the_files_tool_reads_what_was_granted() {
    let place = tempfile::tempdir().unwrap();
    let notes = place.path().join("notes");
    std::fs::create_dir(&notes).unwrap();
    std::fs::write(notes.join("march.txt"), "Taxi 12.50\nLunch 8.20\n").unwrap();
    std::fs::write(notes.join("april.txt"), "Train 40\n").unwrap();
    let guests = open(vec![component("files")], GuestLimits::default(), place.path()).await;
    let request = || ToolRequest {
        grants: vec![FileGrant {
            name: "notes".to_owned(),
            path: notes.to_str().unwrap().to_owned(),
            writable: false,
        }],
        ..ToolRequest::default()
    };
    let listed = guests.call_tool("files", r#"{"operation": "list", "query": ""}"#, request()).await.unwrap();
    let listed: Value = serde_json::from_str(&listed.json).unwrap();
    let sizes: Vec<u64> =
        listed["entries"].as_array().unwrap().iter().map(|e| e["bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [9, 22], "april before march");
    let found =
        guests.call_tool("files", r#"{"operation": "search", "query": "taxi"}"#, request()).await.unwrap();
    let found: Value = serde_json::from_str(&found.json).unwrap();
    assert_eq!(
        (&found["matches"][0]["line"], &found["matches"][0]["text"]),
        (&json!(1), &json!("Taxi 12.50"))
    );
    let path = found["matches"][0]["path"].as_str().unwrap();
    let input = json!({ "operation": "read", "query": path }).to_string();
    let read = guests.call_tool("files", &input, request()).await.unwrap();
    let read: Value = serde_json::from_str(&read.json).unwrap();
    assert_eq!(read["text"], "Taxi 12.50\nLunch 8.20\n");
    assert_eq!(guests.denials(), 0);
}

#[tokio::test]
async fn a_waiting_tool_reports_progress() {
    let place = tempfile::tempdir().unwrap();
    let guests = open(vec![component("wait")], GuestLimits::default(), place.path()).await;
    let (sink, mut reports) = tokio::sync::mpsc::channel(16);
    let request = ToolRequest { progress: Some(sink), ..ToolRequest::default() };
    let output =
        guests.call_tool("wait", r#"{"seconds": 0.6, "reason": "approval"}"#, request).await.unwrap();
    assert_eq!(output.text, "Waited 0.6 seconds: approval");
    let mut done = Vec::new();
    while let Some(Progress { done: units, total, message }) = reports.recv().await {
        assert_eq!((total, message.as_str()), (600, "approval"));
        done.push(units);
    }
    assert_eq!(done, [0, 500, 600]);
}

struct Clock;

#[async_trait::async_trait]
impl NativeTool for Clock {
    fn info(&self) -> ToolInfo {
        ToolInfo::native("double", "Doubles a number.", Effect::Pure)
    }

    async fn call(&self, input: &str, cx: ToolContext) -> Result<String, ToolFailure> {
        let number = serde_json::from_str::<Value>(input).unwrap()["n"].as_i64().unwrap_or(0);
        Ok(format!("{} for {}", number * 2, cx.session_id()))
    }
}

#[tokio::test]
async fn a_native_tool_stands_beside_components() {
    let place = tempfile::tempdir().unwrap();
    let guests = open(vec![component("calculator")], GuestLimits::default(), place.path()).await;
    guests.register_native(Arc::new(Clock)).unwrap();
    assert_eq!(guests.register_native(Arc::new(Clock)).unwrap_err().code, "tool_exists");
    let request = ToolRequest { session_id: "sess_1".to_owned(), ..ToolRequest::default() };
    let output = guests.call_tool("double", r#"{"n": 21}"#, request).await.unwrap();
    assert_eq!(output.text, "42 for sess_1");
    let tools = guests.tools();
    assert_eq!((tools[1].name.as_str(), tools[1].kind), ("double", GuestKind::Native));
}

#[tokio::test]
async fn sessions_are_checked_against_the_guests_there_are() {
    let place = tempfile::tempdir().unwrap();
    let guests =
        open(vec![component("calculator"), component("assistant")], GuestLimits::default(), place.path())
            .await;
    let spec = |agent: &str, tools: &[&str]| SessionSpec {
        agent: Some(agent.to_owned()),
        tools: tools.iter().map(|tool| (*tool).to_owned()).collect(),
        ..SessionSpec::default()
    };
    guests.check(&spec("assistant", &["calculator"])).unwrap();
    assert!(guests.driver("assistant").is_ok());
    assert_eq!(guests.check(&spec("nobody", &[])).unwrap_err().code, "agent_not_found");
    assert_eq!(guests.check(&spec("calculator", &[])).unwrap_err().code, "agent_not_found");
    let error = guests.check(&spec("assistant", &["calculator", "abacus"])).unwrap_err();
    assert_eq!(error.code, "tool_not_found");
    assert!(error.message.contains("abacus"));
    let mut odd = spec("assistant", &[]);
    odd.params.insert("max_steps".to_owned(), json!("many"));
    let error = guests.check(&odd).unwrap_err();
    assert_eq!(error.code, "params_invalid");
    assert!(error.message.contains("max_steps"), "{}", error.message);
}

#[tokio::test]
async fn directories_are_searched_in_name_order_and_compiled_code_is_reused() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("guests");
    std::fs::create_dir(&folder).unwrap();
    for name in ["wait", "calculator"] {
        std::fs::copy(component(name), folder.join(format!("{name}.wasm"))).unwrap();
    }
    let config = GuestsConfig {
        cache: place.path().join("code"),
        directories: vec![folder, place.path().join("absent")],
        ..GuestsConfig::default()
    };
    for _ in 0..2 {
        let guests = Guests::open(config.clone()).await.unwrap();
        let names: Vec<String> = guests.tools().into_iter().map(|tool| tool.name).collect();
        assert_eq!(names, ["calculator", "wait"]);
        assert_eq!(std::fs::read_dir(place.path().join("code")).unwrap().count(), 2);
        let output = call(&guests, "calculator", json!({ "expression": "6 * 7" })).await;
        assert_eq!(output["value"], "42");
    }
}
