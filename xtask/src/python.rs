//! A small Python environment of our own with the stock OpenAI client, for the test that speaks to the server
//! through it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::process::{Failure, succeeds};

/// What is installed. Any recent version is the stock client.
const PACKAGE: &str = "openai>=1.50,<3";
const CHECK_LIMIT: Duration = Duration::from_secs(60);
const MAKE_LIMIT: Duration = Duration::from_secs(120);
const INSTALL_LIMIT: Duration = Duration::from_secs(300);

/// Makes the environment where it is missing; its interpreter. `None`, and a line that says why, where Python or
/// the network is missing.
pub(crate) fn prepare() -> Option<PathBuf> {
    match make() {
        Ok(python) => Some(python),
        Err(why) => {
            println!("setup: no Python environment with the OpenAI client, so its test is left out: {why}");
            None
        }
    }
}

fn make() -> Result<PathBuf, Failure> {
    let home = folder().ok_or_else(|| Failure::Other("neither XDG_CACHE_HOME nor HOME is set".to_owned()))?;
    let python = home.join("bin/python");
    if has_client(&python) {
        println!("setup: Python environment with the OpenAI client is here ({})", home.display());
        return Ok(python);
    }
    println!("setup: python3 -m venv {}", home.display());
    // What an earlier attempt left half made is made again.
    if !succeeds(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home), MAKE_LIMIT) {
        return Err(Failure::Other("python3 with its module venv is missing".to_owned()));
    }
    println!("setup: pip install '{PACKAGE}'");
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]);
    if succeeds(&mut pip, INSTALL_LIMIT) && has_client(&python) {
        return Ok(python);
    }
    Err(Failure::Other("pip could not install the package openai; is there a network?".to_owned()))
}

fn has_client(python: &Path) -> bool {
    succeeds(Command::new(python).args(["-c", "import openai"]), CHECK_LIMIT)
}

/// Beside the models, in this user's cache.
fn folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("session-runtime/python"))
}
