//! Bringing what a machine lacks. Every step says what it does, and does nothing when nothing is missing.

use std::process::Command;
use std::time::Duration;

use clap::Args;

use crate::guests;
use crate::process::{Failure, build_programs, is_installed, program, run as run_process, succeeds};
use crate::python;
use crate::toolchain::{PACKAGES, TARGET, Toolchain};

/// How long rustup may take to fetch a library before the distribution's packages are tried.
const RUSTUP_LIMIT: Duration = Duration::from_secs(90);
/// Models the demonstration and most tests use.
const MODELS: [&str; 2] = ["smollm2-135m", "qwen2.5-coder-0.5b"];
/// Models the tests use.
pub(crate) const TEST_MODELS: [&str; 3] = ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"];

#[derive(Args, Debug, Default)]
pub(crate) struct Options {
    /// Do not fetch models
    #[arg(long)]
    pub(crate) no_models: bool,
    /// Fetch these models instead of those the demonstration uses
    #[arg(long = "model", value_name = "ALIAS")]
    pub(crate) models: Vec<String>,
}

/// Brings everything, and builds what it needs for that.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    python::prepare();
    bring(options)
}

/// Brings what the program needs to run.
pub(crate) fn bring(options: &Options) -> Result<(), Failure> {
    machine()?;
    if options.no_models {
        println!("setup: models left out");
        return Ok(());
    }
    println!("setup: building the program, which fetches models");
    build_programs()?;
    models(options)?;
    println!("setup: done");
    Ok(())
}

/// Brings what has to be on the machine, and the guests.
pub(crate) fn machine() -> Result<(), Failure> {
    let toolchain = compiler()?;
    println!("setup: guests are built by {}", toolchain.describe());
    guests::run(&guests::Options::default())
}

/// Fetches models through the program itself, which has to be built; it checks what it gets and keeps what it has.
pub(crate) fn models(options: &Options) -> Result<(), Failure> {
    packages();
    let models: Vec<&str> = match options.models.as_slice() {
        [] => MODELS.to_vec(),
        chosen => chosen.iter().map(String::as_str).collect(),
    };
    for model in models {
        println!("setup: model {model}");
        let mut pull = Command::new(program());
        pull.args(["model", "pull", model]);
        run_process(&mut pull, &format!("fetching the model {model}"))?;
    }
    Ok(())
}

/// A compiler for guests: the one that is here, else rustup's library, else the distribution's packages.
fn compiler() -> Result<Toolchain, Failure> {
    if let Some(found) = Toolchain::find()? {
        return Ok(found);
    }
    if is_installed("rustup") {
        println!("setup: rustup target add {TARGET}");
        if succeeds(Command::new("rustup").args(["target", "add", TARGET]), RUSTUP_LIMIT)
            && let Some(found) = Toolchain::find()?
        {
            return Ok(found);
        }
        println!("setup: rustup could not bring it");
    }
    if is_installed("apt-get") {
        install_packages()?;
    }
    Toolchain::require(false)
}

/// The distribution's compiler, with its library's source, through apt-get.
fn install_packages() -> Result<(), Failure> {
    println!("setup: apt-get install {}", PACKAGES.join(" "));
    let prefix: &[&str] = if is_root() {
        &[]
    } else if succeeds(Command::new("sudo").args(["-n", "true"]), Duration::from_secs(10)) {
        &["sudo", "-n"]
    } else {
        return Err(Failure::Other(format!(
            "installing packages needs root; run `sudo apt-get install {}` and `cargo xtask setup` again",
            PACKAGES.join(" ")
        )));
    };
    let apt = |arguments: &[&str]| {
        let words: Vec<&str> = prefix.iter().chain(&["apt-get"]).chain(arguments).copied().collect();
        let (program, rest) =
            words.split_first().map_or(("apt-get", &[][..]), |(first, rest)| (*first, rest));
        let mut command = Command::new(program);
        command.args(rest).env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    run_process(&mut apt(&["update", "--quiet"]), "apt-get update")?;
    let mut install = vec!["install", "--yes", "--quiet", "--no-install-recommends"];
    install.extend(PACKAGES);
    run_process(&mut apt(&install), "apt-get install")
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Python is used only when the public hub is out of reach and a model comes from a package; so a word is enough.
fn packages() {
    let limit = Duration::from_secs(30);
    if succeeds(Command::new("python3").args(["-m", "pip", "--version"]), limit) {
        println!("setup: python3 and pip are here, for models when the hub is out of reach");
    } else {
        println!(
            "setup: python3 with pip is not here; models come from the public hub only (or install python3-pip)"
        );
    }
}
