//! The gate and the door: what guests cannot reach, and which files are no guests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/guests.rs"]
mod guests;

use std::path::{Path, PathBuf};

use guests::{TextTool, agent_wit, build, component, open, tool_wit};
use serde_json::json;
use session_runtime::agent::{GuestLimits, Guests, ToolRequest};
use session_runtime::session::spec::FileGrant;

struct Place {
    directory: tempfile::TempDir,
    guests: Guests,
}

async fn place(components: Vec<PathBuf>) -> Place {
    let directory = tempfile::tempdir().unwrap();
    let granted = directory.path().join("granted");
    std::fs::create_dir(&granted).unwrap();
    std::fs::write(directory.path().join("secret.txt"), "secret").unwrap();
    std::fs::write(granted.join("note.txt"), "hello").unwrap();
    std::os::unix::fs::symlink("../secret.txt", granted.join("link.txt")).unwrap();
    std::os::unix::fs::symlink("..", granted.join("up")).unwrap();
    let guests = open(components, GuestLimits::default(), directory.path()).await;
    Place { directory, guests }
}

impl Place {
    fn request(&self) -> ToolRequest {
        let path = self.directory.path().join("granted").to_str().unwrap().to_owned();
        let grants = vec![FileGrant { name: "docs".to_owned(), path, writable: false }];
        ToolRequest { grants, ..ToolRequest::default() }
    }

    /// What the hostile tool got: one line for the grant it has, one for a grant it has not.
    async fn escape(&self, path: &str) -> String {
        let input = json!({ "misbehaviour": "escape", "text": path }).to_string();
        self.guests.call_tool("hostile", &input, self.request()).await.unwrap().text
    }
}

#[tokio::test]
async fn i7_a_component_reads_what_was_granted_and_nothing_else() {
    let place = place(vec![component("tests/hostile")]).await;
    let text = place.escape("note.txt").await;
    assert!(text.starts_with("docs: read 5 bytes\nnot-granted: "), "{text}");
    let absolute = place.directory.path().join("secret.txt");
    let mut denied = place.guests.denials();
    assert_eq!(denied, 1, "the grant that was not given");
    for path in [
        "../secret.txt",
        "x/../../secret.txt",
        absolute.to_str().unwrap(),
        "/etc/passwd",
        "link.txt",
        "up/secret.txt",
        "note.txt/",
        "note.txt\0",
    ] {
        let text = place.escape(path).await;
        assert!(!text.contains("read"), "{path:?}: {text}");
        denied += 2;
        assert_eq!(place.guests.denials(), denied, "{path:?}: {text}");
    }
}

#[tokio::test]
async fn i7_without_a_grant_there_are_no_files() {
    let place = place(vec![component("tests/hostile"), component("files")]).await;
    let input = json!({ "misbehaviour": "escape", "text": "note.txt" }).to_string();
    let output = place.guests.call_tool("hostile", &input, ToolRequest::default()).await.unwrap();
    assert!(output.text.starts_with("not-granted: "), "{}", output.text);
    assert!(!output.text.contains("read"));
    let input = r#"{"operation": "read", "query": "docs/note.txt"}"#;
    let failure = place.guests.call_tool("files", input, ToolRequest::default()).await.unwrap_err();
    assert_eq!((failure.kind.as_str(), failure.code.as_str()), ("denied", "no_grant"));
}

/// Reads `docs/note.txt` and answers with the error's code, or `"done"`.
fn reader(wants: Option<&'static str>) -> TextTool {
    TextTool {
        wants,
        imports: r#"(import "session-runtime:tool/files@0.2.0" "read" (func $read (param i32 i32 i32 i32 i64 i32 i32)))"#,
        fields: r#"(data (i32.const 3072) "docsnote.txt")"#,
        call: r#"
            (call $read (i32.const 3072) (i32.const 4) (i32.const 3076) (i32.const 8)
                        (i64.const 0) (i32.const 100) (i32.const 256))
            (if (result i32) (i32.load8_u (i32.const 256))
              (then
                (i32.store8 (i32.const 4096) (i32.const 34))
                (memory.copy (i32.const 4097) (i32.load (i32.const 264)) (i32.load (i32.const 268)))
                (i32.store8 (i32.add (i32.const 4097) (i32.load (i32.const 268))) (i32.const 34))
                (call $reply (i32.const 4096) (i32.add (i32.const 2) (i32.load (i32.const 268)))))
              (else (call $ok)))"#,
        ..TextTool::default()
    }
}

