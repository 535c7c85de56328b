//! `/v1/chat/completions` over loopback HTTP with a real model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

#[path = "support/server.rs"]
mod server;
mod support;

use serde_json::{Value, json};
use server::{events, get, post, post_with, shared};

fn chat(body: &Value) -> server::Answer {
    post(&format!("{}/v1/chat/completions", shared().base), body)
}

fn chat_in(session: &str, body: &Value) -> server::Answer {
    post_with(&format!("{}/v1/chat/completions", shared().base), &[("x-session-id", session)], body)
}

fn request(messages: &Value) -> Value {
    json!({"model": server::model(), "messages": messages, "max_tokens": 8})
}

fn session(id: &str) -> server::Answer {
    get(&format!("{}/v1/sessions/{id}", shared().base))
}

fn named_sessions() -> usize {
    let page = get(&format!("{}/v1/sessions?limit=1000", shared().base)).json;
    page["data"].as_array().unwrap().iter().filter(|one| one["spec"]["ephemeral"] == true).count()
}

#[test]
fn an_answer_has_openai_shape() {
    let answer = chat(&request(&json!([{"role": "user", "content": "Say hello."}])));
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.header("content-type"), "application/json");
    let body = &answer.json;
    assert_eq!(body["object"], "chat.completion");
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(body["choices"][0]["message"]["role"], "assistant");
    assert!(!body["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
    assert!(matches!(body["choices"][0]["finish_reason"].as_str(), Some("stop" | "length")));
    let usage = &body["usage"];
    let count = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(count("prompt_tokens") + count("completion_tokens"), count("total_tokens"));
    assert!(count("completion_tokens") <= 8 && count("prompt_tokens") > 0);
}

#[test]
fn a_stream_is_the_same_answer_in_chunks() {
    let mut body = request(&json!([
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": [{"type": "text", "text": "Name a fruit."}]}]));
    let whole = chat(&body).json;
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let answer = chat(&body);
    assert_eq!(answer.header("content-type"), "text/event-stream");
    let mut sent = events(&answer.text);
    assert_eq!(sent.pop().unwrap().data, "[DONE]");
    assert!(sent.iter().all(|event| event.event == "message" && event.id.is_empty()));
    let chunks: Vec<Value> = sent.iter().map(server::Sent::json).collect();
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"])
    );
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text, "greedy answers are the same");
    let finishes: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["finish_reason"])
        .filter(|reason| !reason.is_null())
        .collect();
    assert_eq!(finishes, [&whole["choices"][0]["finish_reason"]]);
    let usage = chunks.last().unwrap();
    assert_eq!(
        (&usage["choices"], &usage["usage"]["total_tokens"]),
        (&json!([]), &whole["usage"]["total_tokens"])
    );
}

#[test]
fn a_request_without_a_session_leaves_none_behind() {
    for stream in [false, true] {
        let mut body = request(&json!([{"role": "user", "content": "Hi."}]));
        body["stream"] = stream.into();
        assert_eq!(chat(&body).status, 200);
    }
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while named_sessions() > 0 {
        assert!(std::time::Instant::now() < deadline, "ephemeral sessions are still there");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn a_whole_conversation_gives_what_a_named_session_gives() {
    let first =
        json!([{"role": "system", "content": "You are a poet."}, {"role": "user", "content": "Greet me."}]);
    let one = chat_in("poet", &request(&first)).json;
    let answer = one["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let mut all = first.as_array().unwrap().clone();
    all.push(json!({"role": "assistant", "content": answer}));
    all.push(json!({"role": "user", "content": "Again, please."}));

    let named = chat_in("poet", &request(&Value::from(all.clone()))).json;
    assert_eq!(named["session_runtime"]["session_id"], "poet");
    assert_eq!(session("poet").json["turns"], 2, "the session went on instead of starting again");
    let cached = named["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(
        cached > one["usage"]["prompt_tokens"].as_u64().unwrap(),
        "history and answer are reused: {named}"
    );

    let stateless = chat(&request(&Value::from(all))).json;
    assert_eq!(named["choices"][0]["message"], stateless["choices"][0]["message"]);
}

#[test]
fn a_named_session_takes_new_messages_alone() {
    let one = chat_in("alone", &request(&json!([{"role": "user", "content": "My name is Ada."}])));
    assert_eq!(one.status, 200, "{}", one.text);
    let mut body = request(&json!([{"role": "user", "content": "What is my name?"}]));
    body["session_id"] = "alone".into();
    let two = chat(&body).json;
    assert!(two["usage"]["prompt_tokens"].as_u64() > one.json["usage"]["total_tokens"].as_u64());
    assert_eq!(session("alone").json["turns"], 2);
}

#[test]
fn a_conversation_that_contradicts_the_session_is_refused() {
    chat_in("contradicted", &request(&json!([{"role": "user", "content": "One."}])));
    let other = json!([
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": "I never said this."},
        {"role": "user", "content": "Two."}]);
    let answer = chat_in("contradicted", &request(&other));
    assert_eq!((answer.status, answer.json["error"]["code"].as_str()), (409, Some("history_mismatch")));
    assert_eq!(answer.header("x-should-retry"), "false");
    assert_eq!(session("contradicted").json["turns"], 1);
}

#[test]
fn json_schemas_are_kept() {
    let mut body = request(&json!([{"role": "user", "content": "A person as JSON."}]));
    body["max_tokens"] = 64.into();
    let schema = json!({
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": false});
    let named = json!({"name": "person", "strict": true, "schema": schema});
    body["response_format"] = json!({"type": "json_schema", "json_schema": named});
    let answer = chat(&body).json;
    let content: Value =
        serde_json::from_str(answer["choices"][0]["message"]["content"].as_str().unwrap()).unwrap();
    assert_eq!(content.as_object().unwrap().len(), 1);
    assert!((1..=99).contains(&content["age"].as_i64().unwrap()));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[test]
fn what_is_not_offered_is_refused_by_name() {
    let hello = json!([{"role": "user", "content": "Hi."}]);
    for (field, value) in [
        ("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        ("n", json!(2)),
        ("logprobs", json!(true)),
        ("top_logprobs", json!(3)),
        ("audio", json!({})),
        ("presence_penalty", json!(0.5)),
    ] {
        let mut body = request(&hello);
        body[field] = value;
        let answer = chat(&body);
        assert_eq!(
            (answer.status, answer.json["error"]["code"].as_str()),
            (400, Some("unsupported_parameter"))
        );
        assert_eq!(answer.json["error"]["param"], field);
        assert_eq!(answer.header("content-type"), "application/json");
    }
    let mut body = request(&hello);
    body["user"] = "somebody".into();
    body["metadata"] = json!({"a": "b"});
    body["n"] = 1.into();
    assert_eq!(chat(&body).header("x-ignored-params"), "user, metadata");
}

#[test]
fn wrong_requests_are_refused_by_name() {
    let hello = json!([{"role": "user", "content": "Hi."}]);
    let mut other_model = request(&hello);
    other_model["model"] = "gpt".into();
    let answer = chat(&other_model);
    assert_eq!((answer.status, answer.json["error"]["code"].as_str()), (404, Some("model_not_found")));
    assert_eq!(
        (answer.json["error"]["type"].as_str(), answer.json["error"]["param"].as_str()),
        (Some("not_found"), Some("model"))
    );

    let long = chat(&request(&json!([{"role": "user", "content": "word ".repeat(40_000)}])));
    assert_eq!((long.status, long.json["error"]["code"].as_str()), (400, Some("context_length_exceeded")));
    let bad = chat(&request(&json!([{"role": "user", "content": 5}])));
    assert_eq!((bad.status, bad.json["error"]["param"].as_str()), (400, Some("messages[0].content")));
    let name = chat_in("a b", &request(&hello));
    assert_eq!((name.status, name.json["error"]["param"].as_str()), (400, Some("x-session-id")));
}

/// The interpreter to use: the one named in the environment, or any that has the client.
fn python_with_client() -> Option<String> {
    let named = std::env::var("SESSION_RUNTIME_TEST_PYTHON").ok();
    let python = named.clone().unwrap_or_else(|| "python3".to_owned());
    let check = std::process::Command::new(&python).args(["-c", "import openai"]).output();
    let works = check.is_ok_and(|output| output.status.success());
    assert!(
        works || named.is_none(),
        "SESSION_RUNTIME_TEST_PYTHON names {python}, which cannot import openai"
    );
    works.then_some(python)
}

#[test]
fn the_stock_openai_client_works() {
    let Some(python) = python_with_client() else {
        eprintln!("left out: no Python with the package openai (name one in SESSION_RUNTIME_TEST_PYTHON)");
        return;
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/openai_client.py");
    let output =
        std::process::Command::new(python).args([script, &shared().base, server::model()]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("stock client: ok"));
}
