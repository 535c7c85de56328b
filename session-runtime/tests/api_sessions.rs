//! Native routes over loopback HTTP with a real model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/server.rs"]
mod server;
mod support;

use serde_json::{Value, json};
use server::{delete, events, events_until, get, long_turn, open, post, post_with, send, shared};

fn url(path: &str) -> String {
    format!("{}{path}", shared().base)
}

fn create(id: &str) -> String {
    let answer = post(&url("/v1/sessions"), &json!({"id": id, "instructions": "You answer briefly."}));
    assert_eq!(answer.text.matches("\"model\":").count(), 1, "a member is there once: {}", answer.text);
    assert_eq!(answer.status, 201, "{}", answer.text);
    assert_eq!(answer.header("location"), format!("/v1/sessions/{id}"));
    url(&format!("/v1/sessions/{id}"))
}

fn seqs(events: &[server::Sent]) -> Vec<u64> {
    events.iter().map(|event| event.id.parse().unwrap()).collect()
}

#[test]
fn a_session_is_created_listed_read_and_deleted() {
    let session = create("life");
    let read = get(&session);
    assert_eq!(read.status, 200);
    assert_eq!(read.json["object"], "session");
    assert_eq!(read.json["id"], "life");
    assert_eq!(read.json["model"], server::model());
    assert_eq!(read.json["status"], "idle");
    assert_eq!(read.json["kv"]["state"], "none");
    assert!(read.header("x-request-id").starts_with("req_"));

    let again = post(&url("/v1/sessions"), &json!({"id": "life"}));
    assert_eq!((again.status, again.json["code"].as_str()), (409, Some("session_exists")));
    let returned = post(&url("/v1/sessions"), &json!({"id": "life", "if_exists": "return"}));
    assert_eq!((returned.status, returned.json["id"].as_str()), (200, Some("life")));

    create("life-2");
    let mut seen = Vec::new();
    let mut after = String::new();
    loop {
        let page = get(&url(&format!("/v1/sessions?order=asc&limit=1{after}"))).json;
        seen.extend(page["data"].as_array().unwrap().iter().map(|session| session["id"].clone()));
        if page["has_more"] != true {
            break;
        }
        after = format!("&after={}", page["last_id"].as_str().unwrap());
    }
    let place = |id: &str| seen.iter().position(|seen| seen == id).unwrap();
    assert!(place("life") < place("life-2"));

    let deleted = delete(&session);
    assert_eq!((deleted.status, &deleted.json["deleted"]), (200, &Value::Bool(true)));
    assert_eq!(get(&session).json["code"], "session_not_found");
    assert_eq!(delete(&session).status, 404);
}

#[test]
fn a_turn_answers_with_its_result_and_is_kept() {
    let session = create("wait");
    let body = json!({"input": "Say hello.", "max_tokens": 8, "turn_id": "first"});
    let turn = post(&format!("{session}/turns"), &body);
    assert_eq!(turn.status, 200, "{}", turn.text);
    assert_eq!(turn.header("location"), "/v1/sessions/wait/turns/first");
    assert_eq!(turn.json["status"], "completed");
    assert!(!turn.json["output_text"].as_str().unwrap().is_empty());
    assert!(turn.json["usage"]["output_tokens"].as_u64().unwrap() <= 8);
    assert_eq!(get(&format!("{session}/turns/first")).json, turn.json);

    let again = post(&format!("{session}/turns"), &body);
    assert_eq!(again.json, turn.json, "the same turn id must not run twice");
    assert_eq!(get(&format!("{session}/turns")).json["data"].as_array().unwrap().len(), 1);
    assert_eq!(get(&format!("{session}/turns/none")).json["code"], "turn_not_found");

    let segments = get(&format!("{session}/segments")).json;
    let kinds: Vec<_> = segments["data"].as_array().unwrap().iter().map(|one| one["kind"].clone()).collect();
    assert_eq!(kinds, ["system", "user", "answer"]);
    assert_eq!(segments["data"][1]["text"], "Say hello.");
    assert_eq!(segments["data"][2]["text"], turn.json["output_text"]);
}