#[tokio::test]
async fn i7_a_tool_that_did_not_ask_for_files_gets_none() {
    let made = tempfile::tempdir().unwrap();
    let asks = reader(Some("files")).build(made.path(), "asks");
    let asked = place(vec![asks]).await;
    let output = asked.guests.call_tool("text", "{}", asked.request()).await.unwrap();
    assert_eq!(output.json, r#""done""#);
    let silent = reader(None).build(made.path(), "silent");
    let silent = place(vec![silent]).await;
    let output = silent.guests.call_tool("text", "{}", silent.request()).await.unwrap();
    assert_eq!(output.json, r#""grant_unknown""#);
    assert_eq!(silent.guests.denials(), 1);
}

/// The error with which a file is listed, while the calculator beside it works.
async fn refusal(file: &Path) -> String {
    let place = tempfile::tempdir().unwrap();
    let components = vec![file.to_owned(), component("calculator")];
    let guests = open(components, GuestLimits::default(), place.path()).await;
    let output =
        guests.call_tool("calculator", r#"{"expression": "1 + 1"}"#, ToolRequest::default()).await.unwrap();
    assert!(output.json.contains(r#""value":"2""#), "{}", output.json);
    let mut errors: Vec<String> = guests.tools().into_iter().filter_map(|tool| tool.error).collect();
    errors.extend(guests.agents().into_iter().filter_map(|agent| agent.error));
    assert_eq!(guests.warnings(), errors);
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors.remove(0)
}

#[tokio::test]
async fn i7_another_version_of_the_contract_is_refused_by_name() {
    let made = tempfile::tempdir().unwrap();
    let wit = tool_wit().replace("@0.2.0", "@0.1.0");
    let file = build(made.path(), "older", &wit, "tool", &TextTool::default().module());
    let error = refusal(&file).await;
    assert_eq!(
        error,
        "component older was built for session-runtime:tool@0.1.0; this host speaks 0.2.0: rebuild it with the tools-sdk of \
         this host"
    );
}

#[tokio::test]
async fn i7_an_import_that_is_not_offered_is_refused_by_name() {
    let made = tempfile::tempdir().unwrap();
    let wit = format!(
        "{}\npackage wasi:random@0.2.0 {{ interface random {{ get-random-u64: func() -> u64; }} }}",
        tool_wit().replace("import log;", "import log;\n  import wasi:random/random@0.2.0;")
    );
    let tool = TextTool {
        imports: r#"(import "wasi:random/random@0.2.0" "get-random-u64" (func $random (result i64)))"#,
        call: "(drop (call $random)) (call $ok)",
        ..TextTool::default()
    };
    let file = build(made.path(), "ambient", &wit, "tool", &tool.module());
    let error = refusal(&file).await;
    assert!(
        error.starts_with(
            "component ambient imports wasi:random/random@0.2.0, which this host does not offer to tools"
        ),
        "{error}"
    );
}

#[tokio::test]
async fn files_that_are_no_components_are_refused_with_the_reason() {
    let made = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = made.path().join(format!("{name}.wasm"));
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let whole = std::fs::read(component("calculator")).unwrap();
    let module = wat::parse_str("(module (func (export \"run\")))").unwrap();
    let cases = [
        (write("core", &module), "core is a core module, not a component: wrap it"),
        (write("cut", &whole[..whole.len() / 2]), "component cut is malformed: "),
        (write("head", &whole[..8]), "component head is neither an agent nor a tool"),
        (write("stub", &whole[..5]), "component stub is malformed: "),
        (write("text", b"hello"), "text is no WebAssembly binary"),
        (write("empty", b""), "empty is no WebAssembly binary"),
        (made.path().join("absent.wasm"), "component absent cannot be read: "),
    ];
    for (file, says) in cases {
        let error = refusal(&file).await;
        assert!(error.starts_with(says), "{}: {error}", file.display());
    }
    let wit = "package other:thing@1.0.0; world w { export run: func(); }";
    let file = build(made.path(), "other", wit, "w", "(module (func (export \"run\")))");
    assert!(refusal(&file).await.starts_with("component other is neither an agent nor a tool"));
}

#[tokio::test]
async fn i8_a_component_that_is_too_large_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let limits = GuestLimits { component_bytes: 100_000, ..GuestLimits::default() };
    let guests = open(vec![component("calculator")], limits, place.path()).await;
    let error = guests.tools().remove(0).error.unwrap();
    assert!(error.contains("more than the limit of 100000 (limits.component_bytes)"), "{error}");
}

#[tokio::test]
async fn i8_a_describe_that_misbehaves_is_listed_with_its_reason() {
    let made = tempfile::tempdir().unwrap();
    let tool = |file: &str, tool: TextTool| tool.build(made.path(), file);
    let cases = [
        (
            tool("spins", TextTool { describe: "(loop $l (br $l))", ..Default::default() }),
            "describe: tool 'spins' was stopped: it computed for more than its 2000 ms",
        ),
        (
            tool("traps", TextTool { describe: "(unreachable)", ..Default::default() }),
            "describe: tool 'traps' was stopped: it crashed",
        ),
        (
            tool(
                "greedy",
                TextTool {
                    describe: "(loop $l (drop (memory.grow (i32.const 16))) (br $l))",
                    ..Default::default()
                },
            ),
            "describe: tool 'greedy' was stopped: it asked for more than its 67108864 bytes",
        ),
        (tool("odd", TextTool { name: "../odd", ..Default::default() }), "component odd names its tool"),
        (
            tool("schema", TextTool { input_schema: r#"{"type":"string"}"#, ..Default::default() }),
            "tool 'text': its input schema has no root type `object`",
        ),
        (
            tool("wants", TextTool { wants: Some("sockets"), ..Default::default() }),
            "tool 'text' wants 'sockets', which this host does not offer",
        ),
        (
            tool("double", TextTool { name: "calculator2", input_schema: "{", ..Default::default() }),
            "tool 'calculator2': its input schema is no JSON document",
        ),
    ];
    for (file, says) in cases {
        let error = refusal(&file).await;
        assert!(error.starts_with(says), "{}: {error}", file.display());
    }
}

#[tokio::test]
async fn i7_a_name_belongs_to_the_first_that_took_it() {
    let made = tempfile::tempdir().unwrap();
    let first = TextTool::default().build(made.path(), "first");
    let second = TextTool { call: "(unreachable)", ..TextTool::default() }.build(made.path(), "second");
    let guests = open(vec![first, second], GuestLimits::default(), made.path()).await;
    let output = guests.call_tool("text", "{}", ToolRequest::default()).await.unwrap();
    assert_eq!(output.json, r#""done""#);
    assert_eq!(guests.warnings(), ["there is already a tool 'text'"]);
}

#[tokio::test]
async fn i7_an_agents_describe_reaches_no_host() {
    let made = tempfile::tempdir().unwrap();
    let module = r#"(module
      (import "session-runtime:agent/clock@0.2.0" "now-ms" (func $now (result i64)))
      (memory (export "memory") 1)
      (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32) (i32.const 1024))
      (func (export "describe") (result i32) (drop (call $now)) (unreachable))
      (func (export "start") (result i32) (i32.const 0))
      (func (export "on-event") (param i32 i32 i32) (result i32) (i32.const 0)))"#;
    let file = build(made.path(), "curious", &agent_wit(), "agent", module);
    let error = refusal(&file).await;
    assert!(error.starts_with("describe: agent 'curious' was stopped: "), "{error}");
    assert!(error.contains("now-ms"), "{error}");
}
