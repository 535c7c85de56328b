//! Everything the demonstration needs, then the demonstration.

use clap::Args;

use crate::process::{Failure, cargo, run as run_process};
use crate::setup;

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Passed to `session-runtime demo`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let mut build = cargo();
    build.args(["build", "--package", "session-runtime"]);
    run_process(&mut build, "building session-runtime")?;
    setup::run(&setup::Options::default())?;
    let mut demo = cargo();
    demo.args(["run", "--quiet", "--package", "session-runtime", "--", "demo"]).args(&options.arguments);
    run_process(&mut demo, "the demonstration")
}
