//! The check of a GPU: built here, run here where there is a GPU, or packed as a folder that needs nothing but a driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Args;

use crate::kernels::{self, ARCHITECTURES};
use crate::process::{Failure, cargo, is_installed, program, root, run as run_process, target_dir};

/// Test programs of the kernels that can run on a GPU.
const TESTS: [&str; 3] = ["cuda_kernels", "cuda_attention", "cuda_model"];
/// A test that needs the kernels for the CPU, and little else: running it builds them.
const BUILDS_SHIM: &str = "every_kernel_of_the_shim_belongs_to_a_source_and_every_source_has_one";

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Do not check here: make this folder, with `session-runtime` in it, which `session-runtime gpu-check` checks from
    #[arg(long, value_name = "DIR")]
    pack: Option<PathBuf>,
    /// Passed on, such as `--device cuda:1` or `--out DIR`
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Ends as the check does: 0 passed, 1 failed, 2 there is no GPU.
pub(crate) fn main(options: &Options) -> ExitCode {
    match run(options) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<ExitCode, Failure> {
    let said = build()?;
    if options.pack.is_none() {
        // Nothing more is done for a check that cannot be.
        let code = check(&program(), &options.arguments, &["--probe"])?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
    }
    let folder = options.pack.clone().unwrap_or_else(|| target_dir().join("gpu-check"));
    pack(&folder, &said)?;
    if options.pack.is_some() {
        println!(
            "gpu-check: {} has {} MiB; run `./session-runtime gpu-check` in it",
            folder.display(),
            bytes_of(&folder)? >> 20
        );
        return Ok(ExitCode::SUCCESS);
    }
    check(&folder.join("session-runtime"), &options.arguments, &[])
}

/// Builds the tests of the kernels, and the program: it comes with its own tests, so that dependencies are built once for all.
/// What cargo says.
fn build() -> Result<String, Failure> {
    println!("gpu-check: building the program and the tests of the kernels");
    let mut build = cargo();
    build.args(["test", "--workspace", "--no-run", "--test", "cuda_runtime"]);
    build.args(TESTS.iter().flat_map(|test| ["--test", test]));
    let done = build.output().map_err(|source| Failure::Start { program: "cargo".to_owned(), source })?;
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    if done.status.success() {
        return Ok(said);
    }
    Err(Failure::Other(format!("building the tests of the kernels: {}", said.trim())))
}

/// Puts everything that the check needs into a folder; `said` is what cargo said of the programs.
fn pack(folder: &Path, said: &str) -> Result<(), Failure> {
    let tests = folder.join("tests");
    fs::create_dir_all(&tests).map_err(Failure::file(&tests))?;
    place(&program(), &folder.join("session-runtime"))?;
    for test in TESTS {
        let missing = || Failure::Other(format!("cargo does not say where {test} is"));
        // Cargo names it from the root of the workspace.
        place(&root().join(executable(said, test).ok_or_else(missing)?), &tests.join(test))?;
    }
    let shim = tests.join("kernels-on-cpu.so");
    if shim.exists() {
        // It may be of older sources.
        fs::remove_file(&shim).map_err(Failure::file(&shim))?;
    }
    let mut builds = Command::new(tests.join(TESTS[0]));
    builds.args(["--exact", BUILDS_SHIM, "--quiet"]).env("SESSION_RUNTIME_TEST_SHIM", &shim);
    run_process(builds.stdout(Stdio::null()), "building the kernels for the CPU")?;
    compile_kernels(&folder.join("kernels"))
}

/// Runs the check; how it ended.
fn check(program: &Path, arguments: &[String], more: &[&str]) -> Result<ExitCode, Failure> {
    let mut check = Command::new(program);
    check.arg("gpu-check").args(arguments).args(more);
    let status =
        check.status().map_err(|source| Failure::Start { program: "session-runtime".to_owned(), source })?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Compiles the kernels for every architecture, where the compiler can be had. Else the machine with the GPU needs one.
fn compile_kernels(folder: &Path) -> Result<(), Failure> {
    let compilers = match kernels::compilers() {
        Ok(compilers) => compilers,
        Err(problem) => {
            println!(
                "gpu-check: the kernels are compiled where they run, which needs NVRTC there: {problem}"
            );
            return Ok(());
        }
    };
    let mut compile = cargo();
    compile.args(["run", "--quiet", "--package", "kernels", "--example", "precompile", "--"]);
    compile.arg(compilers.nvrtc).arg(folder).args(ARCHITECTURES);
    run_process(&mut compile, "compiling the kernels with NVRTC")
}

/// Copies a program without what only a debugger reads.
fn place(from: &Path, to: &Path) -> Result<(), Failure> {
    fs::copy(from, to).map_err(Failure::file(from))?;
    if is_installed("strip") {
        run_process(Command::new("strip").arg(to), "strip")?;
    }
    Ok(())
}

/// The program that cargo says it built: `Executable tests/NAME.rs (PATH)`.
fn executable(said: &str, name: &str) -> Option<PathBuf> {
    let line =
        said.lines().find(|line| line.contains("Executable") && line.contains(&format!("{name}.rs")))?;
    Some(PathBuf::from(line.rsplit_once('(')?.1.trim_end().strip_suffix(')')?))
}

fn bytes_of(folder: &Path) -> Result<u64, Failure> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).map_err(Failure::file(folder))? {
        let entry = entry.map_err(Failure::file(folder))?;
        let path = entry.path();
        bytes += if path.is_dir() {
            bytes_of(&path)?
        } else {
            entry.metadata().map_err(Failure::file(&path))?.len()
        };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
