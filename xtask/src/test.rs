//! Everything that has to pass before a change lands, in one command.

use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;

use crate::process::{Failure, cargo, root, run as run_process, seconds, target_dir};
use crate::{kernels, python, setup, tidy};

#[derive(Args, Debug, Default)]
pub(crate) struct Options {
    /// Do not fetch models; tests that need one say that they were left out
    #[arg(long)]
    no_models: bool,
    /// Do not fetch NVRTC and ptxas; the CUDA kernels are then not compiled for GPUs, only tested on the CPU
    #[arg(long)]
    no_kernels: bool,
}

/// A step and how long it took.
struct Step {
    name: &'static str,
    took: Duration,
    passed: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let start = Instant::now();
    let mut steps = Steps::default();
    all(options, &mut steps);
    println!();
    for step in &steps.done {
        let verdict = if step.passed { "ok" } else { "FAILED" };
        println!("{verdict:>6}  {:<24} {:>12}", step.name, seconds(step.took));
    }
    let failed = steps.done.iter().filter(|step| !step.passed).count();
    let took = seconds(start.elapsed());
    if failed == 0 {
        println!("test: all {} steps passed in {took}", steps.done.len());
        Ok(())
    } else {
        Err(Failure::Other(format!("test: {failed} of {} steps failed, {took}", steps.done.len())))
    }
}

/// Every step, also after one that failed, so that one run tells everything; but nothing without a build.
fn all(options: &Options, steps: &mut Steps) {
    let denied = ["--", "-D", "warnings"];
    steps.run("format", || {
        run_process(cargo().args(["fmt", "--all", "--check"]), "cargo fmt")?;
        run_process(guests().args(["fmt", "--all", "--check"]), "cargo fmt in guests")
    });
    steps.run("tidy", || tidy::run(&tidy::Options::default()));
    let built = steps.run("build", || {
        run_process(cargo().args(["test", "--workspace", "--no-run"]), "building the tests")
    });
    if !built {
        return;
    }
    let mut nvrtc = None;
    if !options.no_kernels {
        match kernels::compilers() {
            Ok(compilers) => {
                steps.run("kernels", || kernels::check(&compilers, &kernels::Options::default()));
                nvrtc = Some(compilers.nvrtc);
            }
            // They are tested on the CPU all the same.
            Err(problem) => println!("kernels: not compiled for GPUs, {problem}"),
        }
    }
    let mut client = None;
    let ready = steps.run("setup", || {
        setup::machine()?;
        client = python::prepare();
        if options.no_models {
            return Ok(());
        }
        let models = setup::TEST_MODELS.map(str::to_owned).to_vec();
        setup::models(&setup::Options { models, ..setup::Options::default() })
    });
    if ready {
        steps.run("tests", || {
            let mut tests = cargo();
            tests.args(["test", "--quiet", "--workspace", "--no-fail-fast"]);
            if let Some(python) = &client {
                tests.env("SESSION_RUNTIME_TEST_PYTHON", python);
            }
            if let Some(nvrtc) = &nvrtc {
                tests.env("SESSION_RUNTIME_TEST_NVRTC", nvrtc);
            }
            if !options.no_models {
                tests.env("SESSION_RUNTIME_REQUIRE_MODELS", "1");
            }
            run_process(&mut tests, "cargo test")
        });
        steps.run("tests of guests", || {
            run_process(guests().args(["test", "--quiet", "--workspace"]), "cargo test in guests")
        });
    }
    steps.run("clippy", || {
        let arguments = ["clippy", "--quiet", "--workspace", "--all-targets"];
        run_process(cargo().args(arguments).args(denied), "cargo clippy")?;
        run_process(guests().args(arguments).args(denied), "cargo clippy in guests")
    });
    steps.run("documentation", || {
        let arguments = ["doc", "--quiet", "--workspace", "--no-deps"];
        run_process(cargo().env("RUSTDOCFLAGS", "-D warnings").args(arguments), "cargo doc")?;
        run_process(guests().env("RUSTDOCFLAGS", "-D warnings").args(arguments), "cargo doc in guests")
    });
}

/// The steps so far.
#[derive(Default)]
struct Steps {
    done: Vec<Step>,
}

impl Steps {
    /// Runs a step and says so; whether it passed.
    fn run(&mut self, name: &'static str, action: impl FnOnce() -> Result<(), Failure>) -> bool {
        println!("\n== {name}");
        let start = Instant::now();
        let result = action();
        if let Err(failure) = &result {
            eprintln!("error: {failure}");
        }
        self.done.push(Step { name, took: start.elapsed(), passed: result.is_ok() });
        result.is_ok()
    }
}

/// Cargo in the workspace of the guests, for the host: a folder of its own keeps the lock files apart.
fn guests() -> Command {
    let mut command = cargo();
    command.current_dir(root().join("guests")).env("CARGO_TARGET_DIR", target_dir().join("guests-native"));
    command
}
