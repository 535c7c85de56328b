//! Everything the demonstration needs, then the demonstration.

use std::process::Command;

use clap::Args;

use crate::process::{Failure, program, root, run as run_process};
use crate::setup;

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Passed to `session-runtime demo`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    setup::bring(&setup::Options::default())?;
    let mut demo = Command::new(program());
    // Named, because with a build folder elsewhere the program does not find them beside itself.
    demo.arg("--guests").arg(root().join("target/guests"));
    demo.arg("demo").args(&options.arguments).current_dir(root());
    run_process(&mut demo, "the demonstration")
}
