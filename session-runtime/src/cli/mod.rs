//! The command line. Everything about sessions goes through the REST API, so that a command works the same
//! beside a running server and alone; this folder alone speaks on the terminal.
//!
//! Exit codes: 0 done, 1 failed, 2 called wrongly, or called for a GPU where there is none. A failure is one sentence on standard error.
#![expect(clippy::print_stderr, reason = "the command line speaks on the terminal")]

mod bench;
mod bytes;
mod client;
mod connect;
mod demo;
mod doctor;
mod failure;
mod gpu_check;
mod models;
mod options;
mod quota;
mod render;
mod replay;
mod run;
mod serve;
mod sessions;
mod sse;
mod table;
mod terminal;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use failure::{Failure, Outcome};
use options::Options;

/// Agents that live for hours or months: sessions, durable KV, guests.
#[derive(Parser, Debug)]
#[command(name = "session-runtime", version, about, propagate_version = true)]
struct CommandLine {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Runs one turn of a session and shows it as it happens
    Run(run::Run),
    /// Serves the REST API
    Serve(serve::Serve),
    /// Lists, shows and changes sessions
    #[command(subcommand)]
    Sessions(sessions::Sessions),
    /// Downloads, lists and removes models
    #[command(subcommand)]
    Model(models::Models),
    /// Looks for what could keep the runtime from working here
    Doctor(doctor::Doctor),
    /// Shows the life of a session's KV on a real model: evicted, restored, killed, continued
    Demo(demo::Demo),
    /// Measures this build on this machine
    Bench(bench::Bench),
    /// Finds out whether a GPU computes the right numbers here, and how fast
    #[command(hide = true)]
    GpuCheck(gpu_check::GpuCheck),
    /// Runs the scheduler over a trace again, as it was or with another idle policy or other budgets, without a model
    Replay(replay::Replay),
    /// Checks whether the metadata of a data directory can be opened
    #[command(hide = true)]
    StoreProbe {
        /// The data directory
        dir: PathBuf,
    },
}

/// The program: reads the arguments, does what they say, gives back the exit code.
pub fn main() -> ExitCode {
    let line = match CommandLine::try_parse() {
        Ok(line) => line,
        Err(error) => {
            // When even the terminal is gone the exit code is all there is to say.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    match dispatch(line) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if failure.exit != 0 {
                eprintln!("error: {failure}");
            }
            ExitCode::from(failure.exit)
        }
    }
}

fn dispatch(line: CommandLine) -> Outcome {
    let options = &line.options;
    log_to_stderr(&options.log)?;
    if let Command::StoreProbe { dir } = &line.command {
        return store::probe_metadata(dir).map_err(|error| Failure::new(error.to_string()));
    }
    let tokio = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let tokio = tokio.map_err(|error| Failure::new(format!("threads could not be started: {error}")))?;
    let handle = tokio.handle();
    match &line.command {
        Command::Run(run) => run.run(options, handle),
        Command::Serve(serve) => serve.run(options, handle),
        Command::Sessions(sessions) => sessions.run(options, handle),
        Command::Model(models) => models.run(),
        Command::Doctor(doctor) => doctor.run(options, handle),
        Command::Demo(demo) => demo.run(options),
        Command::Bench(bench) => bench.run(options, handle),
        Command::GpuCheck(check) => check.run(options, handle),
        Command::Replay(replay) => replay.run(options),
        Command::StoreProbe { .. } => Ok(()),
    }
}

fn log_to_stderr(filter: &str) -> Outcome {
    let parsed = tracing_subscriber::EnvFilter::try_new(filter);
    let parsed = parsed.map_err(|error| Failure::usage(format!("--log {filter} cannot be used: {error}")))?;
    // A subscriber that an embedding program installed before is kept.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(parsed)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .try_init();
    Ok(())
}
