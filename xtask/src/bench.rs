//! Running benchmarks. They share the profile of the tests, so nothing is built twice.

use std::fs;

use clap::Args;

use crate::process::{Failure, cargo, root, run as run_process};

/// Crates that have benchmarks, as folders of the workspace.
const CRATES: [&str; 3] = ["kernels", "store", "session-runtime"];

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Which one; left out, they are listed
    name: Option<String>,
    /// Write results as JSON lines
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let all = benches();
    let Some(name) = &options.name else {
        for (package, name) in &all {
            println!("{name} ({package})");
        }
        return Ok(());
    };
    let Some((package, _)) = all.iter().find(|(_, known)| known == name) else {
        let known: Vec<&str> = all.iter().map(|(_, name)| name.as_str()).collect();
        return Err(Failure::Other(format!("there is no benchmark {name}; there are: {}", known.join(", "))));
    };
    let mut bench = cargo();
    bench.args(["bench", "--quiet", "--profile", "dev", "--package", package, "--bench", name]);
    if options.json {
        bench.args(["--", "--json"]);
    }
    run_process(&mut bench, &format!("the benchmark {name}"))
}

/// Package and name of each benchmark: the files in `benches/`.
fn benches() -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    for package in CRATES {
        let Ok(entries) = fs::read_dir(root().join(package).join("benches")) else { continue };
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_some_and(|extension| extension == "rs")
                && let Some(name) = path.file_stem()
            {
                all.push((package, name.to_string_lossy().into_owned()));
            }
        }
    }
    all.sort();
    all
}
