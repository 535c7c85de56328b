//! Which compiler builds the guests: the one that builds the host, when it has the wasm32 library, else the
//! distribution's with the library built from its source.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{Failure, output};

/// The target guests are built for: no operating system, so nothing but the imports of their WIT world.
pub(crate) const TARGET: &str = "wasm32-unknown-unknown";
/// Packages of Debian and Ubuntu that bring the fallback.
pub(crate) const PACKAGES: [&str; 4] = ["rustc-web", "rust-web-src", "cargo-web", "lld"];

const SYSTEM_RUSTC: &str = "/usr/bin/rustc";
const SYSTEM_CARGO: &str = "/usr/bin/cargo";
const SYSTEM_LINKER: &str = "/usr/bin/wasm-ld";

/// A compiler for guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Toolchain {
    /// The host's compiler, with the target's library installed.
    Installed { version: String },
    /// The distribution's compiler, with the library's source.
    FromSource { version: String },
}

impl Toolchain {
    /// The compiler to use, if there is one.
    pub(crate) fn find() -> Result<Option<Self>, Failure> {
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let libdir = output(
            Command::new(&rustc).args(["--print", "target-libdir", "--target", TARGET]),
            "asking rustc for its libraries",
        )?;
        if has_core(Path::new(libdir.trim())) {
            return Ok(Some(Self::Installed { version: version(&mut Command::new(&rustc))? }));
        }
        Self::find_from_source()
    }

    /// The distribution's compiler, whatever else there is.
    pub(crate) fn find_from_source() -> Result<Option<Self>, Failure> {
        let present =
            [SYSTEM_RUSTC, SYSTEM_CARGO, SYSTEM_LINKER].iter().all(|path| Path::new(path).is_file());
        if !present {
            return Ok(None);
        }
        let sysroot =
            output(Command::new(SYSTEM_RUSTC).args(["--print", "sysroot"]), "asking rustc for its root")?;
        let source = PathBuf::from(sysroot.trim()).join("lib/rustlib/src/rust/library/std/Cargo.toml");
        if !source.is_file() {
            return Ok(None);
        }
        Ok(Some(Self::FromSource { version: version(&mut Command::new(SYSTEM_RUSTC))? }))
    }

    /// As [`Toolchain::find`], with an error that says what to do when there is none.
    pub(crate) fn require(from_source: bool) -> Result<Self, Failure> {
        let found = if from_source { Self::find_from_source()? } else { Self::find()? };
        found.ok_or_else(|| {
            Failure::Other(format!(
                "no compiler here can build for {TARGET}; run `cargo xtask setup`, or `rustup target add {TARGET}`, \
                 or on Debian and Ubuntu `apt-get install {}`",
                PACKAGES.join(" ")
            ))
        })
    }

    /// In one line, for people.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Installed { version } => format!("{version}, {TARGET} installed"),
            Self::FromSource { version } => format!("{version} of the system, library built from source"),
        }
    }

    /// `cargo build` for the target; the caller adds the folder and the packages.
    pub(crate) fn cargo_build(&self) -> Command {
        let mut command = match self {
            Self::Installed { .. } => {
                Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            }
            Self::FromSource { .. } => Command::new(SYSTEM_CARGO),
        };
        // The host's flags are not the guests'.
        for name in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_BUILD_RUSTFLAGS"] {
            command.env_remove(name);
        }
        command.args(["build", "--release", "--target", TARGET]);
        if matches!(self, Self::FromSource { .. }) {
            command
                .env("RUSTC", SYSTEM_RUSTC)
                // Building the library needs unstable flags, which a stable compiler takes only so.
                .env("RUSTC_BOOTSTRAP", "1")
                .env("CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER", SYSTEM_LINKER)
                .env_remove("RUSTUP_TOOLCHAIN")
                .env_remove("RUSTC_WRAPPER")
                .env_remove("RUSTDOC")
                .args(["-Z", "build-std=std,panic_abort"]);
        }
        command
    }
}

fn has_core(libdir: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(libdir) else { return false };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libcore-") && name.ends_with(".rlib")
    })
}

fn version(rustc: &mut Command) -> Result<String, Failure> {
    Ok(output(rustc.arg("--version"), "asking rustc for its version")?.trim().to_owned())
}
