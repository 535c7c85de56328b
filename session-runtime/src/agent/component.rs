//! Loads a component file and says what it is before any of its code runs.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use wasmtime::component::Component;

use super::cache::CodeCache;
use super::engine::GuestEngine;

/// Version of both WIT packages that this host speaks.
const SPOKEN: &str = "0.2.0";
const NAMESPACE: &str = "session-runtime";
const TOOL_INTERFACES: &[&str] = &["types", "log", "clock", "progress", "files"];
const AGENT_INTERFACES: &[&str] =
    &["types", "session", "chat", "context", "segments", "tools", "state", "clock", "random", "log"];

/// Why a file is no guest. `component X ...` with the fix where there is one.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    #[error("component {name} cannot be read: {source}")]
    Read { name: String, source: std::io::Error },
    #[error("component {name} has {bytes} bytes, more than the limit of {most} (limits.component_bytes)")]
    TooLarge { name: String, bytes: u64, most: u64 },
    #[error("{name} is no WebAssembly binary: build it with `cargo xtask guests`, or remove it")]
    NotWasm { name: String },
    #[error(
        "{name} is a core module, not a component: wrap it with `cargo xtask guests` or `wasm-tools component new`"
    )]
    CoreModule { name: String },
    #[error("component {name} is malformed: {reason}")]
    Malformed { name: String, reason: String },
    #[error(
        "component {name} was built for {NAMESPACE}:{package}@{version}; this host speaks {SPOKEN}: rebuild it with the tools-sdk of this host"
    )]
    Version { name: String, package: String, version: String },
    #[error("component {name} imports {import}, which this host does not offer to {world}s{hint}")]
    Import { name: String, import: String, world: &'static str, hint: &'static str },
    #[error(
        "component {name} is neither an agent nor a tool: agents export `describe`, `start` and `on-event`, tools `describe` and `call`"
    )]
    NoWorld { name: String },
    #[error("component {name} does not fit the {world} world: {reason}")]
    Mismatch { name: String, world: &'static str, reason: String },
}

/// What a component is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum World {
    Agent,
    Tool,
}

impl World {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Tool => "tool",
        }
    }
}

/// A compiled component whose imports this host offers.
pub(super) struct Loaded {
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// BLAKE3 of the file.
    pub(super) digest: blake3::Hash,
    pub(super) world: World,
    pub(super) component: Component,
}

/// Reads, compiles and inspects a file. Blocks for as long as compiling takes.
pub(super) fn load(
    engine: &GuestEngine,
    cache: &CodeCache,
    path: &Path,
    most: u64,
) -> Result<Loaded, LoadError> {
    let name = name_of(path);
    let bytes = read(path, &name, most)?;
    check_magic(&bytes, &name)?;
    let digest = blake3::hash(&bytes);
    let component = cache
        .compile(engine, &digest, &bytes)
        .map_err(|error| LoadError::Malformed { name: name.clone(), reason: format!("{error:#}") })?;
    let world = inspect(engine, &component, &name)?;
    Ok(Loaded { name, path: path.to_owned(), digest, world, component })
}

/// The name errors and listings use: the file's name without its ending.
pub(super) fn name_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or(path.as_os_str());
    super::failure::scrub(&stem.to_string_lossy(), 128)
}

