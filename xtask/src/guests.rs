//! Building the agents and tools in `guests/` into components.
//!
//! A guest is built when the digest of all that goes into it has changed: its own sources, the SDK with its WIT,
//! the manifests and lock file, the compiler and the way it is called. Guests in `guests/tests` serve the host's own
//! tests; they are put in a folder of their own, where no host looks for them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;

use crate::process::{Failure, root, run as run_process, seconds, target_dir};
use crate::toolchain::{TARGET, Toolchain};

/// Raised when the same inputs are to give another component.
const RECIPE: &str = "1";
/// The version of the library that wraps a module as a component.
const WRAPPER: &str = "wit-component 0.263";

#[derive(Args, Debug, Default)]
pub(crate) struct Options {
    /// Guests to build; all of them when none is named
    names: Vec<String>,
    /// Build also what is up to date
    #[arg(long)]
    force: bool,
    /// Use the distribution's compiler with the library built from source, even when the target is installed
    #[arg(long)]
    from_source: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let known = known()?;
    for name in &options.names {
        if !known.iter().any(|guest| guest.name == *name) {
            let names: Vec<&str> = known.iter().map(|guest| guest.name.as_str()).collect();
            return Err(Failure::Other(format!("there is no guest {name}; there are {}", names.join(", "))));
        }
    }
    let chosen = known.iter().filter(|guest| options.names.is_empty() || options.names.contains(&guest.name));
    let toolchain = Toolchain::require(options.from_source)?;
    println!("guests: {}", toolchain.describe());
    for guest in chosen {
        build(guest, &toolchain, options.force)?;
    }
    Ok(())
}

/// One guest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Guest {
    /// The folder of the guests it stands among, below the root: `guests` or `guests/tests`.
    folder: &'static str,
    name: String,
}

impl Guest {
    /// Where its component is put, whatever the build folder is: hosts look for it there.
    fn component(&self) -> PathBuf {
        root().join("target").join(self.folder).join(format!("{}.wasm", self.name))
    }

    fn sources(&self) -> PathBuf {
        root().join(self.folder).join(&self.name)
    }
}

/// The guests, in order: the folders with a manifest.
fn known() -> Result<Vec<Guest>, Failure> {
    let mut guests = Vec::new();
    for folder in ["guests", "guests/tests"] {
        let path = root().join(folder);
        for entry in fs::read_dir(&path).map_err(Failure::file(&path))? {
            let entry = entry.map_err(Failure::file(&path))?;
            if entry.path().join("Cargo.toml").is_file() {
                guests.push(Guest { folder, name: entry.file_name().to_string_lossy().into_owned() });
            }
        }
    }
    guests.sort();
    Ok(guests)
}

fn build(guest: &Guest, toolchain: &Toolchain, force: bool) -> Result<(), Failure> {
    let (name, component) = (guest.name.as_str(), guest.component());
    let stamp = component.with_extension("inputs");
    let inputs = inputs_digest(guest, toolchain)?;
    if !force
        && let (Ok(before), Ok(bytes)) = (fs::read_to_string(&stamp), fs::read(&component))
        && before == stamp_text(&inputs, &bytes)
    {
        println!("guests: {name} up to date ({} KiB)", bytes.len() / 1_024);
        return Ok(());
    }
    let start = Instant::now();
    println!("guests: {name} building");
    let target = target_dir().join("guests-build");
    // One guest at a time: building several at once would give the SDK the features of all of them.
    let mut cargo = toolchain.cargo_build();
    cargo.current_dir(root().join("guests")).env("CARGO_TARGET_DIR", &target).args([
        "--quiet",
        "--package",
        name,
    ]);
    run_process(&mut cargo, &format!("building {name}"))?;
    let module = target.join(TARGET).join("release").join(format!("{}.wasm", name.replace('-', "_")));
    let bytes = fs::read(&module).map_err(Failure::file(&module))?;
    let bytes = componentize(name, &bytes)?;
    if let Some(folder) = component.parent() {
        fs::create_dir_all(folder).map_err(Failure::file(folder))?;
    }
    fs::write(&component, &bytes).map_err(Failure::file(&component))?;
    fs::write(&stamp, stamp_text(&inputs, &bytes)).map_err(Failure::file(&stamp))?;
    println!("guests: {name} built ({} KiB, {})", bytes.len() / 1_024, seconds(start.elapsed()));
    Ok(())
}

/// Wraps a core module, which carries its world in a custom section, as a component.
fn componentize(name: &str, module: &[u8]) -> Result<Vec<u8>, Failure> {
    let encode = || wit_component::ComponentEncoder::default().module(module)?.validate(true).encode();
    encode().map_err(|error| Failure::Other(format!("{name} is not a component: {error:#}")))
}

fn stamp_text(inputs: &str, component: &[u8]) -> String {
    format!("{inputs} {}\n", blake3::hash(component).to_hex())
}

fn inputs_digest(guest: &Guest, toolchain: &Toolchain) -> Result<String, Failure> {
    let root = root();
    let mut files = Vec::new();
    for folder in ["tools-sdk/src", "tools-sdk/macros/src", "tools-sdk/wit"] {
        collect(&root.join(folder), &mut files)?;
    }
    collect(&guest.sources(), &mut files)?;
    for file in [
        "Cargo.toml",
        "guests/Cargo.toml",
        "guests/Cargo.lock",
        "tools-sdk/Cargo.toml",
        "tools-sdk/macros/Cargo.toml",
    ] {
        files.push(root.join(file));
    }
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for part in [RECIPE, WRAPPER, &toolchain.describe()] {
        hasher.update(part.as_bytes()).update(&[0]);
    }
    for file in files {
        let path = file.strip_prefix(&root).unwrap_or(&file).to_string_lossy().into_owned();
        let bytes = fs::read(&file).map_err(Failure::file(&file))?;
        hasher
            .update(path.as_bytes())
            .update(&[0])
            .update(&(bytes.len() as u64).to_le_bytes())
            .update(&bytes);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Every file below a folder.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Failure> {
    for entry in fs::read_dir(folder).map_err(Failure::file(folder))? {
        let path = entry.map_err(Failure::file(folder))?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_without_a_world_is_refused_by_name() {
        // The eight bytes every module begins with, and nothing else: valid, and no component.
        let refused = componentize("empty", b"\0asm\x01\0\0\0");
        let bytes = refused.map(|bytes| bytes.len());
        // An empty world is a component without imports and exports; a broken module is not one.
        assert!(bytes.is_ok());
        let error = componentize("broken", b"\0asm\x01\0\0\0\xff").unwrap_err().to_string();
        assert!(error.starts_with("broken is not a component"), "{error}");
    }

    #[test]
    fn guests_of_the_tests_are_apart() {
        let known = known().unwrap();
        for (folder, name) in [("guests", "calculator"), ("guests", "wait"), ("guests/tests", "hostile")] {
            assert!(known.contains(&Guest { folder, name: name.to_owned() }), "{name}");
        }
    }
}
