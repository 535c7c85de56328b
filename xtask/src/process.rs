//! Running other programs, and where things are.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Why a command stopped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// A program could not be started.
    #[error("cannot run {program}: {source}")]
    Start {
        /// Its name.
        program: String,
        /// Why not.
        source: std::io::Error,
    },
    /// A program ended badly; what it said is above.
    #[error("{what} failed ({status})")]
    Exit {
        /// What was tried.
        what: String,
        /// How it ended.
        status: String,
    },
    /// A file or folder.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Anything else, in words that say what to do.
    #[error("{0}")]
    Other(String),
}

impl Failure {
    pub(crate) fn file(path: &Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::File { path: path.to_owned(), source }
    }
}

/// The folder of the workspace.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_owned()
}

/// The build folder: `CARGO_TARGET_DIR`, or `target` in the workspace.
pub(crate) fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) if !dir.is_empty() => root().join(dir),
        _ => root().join("target"),
    }
}

/// The program itself, where cargo puts it.
pub(crate) fn program() -> PathBuf {
    target_dir().join("debug").join(format!("session-runtime{}", std::env::consts::EXE_SUFFIX))
}

/// Builds the programs of the workspace. All of it at once: cargo chooses features for what it is asked to build,
/// and building a part would build the large dependencies a second time.
pub(crate) fn build_programs() -> Result<(), Failure> {
    run(cargo().args(["build", "--workspace", "--bins"]), "cargo build")
}

/// The cargo that runs this, in the workspace.
pub(crate) fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(root());
    command
}

/// Runs to the end with its output on the terminal.
pub(crate) fn run(command: &mut Command, what: &str) -> Result<(), Failure> {
    let status = command.status().map_err(|source| start(command, source))?;
    if status.success() {
        Ok(())
    } else {
        Err(Failure::Exit { what: what.to_owned(), status: status.to_string() })
    }
}

/// Runs to the end; its standard output.
pub(crate) fn output(command: &mut Command, what: &str) -> Result<String, Failure> {
    let output = command.stderr(Stdio::inherit()).output().map_err(|source| start(command, source))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(Failure::Exit { what: what.to_owned(), status: output.status.to_string() })
    }
}

/// Runs without a word; whether it could be started and ended well within `limit`.
pub(crate) fn succeeds(command: &mut Command, limit: Duration) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let Ok(mut child) = quiet.spawn() else { return false };
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if start.elapsed() < limit => std::thread::sleep(Duration::from_millis(50)),
            // Too slow, or lost: it must not go on behind our back.
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return false;
            }
        }
    }
}

/// Whether a program of this name is on the path.
pub(crate) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

fn start(command: &Command, source: std::io::Error) -> Failure {
    let program = Path::new(command.get_program()).file_name().unwrap_or_else(|| OsStr::new("program"));
    Failure::Start { program: program.to_string_lossy().into_owned(), source }
}

/// A duration for people.
pub(crate) fn seconds(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds < 60 {
        format!("{:.1} s", duration.as_secs_f64())
    } else {
        format!("{} min {:02} s", seconds / 60, seconds % 60)
    }
}
