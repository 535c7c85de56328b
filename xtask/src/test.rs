//! Everything that has to pass before a change lands, in one command.

use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;

use crate::process::{Failure, cargo, root, run as run_process, seconds, target_dir};
use crate::{setup, tidy};

#[derive(Args, Debug, Default)]
pub(crate) struct Options {
    /// Do not fetch models; tests that need one say that they were left out
    #[arg(long)]
    no_models: bool,
}

/// A step and how long it took.
struct Step {
    name: &'static str,
    took: Duration,
    passed: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let start = Instant::now();
    let mut steps = Vec::new();
    let result = all(options, &mut steps);
    println!();
    for step in &steps {
        let verdict = if step.passed { "ok" } else { "FAILED" };
        println!("{verdict:>6}  {:<24} {:>12}", step.name, seconds(step.took));
    }
    match &result {
        Ok(()) => println!("test: all {} steps passed in {}", steps.len(), seconds(start.elapsed())),
        Err(_) => println!("test: failed after {}", seconds(start.elapsed())),
    }
    result
}

fn all(options: &Options, steps: &mut Vec<Step>) -> Result<(), Failure> {
    // Cheap steps first, so that a slip is told before the long builds.
    step(steps, "format", || {
        run_process(cargo().args(["fmt", "--all", "--check"]), "cargo fmt")?;
        run_process(guests().args(["fmt", "--all", "--check"]), "cargo fmt in guests")
    })?;
    step(steps, "tidy", || tidy::run(&tidy::Options::default()))?;
    step(steps, "build", || {
        run_process(cargo().args(["test", "--workspace", "--no-run"]), "building the tests")
    })?;
    step(steps, "setup", || {
        setup::machine()?;
        if options.no_models {
            return Ok(());
        }
        setup::models(&setup::Options::default())
    })?;
    step(steps, "clippy", || {
        run_process(
            cargo().args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]),
            "cargo clippy",
        )
    })?;
    step(steps, "clippy of guests", || {
        run_process(
            guests().args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]),
            "cargo clippy in guests",
        )
    })?;
    step(steps, "documentation", || {
        run_process(
            cargo().env("RUSTDOCFLAGS", "-D warnings").args(["doc", "--quiet", "--workspace", "--no-deps"]),
            "cargo doc",
        )?;
        run_process(
            guests().env("RUSTDOCFLAGS", "-D warnings").args(["doc", "--quiet", "--workspace", "--no-deps"]),
            "cargo doc in guests",
        )
    })?;
    step(steps, "tests of guests", || {
        run_process(guests().args(["test", "--quiet", "--workspace"]), "cargo test in guests")
    })?;
    step(steps, "tests", || run_process(cargo().args(["test", "--quiet", "--workspace"]), "cargo test"))
}

/// Cargo in the workspace of the guests, for the host: a folder of its own keeps the lock files apart.
fn guests() -> Command {
    let mut command = cargo();
    command.current_dir(root().join("guests")).env("CARGO_TARGET_DIR", target_dir().join("guests-native"));
    command
}

fn step(
    steps: &mut Vec<Step>,
    name: &'static str,
    action: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    println!("\n== {name}");
    let start = Instant::now();
    let result = action();
    steps.push(Step { name, took: start.elapsed(), passed: result.is_ok() });
    result
}
