//! The program as a user calls it, with a real model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/server.rs"]
mod server;
mod support;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_session-runtime");

fn program(data: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command.env("SESSION_RUNTIME_MODEL", server::model()).env("SESSION_RUNTIME_DATA", data);
    command.env("SESSION_RUNTIME_LOG", "error").env_remove("NO_COLOR").stdin(Stdio::null());
    command
}

fn run(data: &Path, arguments: &[&str]) -> Output {
    program(data).args(arguments).output().unwrap()
}

fn ok(data: &Path, arguments: &[&str]) -> String {
    let output = run(data, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The one sentence a failed command ends with.
fn failure(output: &Output, exit: i32) -> String {
    assert_eq!(output.status.code(), Some(exit), "{}", stderr(output));
    let text = stderr(output);
    text.lines().find_map(|line| line.strip_prefix("error: ")).unwrap_or_else(|| panic!("{text}")).to_owned()
}

fn data_dir(name: &str) -> PathBuf {
    server::fresh_dir(&format!("cli-{name}"))
}

/// A server process that is ended with the test.
struct Served {
    child: Child,
    url: String,
}

impl Served {
    fn start(data: &Path, options: &[&str]) -> Self {
        let mut serve = program(data);
        serve.args(["serve", "--listen", "127.0.0.1:0"]).args(options);
        let mut child = serve.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let url = loop {
            let line = lines.next().expect("the server ended before it listened").unwrap();
            if let Some(at) = line.find("http://") {
                break line[at..].split_whitespace().next().unwrap().to_owned();
            }
        };
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, url }
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn wrong_calls_end_with_two() {
    let data = data_dir("usage");
    for arguments in [
        &["dance"][..],
        &["run", "--grant", "nothing"],
        &["run", "--device-budget", "lots", "x"],
        &["run"],
        &["run", " "],
    ] {
        failure(&run(&data, arguments), 2);
    }
    assert_eq!(run(&data, &["run", "--session", "s", "--agent", "a", "x"]).status.code(), Some(2));
    assert_eq!(run(&data, &["sessions", "show", "../x"]).status.code(), Some(2));
    let help = ok(&data, &["--help"]);
    for word in ["run", "serve", "sessions", "model", "doctor", "--data-dir"] {
        assert!(help.contains(word), "{word}");
    }
    assert!(!help.contains("store-probe"));
}

#[test]
fn a_session_goes_on_from_command_to_command() {
    let data = data_dir("alone");
    let first = run(&data, &["run", "--max-tokens", "8", "--title", "greeting", "Say hello."]);
    assert!(first.status.success(), "{}", stderr(&first));
    let answer = String::from_utf8(first.stdout.clone()).unwrap();
    assert!(!answer.trim().is_empty());
    let id =
        stderr(&first).lines().find_map(|line| line.strip_prefix("session ").map(str::to_owned)).unwrap();

    let turn: Value =
        serde_json::from_str(&ok(&data, &["run", "--json", "--session", &id, "--max-tokens", "8", "Again."]))
            .unwrap();
    assert_eq!((turn["status"].as_str(), turn["number"].as_u64()), (Some("completed"), Some(2)));

    let sessions: Value = serde_json::from_str(&ok(&data, &["sessions", "ls", "--json"])).unwrap();
    assert_eq!(
        (sessions[0]["id"].as_str(), sessions[0]["spec"]["title"].as_str()),
        (Some(&*id), Some("greeting"))
    );
    let shown = ok(&data, &["sessions", "show", &id]);
    assert!(shown.contains(&id) && shown.contains("Say hello."), "{shown}");
    let events = ok(&data, &["sessions", "events", &id, "--json"]);
    let seqs: Vec<u64> = events
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["seq"].as_u64().unwrap())
        .collect();
    assert_eq!(seqs, (1..=seqs.len() as u64).collect::<Vec<_>>());

    let fork = ok(&data, &["sessions", "fork", &id]);
    assert_eq!(ok(&data, &["sessions", "rm", &id, fork.trim()]).lines().count(), 2);
    let gone = failure(&run(&data, &["sessions", "show", &id]), 1);
    assert!(gone.contains(&id) && gone.contains("sessions ls"), "{gone}");
}

#[test]
fn the_answer_alone_goes_to_standard_output() {
    let data = data_dir("output");
    let output = run(&data, &["run", "--max-tokens", "8", "Say hello."]);
    let id =
        stderr(&output).lines().find_map(|line| line.strip_prefix("session ").map(str::to_owned)).unwrap();
    let shown: Value = serde_json::from_str(&ok(&data, &["sessions", "show", "--json", &id])).unwrap();
    let answer = shown["turns"][0]["output_text"].as_str().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{answer}\n"));
}

#[test]
fn commands_talk_to_the_running_server() {
    let data = data_dir("beside");
    let mut served = Served::start(&data, &[]);
    let made = server::post(&format!("{}/v1/sessions", served.url), &serde_json::json!({"id": "made-there"}));
    assert_eq!(made.status, 201);
    assert!(ok(&data, &["sessions", "ls"]).contains("made-there"));
    ok(&data, &["run", "--session", "made-there", "--max-tokens", "8", "Hi."]);
    assert!(ok(&data, &["sessions", "evict", "made-there"]).contains("evicted"));
    let restored = ok(&data, &["sessions", "restore", "made-there", "--explain"]);
    assert!(restored.contains("kv restored") && restored.contains("predicted"), "{restored}");
    let turns = server::get(&format!("{}/v1/sessions/made-there/turns", served.url)).json;
    assert_eq!(turns["data"].as_array().unwrap().len(), 1);
    let other = failure(&run(&data, &["--model", "another-model", "sessions", "ls"]), 1);
    assert!(other.contains("another-model") && other.contains(server::model()), "{other}");

    served.signal("-TERM");
    assert!(served.child.wait().unwrap().success(), "a stopped server ends well");
    assert!(ok(&data, &["sessions", "ls"]).contains("made-there"));
}

#[test]
fn i6_what_a_killed_server_answered_is_still_there() {
    let data = data_dir("killed");
    let mut served = Served::start(&data, &[]);
    let sessions = format!("{}/v1/sessions", served.url);
    server::post(&sessions, &serde_json::json!({"id": "kept"}));
    let body = serde_json::json!({"input": "Hi.", "max_tokens": 8});
    let turn = server::post(&format!("{sessions}/kept/turns"), &body).json;
    served.child.kill().unwrap();
    served.child.wait().unwrap();

    let shown: Value = serde_json::from_str(&ok(&data, &["sessions", "show", "--json", "kept"])).unwrap();
    assert_eq!(shown["turns"][0]["output_text"], turn["output_text"]);
    assert_eq!(shown["turns"][0]["status"], "completed");
}

#[test]
fn i7_a_server_grants_what_its_operator_allowed() {
    let (data, files) = (data_dir("grants"), data_dir("granted"));
    let (allowed, other) = (files.join("allowed"), files.join("other"));
    std::fs::create_dir_all(allowed.join("inner")).unwrap();
    std::fs::create_dir_all(&other).unwrap();
    let grant = |path: &Path| format!("notes={}", path.display());
    // Alone, a command allows the directories that it grants itself.
    ok(&data, &["run", "--grant", &grant(&other), "--max-tokens", "2", "Hi."]);
    let _served = Served::start(&data, &["--grant-root", allowed.to_str().unwrap()]);
    for inside in [&allowed, &allowed.join("inner")] {
        ok(&data, &["run", "--grant", &grant(inside), "--max-tokens", "2", "Hi."]);
    }
    let refused = failure(&run(&data, &["run", "--grant", &grant(&other), "Hi."]), 1);
    assert!(refused.contains(&format!("serve --grant-root {}", other.display())), "{refused}");
}

#[test]
fn addresses_that_cannot_be_used_are_explained() {
    let data = data_dir("listen");
    let open = failure(&run(&data, &["serve", "--listen", "0.0.0.0:0"]), 1);
    assert!(open.contains("--allow-remote") && open.contains("authentication"), "{open}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let used = failure(&run(&data, &["serve", "--listen", &address]), 1);
    assert!(used.contains("in use") && used.contains("--listen"), "{used}");
}

#[test]
fn a_prompt_that_does_not_fit_leaves_no_session_behind() {
    let data = data_dir("long");
    let refused = failure(&run(&data, &["run", &"word ".repeat(10_000)]), 1);
    assert!(refused.contains("context holds 8192") && refused.contains("shorter message"), "{refused}");
    assert_eq!(ok(&data, &["sessions", "ls", "--json"]).trim(), "[]");
}

#[test]
fn a_missing_model_is_explained() {
    let data = data_dir("model");
    let output = run(&data, &["--model", "no-such-model", "run", "Hi."]);
    let message = failure(&output, 1);
    assert!(message.contains("no-such-model") && message.contains(server::model()), "{message}");
}
