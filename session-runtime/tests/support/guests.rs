//! Real guests for tests: the project's own components, and small ones written in WebAssembly text
//! against the project's own WIT.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

use session_runtime::agent::{GuestLimits, Guests, GuestsConfig};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The component of a guest of this project, built when it is missing; `tests/NAME` is one that is made for tests.
pub fn component(name: &str) -> PathBuf {
    static BUILD: Once = Once::new();
    let path = root().join("target/guests").join(format!("{name}.wasm"));
    if !path.exists() {
        BUILD.call_once(|| {
            let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
            let status = Command::new(cargo).args(["xtask", "guests"]).current_dir(root()).status();
            assert!(status.is_ok_and(|status| status.success()), "`cargo xtask guests` failed");
        });
    }
    assert!(path.exists(), "no component {}", path.display());
    path
}

/// Opens guests from component files.
pub async fn open(components: Vec<PathBuf>, limits: GuestLimits, cache: &Path) -> Guests {
    let config = GuestsConfig { cache: cache.join("code"), components, limits, ..GuestsConfig::default() };
    Guests::open(config).await.unwrap()
}

/// The WIT of the tool world.
pub fn tool_wit() -> String {
    std::fs::read_to_string(root().join("tools-sdk/wit/tool/tool.wit")).unwrap()
}

/// The WIT of the agent world.
pub fn agent_wit() -> String {
    std::fs::read_to_string(root().join("tools-sdk/wit/agent/agent.wit")).unwrap()
}

/// Wraps a core module in WebAssembly text as a component of `world`, and writes it.
pub fn build(directory: &Path, name: &str, wit: &str, world: &str, module: &str) -> PathBuf {
    let mut resolve = Resolve::default();
    let package = resolve.push_str("test.wit", wit).unwrap();
    let world = resolve.select_world(&[package], Some(world)).unwrap();
    let mut module = wat::parse_str(module).unwrap();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8, false).unwrap();
    let component = ComponentEncoder::default().validate(true).module(&module).unwrap().encode().unwrap();
    let path = directory.join(format!("{name}.wasm"));
    std::fs::write(&path, component).unwrap();
    path
}

/// A tool in WebAssembly text. `imports`, `fields` and `call` are inserted; `call` has the locals `$input`,
/// `$length` and must leave a pointer to `result<output, error>`, such as `(call $ok)` with the
/// JSON document `"done"`.
pub struct TextTool {
    pub name: &'static str,
    pub input_schema: &'static str,
    pub wants: Option<&'static str>,
    /// Effect class: pure, read, idempotent, effect.
    pub effect: u8,
    pub imports: &'static str,
    pub fields: &'static str,
    pub describe: &'static str,
    pub call: &'static str,
}

impl Default for TextTool {
    fn default() -> Self {
        Self {
            name: "text",
            input_schema: r#"{"type":"object"}"#,
            wants: None,
            effect: 1,
            imports: "",
            fields: "",
            describe: "",
            call: "(call $ok)",
        }
    }
}

impl TextTool {
    /// The core module.
    pub fn module(&self) -> String {
        let escape = |text: &str| text.replace('"', "\\22");
        let (name, schema, want) = (self.name, self.input_schema, self.wants.unwrap_or(""));
        format!(
            r#"(module
  {imports}
  (memory (export "memory") 2)
  (global $heap (mut i32) (i32.const 8192))
  (data (i32.const 1024) "{name_text}")
  (data (i32.const 1280) "{schema_text}")
  (data (i32.const 2304) "{want_text}")
  (data (i32.const 2560) "\22done\22")
  {fields}
  (func $realloc (export "cabi_realloc") (param $old i32) (param $bytes i32) (param $align i32) (param $new i32) (result i32)
    (local $at i32)
    (local.set $at (i32.and (i32.add (global.get $heap) (i32.const 7)) (i32.const -8)))
    (global.set $heap (i32.add (local.get $at) (local.get $new)))
    (local.get $at))
  (func (export "describe") (result i32)
    {describe}
    (i32.store (i32.const 64) (i32.const 1024)) (i32.store (i32.const 68) (i32.const {name_bytes}))
    (i32.store (i32.const 72) (i32.const 1024)) (i32.store (i32.const 76) (i32.const {name_bytes}))
    (i32.store (i32.const 80) (i32.const 1280)) (i32.store (i32.const 84) (i32.const {schema_bytes}))
    (i32.store (i32.const 88) (i32.const 1280)) (i32.store (i32.const 92) (i32.const {schema_bytes}))
    (i32.store8 (i32.const 96) (i32.const {effect}))
    (i32.store (i32.const 160) (i32.const 2304)) (i32.store (i32.const 164) (i32.const {want_bytes}))
    (i32.store (i32.const 100) (i32.const 160)) (i32.store (i32.const 104) (i32.const {wants}))
    (i32.const 64))
  (func $reply (param $at i32) (param $bytes i32) (result i32)
    (i32.store8 (i32.const 192) (i32.const 0))
    (i32.store (i32.const 196) (local.get $at)) (i32.store (i32.const 200) (local.get $bytes))
    (i32.store (i32.const 204) (local.get $at)) (i32.store (i32.const 208) (local.get $bytes))
    (i32.const 192))
  (func $ok (result i32) (call $reply (i32.const 2560) (i32.const 6)))
  (func (export "call") (param $input i32) (param $length i32) (param i32 i32 i32 i32 i64) (result i32)
    {call})
)"#,
            effect = self.effect,
            imports = self.imports,
            fields = self.fields,
            describe = self.describe,
            call = self.call,
            name_text = escape(name),
            schema_text = escape(schema),
            want_text = escape(want),
            name_bytes = name.len(),
            schema_bytes = schema.len(),
            want_bytes = want.len(),
            wants = u32::from(self.wants.is_some()),
        )
    }

    /// The component, in this directory.
    pub fn build(&self, directory: &Path, file: &str) -> PathBuf {
        build(directory, file, &tool_wit(), "tool", &self.module())
    }
}

