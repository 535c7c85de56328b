//! Writing committed fixtures again from their sources, so that a test's right values stay someone else's.

use std::fs;
use std::process::Command;

use clap::Args;

use crate::process::{Failure, output, root, run as run_process};

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Python to use; the models' fixtures need torch, transformers and gguf in it
    #[arg(long, default_value = "python3")]
    python: String,
    /// Also write the models' fixtures: arguments of session-runtime/tests/fixtures/generate.py
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    models: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let folder = root().join("guests/calculator/tests");
    let mut generate = Command::new(&options.python);
    let cases = output(generate.arg(folder.join("generate_cases.py")), "generate_cases.py")?;
    let path = folder.join("cases.json");
    let before = fs::read_to_string(&path).unwrap_or_default();
    if before == cases {
        println!("fixtures: the calculator's cases are as they were");
    } else {
        fs::write(&path, cases).map_err(Failure::file(&path))?;
        println!("fixtures: the calculator's cases have changed");
    }
    if !options.models.is_empty() {
        let script = root().join("session-runtime/tests/fixtures/generate.py");
        run_process(Command::new(&options.python).arg(script).args(&options.models), "generate.py")?;
    }
    Ok(())
}