fn read(path: &Path, name: &str, most: u64) -> Result<Vec<u8>, LoadError> {
    let failed = |source| LoadError::Read { name: name.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() {
        return Err(failed(std::io::Error::other("not a regular file")));
    }
    if meta.len() > most {
        return Err(LoadError::TooLarge { name: name.to_owned(), bytes: meta.len(), most });
    }
    let mut bytes = Vec::new();
    // The file may grow while it is read.
    file.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most {
        return Err(LoadError::TooLarge { name: name.to_owned(), bytes: bytes.len() as u64, most });
    }
    Ok(bytes)
}

// Bytes 4..8 of a WebAssembly binary are its version and layer: 1, 0 a module; 13, 1 a component.
fn check_magic(bytes: &[u8], name: &str) -> Result<(), LoadError> {
    let name = || name.to_owned();
    match bytes {
        [0, b'a', b's', b'm', 0x0d, 0, 1, 0, ..] => Ok(()),
        [0, b'a', b's', b'm', 1, 0, 0, 0, ..] => Err(LoadError::CoreModule { name: name() }),
        [0, b'a', b's', b'm', ..] => {
            Err(LoadError::Malformed { name: name(), reason: "unknown binary version".to_owned() })
        }
        _ => Err(LoadError::NotWasm { name: name() }),
    }
}

fn inspect(engine: &GuestEngine, component: &Component, name: &str) -> Result<World, LoadError> {
    let ty = component.component_type();
    let imports: Vec<&str> = ty.imports(engine.inner()).map(|(import, _)| import).collect();
    let exports: Vec<&str> = ty.exports(engine.inner()).map(|(export, _)| export).collect();
    inspect_names(name, &imports, &exports)
}

fn inspect_names(name: &str, imports: &[&str], exports: &[&str]) -> Result<World, LoadError> {
    // A wrong version is said first: it explains whatever else does not fit.
    for interface in imports.iter().chain(exports) {
        if let Some((package, _, version)) = own_interface(interface)
            && version != SPOKEN
        {
            return Err(LoadError::Version {
                name: name.to_owned(),
                package: super::failure::scrub(package, 64),
                version: super::failure::scrub(version, 64),
            });
        }
    }
    let exports_all = |names: &[&str]| names.iter().all(|name| exports.contains(name));
    let world = if exports_all(&["describe", "start", "on-event"]) {
        World::Agent
    } else if exports_all(&["describe", "call"]) {
        World::Tool
    } else {
        return Err(LoadError::NoWorld { name: name.to_owned() });
    };
    for import in imports {
        if !offered(world, import) {
            let hint = if import.starts_with("wasi:") {
                ": guests have no ambient system; build for wasm32-unknown-unknown with tools-sdk"
            } else {
                ""
            };
            let import = super::failure::scrub(import, 128);
            return Err(LoadError::Import { name: name.to_owned(), import, world: world.word(), hint });
        }
    }
    Ok(world)
}

fn offered(world: World, import: &str) -> bool {
    let Some((package, interface, _)) = own_interface(import) else { return false };
    match world {
        World::Agent => package == "agent" && AGENT_INTERFACES.contains(&interface),
        World::Tool => package == "tool" && TOOL_INTERFACES.contains(&interface),
    }
}

/// Splits `session-runtime:PACKAGE/INTERFACE@VERSION`.
fn own_interface(name: &str) -> Option<(&str, &str, &str)> {
    let rest = name.strip_prefix(NAMESPACE)?.strip_prefix(':')?;
    let (package, rest) = rest.split_once('/')?;
    let (interface, version) = rest.split_once('@').unwrap_or((rest, ""));
    Some((package, interface, version))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(imports: &[&str], exports: &[&str]) -> String {
        inspect_names("x", imports, exports).unwrap_err().to_string()
    }

    #[test]
    fn worlds_are_recognised_by_exports() {
        let tool = ["session-runtime:tool/log@0.2.0"];
        assert_eq!(inspect_names("x", &tool, &["describe", "call"]).unwrap(), World::Tool);
        let agent = ["session-runtime:agent/chat@0.2.0"];
        let exports = ["describe", "start", "on-event"];
        assert_eq!(inspect_names("x", &agent, &exports).unwrap(), World::Agent);
        assert!(message(&[], &["run"]).contains("neither an agent nor a tool"));
    }

    #[test]
    fn another_version_is_refused_by_name() {
        assert_eq!(
            message(&["session-runtime:tool/log@0.1.0"], &["describe", "call"]),
            "component x was built for session-runtime:tool@0.1.0; this host speaks 0.2.0: rebuild it with the tools-sdk of \
             this host"
        );
        assert!(message(&["session-runtime:agent/chat@0.2.1"], &["x"]).contains("agent@0.2.1"));
    }

    #[test]
    fn i7_an_import_that_is_not_offered_is_named() {
        let of = |import| message(&[import], &["describe", "call"]);
        assert!(of("wasi:sockets/tcp@0.2.0").contains("imports wasi:sockets/tcp@0.2.0, which"));
        assert!(of("session-runtime:agent/chat@0.2.0").contains("does not offer to tools"));
        assert!(of("session-runtime:tool/secrets@0.2.0").contains("secrets"));
        assert!(of("print").contains("imports print"));
    }
}
