//! Real guests for tests: the project's own components, and small ones written in WebAssembly text
//! against the project's own WIT.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

use session_runtime::agent::{GuestLimits, Guests, GuestsConfig};
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The component of a guest of this project, built when it is missing.
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
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8).unwrap();
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
    (i32.store8 (i32.const 96) (i32.const 1))
    (i32.store (i32.const 128) (i32.const 2304)) (i32.store (i32.const 132) (i32.const {want_bytes}))
    (i32.store (i32.const 100) (i32.const 128)) (i32.store (i32.const 104) (i32.const {wants}))
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
