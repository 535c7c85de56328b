//! Running benchmarks. They are commands of the program itself, built in the profile of the tests, so nothing is
//! built twice.

use std::process::Command;

use clap::Args;

use crate::process::{Failure, build_programs, program, root, run as run_process};

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Which one; left out, they are listed
    name: Option<String>,
    /// Write results as JSON lines
    #[arg(long)]
    json: bool,
    /// Passed on, such as `--model smollm2-135m`
    #[arg(last = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    build_programs()?;
    let mut bench = Command::new(program());
    bench.arg("bench").current_dir(root());
    match &options.name {
        Some(name) => bench.arg(name),
        None => bench.arg("--help"),
    };
    if options.json {
        bench.arg("--json");
    }
    bench.args(&options.arguments);
    run_process(&mut bench, "the benchmark")
}