/// An agent in WebAssembly text. `event` has the locals `$kind`, `$text` and `$length` and must leave a
/// pointer to `result<_, error>`; `(call $fine)` leaves a good one.
pub struct TextAgent {
    pub name: &'static str,
    pub imports: &'static str,
    pub fields: &'static str,
    pub event: &'static str,
}

impl Default for TextAgent {
    fn default() -> Self {
        Self { name: "text", imports: "", fields: "", event: "(call $fine)" }
    }
}

impl TextAgent {
    /// An agent that calls a tool and appends what it gave, or the code of its failure, as its answer.
    pub fn calling(name: &'static str) -> Self {
        Self {
            name,
            imports: r#"
              (import "session-runtime:agent/tools@0.2.0" "call" (func $tool (param i32 i32 i32 i32 i32)))
              (import "session-runtime:agent/chat@0.2.0" "append"
                (func $append (param i32 i32 i32 i64 i32 i32 i32)))"#,
            // The user's message is NAME, a newline, INPUT.
            event: r#"
              (local $at i32)
              (loop $search
                (local.set $at (i32.add (local.get $at) (i32.const 1)))
                (br_if $search (i32.ne (i32.const 10)
                  (i32.load8_u (i32.add (local.get $text) (local.get $at))))))
              (call $tool (local.get $text) (local.get $at)
                (i32.add (local.get $text) (i32.add (local.get $at) (i32.const 1)))
                (i32.sub (local.get $length) (i32.add (local.get $at) (i32.const 1)))
                (i32.const 256))
              (if (i32.load8_u (i32.const 256))
                (then (call $append (i32.const 2) (i32.const 5) (i32.const 0) (i64.const 0)
                        (i32.load (i32.const 264)) (i32.load (i32.const 268)) (i32.const 320)))
                (else (call $append (i32.const 2) (i32.const 5) (i32.const 0) (i64.const 0)
                        (i32.load (i32.const 260)) (i32.load (i32.const 264)) (i32.const 320))))
              (call $fine)"#,
            ..Self::default()
        }
    }

    /// The component, in this directory.
    pub fn build(&self, directory: &Path) -> PathBuf {
        let schema = r#"{"type":"object"}"#;
        let module = format!(
            r#"(module
  {imports}
  (memory (export "memory") 2)
  (global $heap (mut i32) (i32.const 8192))
  (data (i32.const 1024) "{name}")
  (data (i32.const 1280) "{schema_text}")
  (data (i32.const 1536) "went-wrong")
  {fields}
  (func (export "cabi_realloc") (param $old i32) (param $bytes i32) (param $align i32) (param $new i32) (result i32)
    (local $at i32)
    (local.set $at (i32.and (i32.add (global.get $heap) (i32.const 7)) (i32.const -8)))
    (global.set $heap (i32.add (local.get $at) (local.get $new)))
    (local.get $at))
  (func (export "describe") (result i32)
    (i32.store (i32.const 64) (i32.const 1024)) (i32.store (i32.const 68) (i32.const {name_bytes}))
    (i32.store (i32.const 72) (i32.const 1024)) (i32.store (i32.const 76) (i32.const {name_bytes}))
    (i32.store (i32.const 80) (i32.const 1280)) (i32.store (i32.const 84) (i32.const {schema_bytes}))
    (i32.const 64))
  (func $fine (result i32) (i32.store8 (i32.const 192) (i32.const 0)) (i32.const 192))
  (func $wrong (result i32)
    (i32.store8 (i32.const 192) (i32.const 1)) (i32.store8 (i32.const 196) (i32.const 5))
    (i32.store (i32.const 200) (i32.const 1536)) (i32.store (i32.const 204) (i32.const 10))
    (i32.store (i32.const 208) (i32.const 1536)) (i32.store (i32.const 212) (i32.const 10))
    (i32.const 192))
  (func (export "start") (result i32) (call $fine))
  (func (export "on-event") (param $kind i32) (param $text i32) (param $length i32) (result i32)
    {event})
)"#,
            imports = self.imports,
            fields = self.fields,
            event = self.event,
            name = self.name,
            name_bytes = self.name.len(),
            schema_text = schema.replace('"', "\\22"),
            schema_bytes = schema.len(),
        );
        build(directory, self.name, &agent_wit(), "agent", &module)
    }
}
