//! The real assistant over the default model: it plans, calls tools and answers with the right number.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/guests.rs"]
mod guests;
mod support;

use std::fs;

use guests::component;
use serde_json::Value;
use session_runtime::session::spec::{FileGrant, SegmentKind, SessionSpec, TurnRequest};
use session_runtime::session::view::TurnStatus;
use session_runtime::{Config, Runtime};

const NOTES: [(&str, &str); 3] = [
    ("hotel.txt", "Hotel, three nights.\nAmount paid: 412.50 EUR\n"),
    ("train.txt", "Train, both ways.\nAmount paid: 138.20 EUR\n"),
    ("packing.txt", "Take the blue folder.\n"),
];

#[tokio::test(flavor = "multi_thread")]
async fn the_assistant_plans_calls_tools_and_answers_rightly() {
    let directory = tempfile::tempdir().unwrap();
    let notes = directory.path().join("notes");
    fs::create_dir(&notes).unwrap();
    for (name, text) in NOTES {
        fs::write(notes.join(name), text).unwrap();
    }
    let tools = ["files", "calculator", "wait"];
    let config = Config {
        data_dir: directory.path().join("data"),
        model: "qwen2.5-coder-0.5b".to_owned(),
        device_budget_bytes: 64 << 20,
        components: ["assistant"].iter().chain(&tools).map(|name| component(name)).collect(),
        grant_roots: vec![notes.clone()],
        ..Config::default()
    };
    let runtime = Runtime::open(config).await.unwrap();
    let spec = SessionSpec {
        id: Some("s".to_owned()),
        agent: Some("assistant".to_owned()),
        tools: tools.map(str::to_owned).to_vec(),
        grants: vec![FileGrant {
            name: "notes".to_owned(),
            path: notes.to_str().unwrap().to_owned(),
            writable: false,
        }],
        ..SessionSpec::default()
    };
    runtime.create_session(spec).await.unwrap();
    let request = TurnRequest {
        input:
            "What is the total? Search the files for 'Amount paid', then add the amounts with the calculator."
                .to_owned(),
        ..TurnRequest::default()
    };
    let turn = runtime.start_turn("s", request).await.unwrap();
    let turn = runtime.wait_turn("s", &turn.id).await.unwrap();
    assert_eq!(turn.status, TurnStatus::Completed, "{:?}", turn.error);
    let segments = runtime.segments("s").await.unwrap();
    let plan = segments.iter().find(|segment| segment.kind == SegmentKind::Reasoning).unwrap();
    let plan: Value = serde_json::from_str(&plan.text).unwrap();
    let planned: Vec<&str> =
        plan["plan"].as_array().unwrap().iter().map(|task| task["tool"].as_str().unwrap()).collect();
    assert_eq!(planned, ["files", "calculator"], "{plan}");
    let events = runtime.events("s", 0, 10_000).await.unwrap();
    let called: Vec<&str> = events
        .iter()
        .filter(|event| event.kind == "tool.started")
        .map(|event| event.data["tool"].as_str().unwrap())
        .collect();
    assert_eq!(called, planned);
    // 412.50 + 138.20
    assert!(turn.output_text.contains("550.7"), "{}", turn.output_text);
}