#[test]
fn i6_a_streamed_turn_shows_what_the_journal_holds() {
    let session = create("stream");
    post(&format!("{session}/turns"), &json!({"input": "One.", "max_tokens": 4}));
    let body = json!({"input": "Name a colour.", "max_tokens": 12, "stream": true});
    let answer = post(&format!("{session}/turns"), &body);
    assert_eq!(answer.header("content-type"), "text/event-stream");
    assert!(answer.text.contains("retry: 2000"));
    let sent = events(&answer.text);
    assert_eq!(sent.first().unwrap().event, "turn.started");
    assert_eq!(sent.last().unwrap().event, "turn.finished");

    let turn = sent[0].json()["data"]["turn"].as_str().unwrap().to_owned();
    let view = get(&format!("{session}/turns/{turn}")).json;
    let text: String = sent
        .iter()
        .filter(|event| event.event == "generation.tokens")
        .map(|event| event.json()["data"]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(view["output_text"], text);

    let first: u64 = sent[0].id.parse().unwrap();
    let page = get(&format!("{session}/events?after={}&limit=1000", first - 1)).json;
    let logged = page["data"].as_array().unwrap();
    for (event, logged) in sent.iter().zip(logged) {
        assert_eq!((&event.json(), event.event.as_str()), (logged, logged["type"].as_str().unwrap()));
    }
}

#[test]
fn a_cut_stream_resumes_without_loss_or_repetition() {
    let session = create("resume");
    let mut body = long_turn(40);
    body["background"] = true.into();
    let turn = post(&format!("{session}/turns"), &body);
    assert_eq!((turn.status, turn.json["status"].as_str()), (202, Some("running")));
    assert_eq!(
        turn.header("location"),
        format!("/v1/sessions/resume/turns/{}", turn.json["id"].as_str().unwrap())
    );

    let log = format!("{session}/events");
    let mut seen = events_until(&log, &[], |event| event.event == "generation.tokens");
    let cut = seen.last().unwrap().id.clone();
    seen.extend(events_until(&log, &[("last-event-id", &cut)], |event| event.event == "turn.finished"));

    let expected: Vec<u64> = (1..=seen.len() as u64).collect();
    assert_eq!(seqs(&seen), expected);
    let page = get(&format!("{log}?limit=1000")).json;
    for (event, logged) in seen.iter().zip(page["data"].as_array().unwrap()) {
        assert_eq!(&event.json(), logged);
    }
    let by_query = events_until(&format!("{log}?after={cut}"), &[], |event| event.event == "turn.finished");
    assert_eq!(seqs(&by_query).first(), Some(&(cut.parse::<u64>().unwrap() + 1)));
    assert_eq!(get(&format!("{log}?limit=2&after=1")).json["first_id"], "2");
}

#[test]
fn a_log_has_no_events_beyond_its_end() {
    let session = create("beyond");
    let headers = [("accept", "text/event-stream"), ("last-event-id", "999999")];
    let answer = send("GET", &format!("{session}/events"), &headers, None);
    assert_eq!((answer.status, answer.json["error"]["param"].as_str()), (400, Some("after")));
    let headers = [("accept", "text/event-stream"), ("last-event-id", "abc")];
    let answer = send("GET", &format!("{session}/events"), &headers, None);
    assert_eq!((answer.status, answer.json["error"]["param"].as_str()), (400, Some("last-event-id")));
}

#[test]
fn i5_a_busy_session_answers_with_a_conflict_that_clients_do_not_retry() {
    let session = create("busy");
    let turns = format!("{session}/turns");
    let mut body = long_turn(2000);
    body["background"] = true.into();
    body["turn_id"] = "long".into();
    assert_eq!(post(&turns, &body).status, 202);

    let refused = post(&turns, &json!({"input": "Hi.", "turn_id": "refused"}));
    assert_eq!((refused.status, refused.json["code"].as_str()), (409, Some("session_busy")));
    assert_eq!(refused.header("x-should-retry"), "false");
    assert_eq!(get(&format!("{turns}/refused")).status, 404);

    let mut queued = json!({"input": "Hi.", "max_tokens": 4, "turn_id": "queued", "background": true});
    queued["on_busy"] = "enqueue".into();
    let answer = post(&turns, &queued);
    assert_eq!((answer.status, answer.json["status"].as_str()), (202, Some("queued")));

    let cancelled = post(&format!("{turns}/long/cancel"), &json!({}));
    assert_eq!(cancelled.status, 200, "{}", cancelled.text);
    // The same id again waits for the turn that was queued.
    let done = post(&turns, &json!({"input": "Hi.", "turn_id": "queued"}));
    assert_eq!(done.json["status"], "completed");
    assert_eq!(get(&format!("{turns}/long")).json["status"], "cancelled");
    let order: Vec<_> = get(&format!("{session}/events?limit=1000")).json["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|event| matches!(event["type"].as_str(), Some("turn.started" | "turn.finished")))
        .map(|event| (event["type"].clone(), event["data"]["turn"].clone()))
        .collect();
    let expected = [("started", "long"), ("finished", "long"), ("started", "queued"), ("finished", "queued")];
    let expected = expected.map(|(what, turn)| (Value::from(format!("turn.{what}")), Value::from(turn)));
    assert_eq!(order, expected);
}

#[test]
fn kv_is_evicted_and_restored_with_a_report() {
    let session = create("kv");
    let input = support::story(3);
    post(&format!("{session}/turns"), &json!({"input": input, "max_tokens": 4}));
    let before = get(&format!("{session}/kv")).json;
    assert_eq!(before["state"], "idle");

    let evicted = post(&format!("{session}/kv/evict"), &json!({}));
    assert_eq!(evicted.status, 200, "{}", evicted.text);
    assert_eq!(
        (evicted.json["to"].as_str(), evicted.json["kv"]["state"].as_str()),
        (Some("evicted"), Some("evicted"))
    );
    assert_eq!(evicted.json["kv"]["resident_tokens"], 0);
    assert!(evicted.json["kv"]["host_tokens"].is_u64() && evicted.json["kv"]["host_bytes"].is_u64());

    let restored = post(&format!("{session}/kv/restore"), &json!({"mode": "load"}));
    assert_eq!(restored.status, 200, "{}", restored.text);
    assert_eq!(restored.json["mode"], "load");
    assert_eq!(restored.json["kv"]["state"], "restored");
    assert_eq!(restored.json["tokens"], restored.json["kv"]["resident_tokens"]);
    let loaded = restored.json["tokens_loaded"].as_u64().unwrap();
    let from = |tier: &str| restored.json[tier]["tokens"].as_u64().unwrap();
    assert!(loaded > 0 && from("from_host") + from("from_disk") == loaded, "{}", restored.text);

    let turn = post(&format!("{session}/turns"), &json!({"input": "And then?", "max_tokens": 4})).json;
    assert!(turn["usage"]["cached_tokens"].as_u64() >= restored.json["tokens"].as_u64(), "{turn}");
    let transitions = get(&format!("{session}/kv/transitions")).json;
    let states: Vec<_> =
        transitions["data"].as_array().unwrap().iter().map(|one| one["to"].clone()).collect();
    let place = |state: &str| states.iter().position(|to| to == state).unwrap();
    assert!(place("evicted") < place("restored"), "{states:?}");

    let wrong = post(&format!("{session}/kv/restore"), &json!({"mode": "quickly"}));
    assert_eq!((wrong.status, wrong.json["error"]["param"].as_str()), (400, Some("mode")));
}

#[test]
fn a_fork_continues_on_its_own() {
    let session = create("trunk");
    post(&format!("{session}/turns"), &json!({"input": "Remember seven.", "max_tokens": 4}));
    let fork = post(&format!("{session}/fork"), &json!({"id": "branch", "title": "a branch"}));
    assert_eq!((fork.status, fork.header("location")), (201, "/v1/sessions/branch"));
    assert_eq!(fork.json["parent"], "trunk");
    assert_eq!(fork.json["tokens"], get(&session).json["tokens"]);
    post(&url("/v1/sessions/branch/turns"), &json!({"input": "Go on.", "max_tokens": 4}));
    assert!(get(&url("/v1/sessions/branch")).json["tokens"].as_u64() > get(&session).json["tokens"].as_u64());
}

#[test]
fn wrong_requests_are_refused_by_name() {
    let sessions = url("/v1/sessions");
    let cases = [
        (json!({"agent": "nobody"}), 404, "agent_not_found", Some("agent")),
        (json!({"tools": ["nothing"]}), 404, "tool_not_found", Some("tools")),
        (json!({"model": "other"}), 404, "model_not_found", Some("model")),
        (json!({"tools": "calculator"}), 400, "invalid_request", Some("tools")),
        (json!({"sampling": {"temperature": "hot"}}), 400, "invalid_request", Some("sampling.temperature")),
        (json!({"sampling": {"top_p": 1.5}}), 400, "invalid_request", Some("sampling.top_p")),
        (json!({"budget": {"max_tokens": 5}}), 400, "unsupported_parameter", Some("budget")),
        (json!({"grants": [{"name": "x", "path": "a/b"}]}), 400, "invalid_request", Some("grants[0].path")),
        (json!({"grants": [{"name": "x", "path": "/"}]}), 403, "grant_outside_roots", Some("grants")),
    ];
    for (body, status, code, param) in cases {
        let answer = post(&sessions, &body);
        assert_eq!((answer.status, answer.json["code"].as_str()), (status, Some(code)), "{body}");
        assert_eq!(answer.json["error"]["param"].as_str(), param, "{body}");
        check_problem(&answer, "/v1/sessions");
    }
    assert_eq!(send("POST", &sessions, &[], Some("{}")).status, 415);
    let broken = send("POST", &sessions, &[("content-type", "application/json")], Some("{"));
    assert_eq!((broken.status, broken.json["code"].as_str()), (400, Some("invalid_json")));
    let odd = post(&sessions, &json!({"title": "odd", "colour": "red"}));
    assert_eq!((odd.status, odd.header("x-ignored-params")), (201, "colour"));
    assert_eq!(get(&url("/v1/sessions?limit=0")).json["error"]["param"], "limit");
}

#[test]
fn wrong_turns_are_refused_by_name() {
    let session = create("refusals");
    let turns = format!("{session}/turns");
    let bad_schema = json!({"type": "json_schema", "json_schema": {"schema": {"type": 5}}});
    let cases = [
        (json!({}), "invalid_request", None),
        (json!({"input": 5}), "invalid_request", Some("input")),
        (json!({"input": "x", "on_busy": "rollback"}), "unsupported_parameter", Some("on_busy")),
        (json!({"input": "x", "tool_choice": "auto"}), "unsupported_parameter", Some("tool_choice")),
        (json!({"input": "x", "stream": true, "background": true}), "invalid_request", Some("background")),
        (json!({"input": "x", "max_tokens": 0}), "invalid_request", Some("max_tokens")),
        (json!({"input": "x", "response_format": bad_schema}), "constraint_invalid", Some("response_format")),
    ];
    for (body, code, param) in cases {
        let answer = post(&turns, &body);
        assert_eq!(
            (answer.status, answer.json["code"].as_str()),
            (400, Some(code)),
            "{body} {}",
            answer.text
        );
        assert_eq!(answer.json["error"]["param"].as_str(), param, "{body}");
    }
    let keyed = post_with(&turns, &[("idempotency-key", "k")], &json!({"input": "x"}));
    assert_eq!(keyed.json["error"]["param"], "idempotency-key");
    let long = post(&turns, &json!({"input": "word ".repeat(40_000)}));
    assert_eq!(
        (long.status, long.json["code"].as_str()),
        (400, Some("context_length_exceeded")),
        "{}",
        long.text
    );
    let missing = post(&url("/v1/sessions/nobody/turns"), &json!({"input": "x"}));
    assert_eq!((missing.status, missing.json["code"].as_str()), (404, Some("session_not_found")));
    assert_eq!(get(&turns).json["data"], json!([]), "a refused turn leaves no trace");
}

#[test]
fn i8_a_body_has_a_limit() {
    let body = json!({"title": "x".repeat(5 << 20)}).to_string();
    // The server may close before everything is sent: then there is no answer to read.
    let sent = std::panic::catch_unwind(|| {
        send("POST", &url("/v1/sessions"), &[("content-type", "application/json")], Some(&body))
    });
    if let Ok(answer) = sent {
        assert_eq!((answer.status, answer.json["code"].as_str()), (413, Some("request_too_large")));
    }
    assert!(!get(&url("/v1/sessions?limit=1000")).text.contains("xxxxxxxx"));
}

fn check_problem(answer: &server::Answer, path: &str) {
    let body = &answer.json;
    assert_eq!(answer.header("content-type"), "application/problem+json");
    assert_eq!(body["status"], answer.status);
    assert_eq!(body["instance"], path);
    assert_eq!(body["request_id"], answer.header("x-request-id"));
    assert_eq!(body["type"], format!("urn:session-runtime:error:{}", body["code"].as_str().unwrap()));
    assert_eq!(body["detail"], body["error"]["message"]);
    assert_eq!(body["code"], body["error"]["code"]);
    assert!(body["title"].is_string() && body["retryable"].is_boolean() && body["error"]["type"].is_string());
}

#[test]
fn unknown_routes_and_methods_have_the_same_body() {
    let answer = get(&url("/v1/responses"));
    assert_eq!((answer.status, answer.json["code"].as_str()), (404, Some("route_not_found")));
    check_problem(&answer, "/v1/responses");
    let answer = send("PUT", &url("/v1/sessions"), &[], Some("{}"));
    assert_eq!((answer.status, answer.json["code"].as_str()), (405, Some("method_not_allowed")));
    assert!(answer.header("allow").contains("POST"));
    check_problem(&answer, "/v1/sessions");
}

#[test]
fn i7_other_hosts_and_other_pages_are_refused() {
    for (name, value, code) in [
        ("host", "example.org", "host_not_allowed"),
        ("origin", "http://example.org", "origin_not_allowed"),
        ("origin", "null", "origin_not_allowed"),
    ] {
        let answer = send("GET", &url("/v1/sessions"), &[(name, value)], None);
        assert_eq!((answer.status, answer.json["code"].as_str()), (403, Some(code)), "{name}: {value}");
    }
    let local = send("GET", &url("/v1/sessions"), &[("origin", "http://localhost:3000")], None);
    assert_eq!(local.status, 200);
}

#[test]
fn every_described_route_exists() {
    let document = get(&url("/openapi.json")).json;
    assert_eq!(document["openapi"], "3.1.0");
    let mut count = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys().filter(|name| *name != "parameters") {
            let path = path.replace("{id}", "no-such-id").replace("{turn}", "no-such-turn");
            let answer = send(
                &method.to_uppercase(),
                &url(&path),
                &[("content-type", "application/json")],
                Some("{}"),
            );
            let code = answer.json["code"].as_str().unwrap_or_default();
            assert!(code != "route_not_found" && code != "method_not_allowed", "{method} {path}");
            count += 1;
        }
    }
    assert!(count >= 25, "{count} operations");
    assert!(document["components"]["schemas"]["ProblemBody"].is_object());
}

#[test]
fn the_host_says_what_it_is_and_how_it_is() {
    for path in ["/livez", "/readyz", "/health"] {
        let answer = get(&url(path));
        assert_eq!((answer.status, answer.json["status"].as_str()), (200, Some("ok")), "{path}");
    }
    assert_eq!(get(&url("/version")).json["version"], env!("CARGO_PKG_VERSION"));
    let model = get(&url(&format!("/v1/models/{}", server::model()))).json;
    assert_eq!(model["meta"]["architecture"], "llama");
    assert_eq!(get(&url("/v1/models")).json["data"][0]["id"], server::model());
    let other = get(&url("/v1/models/other"));
    assert_eq!((other.status, other.header("content-type")), (404, "application/json"));
    assert!(
        get(&url("/v1/tools")).json["data"].is_array() && get(&url("/v1/agents")).json["data"].is_array()
    );
    let metrics = get(&url("/metrics"));
    assert!(metrics.header("content-type").starts_with("text/plain"));
    assert!(metrics.text.contains("# TYPE session_runtime_sessions gauge"));
    let value = |name: &str| -> f64 {
        let line = metrics.text.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(value("session_runtime_kv_quota_bytes{tier=\"device\"}") > 0.0);
    assert_eq!(value("session_runtime_kv_quota_bytes{tier=\"host\"}"), 0.0, "the host tier is off in tests");
    let health = get(&url("/health")).json;
    assert_eq!(health["runtime"]["host"], json!({"bytes": 0, "budget": 0, "cells": 0}));
    assert!(value("session_runtime_http_responses_total{class=\"2xx\"}") >= 3.0);
}

#[test]
fn a_stop_ends_streams_and_refuses_new_work_but_loses_nothing() {
    let directory = server::fresh_dir("stop");
    let mut server = server::TestServer::start(support::config(&directory));
    let base = server.base.clone();
    post(&format!("{base}/v1/sessions"), &json!({"id": "s"}));
    post(&format!("{base}/v1/sessions/s/turns"), &json!({"input": "Hi.", "max_tokens": 4}));
    let last = get(&format!("{base}/v1/sessions/s")).json["last_event"].as_u64().unwrap();
    let stream =
        open("GET", &format!("{base}/v1/sessions/s/events"), &[("accept", "text/event-stream")], None);
    server.announce_stop();
    let text = stream.into_body().read_to_string().unwrap();
    let seen = seqs(&events(&text));
    assert!(seen.len() as u64 >= last, "the stream ends by itself, complete");
    assert_eq!(seen, (1..=seen.len() as u64).collect::<Vec<_>>());
    server.stop();

    let server = server::TestServer::start(support::config(&directory));
    let session = get(&format!("{}/v1/sessions/s", server.base)).json;
    assert_eq!(session["turns"], 1);
    let turn =
        post(&format!("{}/v1/sessions/s/turns", server.base), &json!({"input": "More.", "max_tokens": 4}));
    assert_eq!(turn.json["status"], "completed", "{}", turn.text);
    server.stop();
}

#[test]
fn i8_a_client_that_never_finishes_its_request_does_not_keep_the_server_from_stopping() {
    let server = server::TestServer::start(support::config(&server::fresh_dir("stuck")));
    let address = server.base.strip_prefix("http://").unwrap();
    let mut stuck = std::net::TcpStream::connect(address).unwrap();
    let head = "POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    std::io::Write::write_all(&mut stuck, format!("{head}content-length: 9\r\n\r\n{{").as_bytes()).unwrap();
    assert_eq!(get(&format!("{}/livez", server.base)).status, 200);
    server.stop();
}
