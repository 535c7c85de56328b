//! The developer's commands: everything between a fresh clone and a running demo.
//!
//! `setup` brings what a machine lacks, `guests` builds the components, `test` is what has to pass before a
//! change lands. This crate links nothing of the runtime's own: it runs its commands.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "talking to the terminal is what it is for")]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod bench;
mod demo;
mod fixtures;
mod gpu_check;
mod guests;
mod kernels;
mod process;
mod python;
mod setup;
mod test;
mod tidy;
mod toolchain;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Developer commands of session-runtime",
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Bring everything this machine lacks: the wasm32 library, guests, models, a Python with the OpenAI client
    Setup(setup::Options),
    /// Build the agents and tools in guests/ into target/guests/NAME.wasm
    Guests(guests::Options),
    /// Everything that has to pass before a change lands
    Test(test::Options),
    /// Check the rules the compiler does not know: arrows between modules, sizes, words, pinned formats
    Tidy(tidy::Options),
    /// Compile the CUDA kernels for three architectures and check what they take; needs no GPU, and fetches NVRTC and
    /// ptxas (130 MB) once
    Kernels(kernels::Options),
    /// Find out in a few minutes whether a GPU computes the right numbers here, and how fast; or pack that as a folder for
    /// a machine with a GPU and nothing else
    GpuCheck(gpu_check::Options),
    /// Set up, then run the demonstration
    Demo(demo::Options),
    /// Run a benchmark; without a name, list them
    Bench(bench::Options),
    /// Write the committed test fixtures again from their sources
    Fixtures(fixtures::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Setup(options) => setup::run(&options),
        Command::Guests(options) => guests::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Tidy(options) => tidy::run(&options),
        Command::Kernels(options) => kernels::run(&options),
        Command::GpuCheck(options) => return gpu_check::main(&options),
        Command::Demo(options) => demo::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Fixtures(options) => fixtures::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}
