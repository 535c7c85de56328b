//! Benchmarks. Speed is a ratio measured in one run, interleaved; each line is one JSON object
//! `{bench, case, metric, value, unit, against, ratio, n}`.

mod codec;
pub mod engine;
pub mod gpu;
pub mod idle;
mod overhead;
mod peer;
pub mod restore;
mod resume;

use std::path::PathBuf;

use serde::Serialize;

use crate::config::Config;
use crate::error::Error;

/// One measured figure.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// The benchmark.
    pub bench: &'static str,
    /// The case, such as `smollm2-135m/prefill-512`.
    pub case: String,
    /// What was measured.
    pub metric: &'static str,
    /// Median of the runs; of the time of a single layer their mean.
    pub value: f64,
    /// Unit of the value.
    pub unit: &'static str,
    /// What the ratio is against.
    pub against: Option<&'static str>,
    /// Value over that.
    pub ratio: Option<f64>,
    /// Runs.
    pub n: usize,
}

/// The benchmarks there are.
pub const NAMES: [&str; 4] = ["codec", "engine", "idle", "restore"];

/// What is measured.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Aliases or paths.
    pub models: Vec<String>,
    /// Threads, how activations are rounded, how KV and the weights of checkpoints are kept, speculation: what a
    /// runtime would be opened with.
    pub config: Config,
    /// Tokens of the sessions that `restore` brings back; none: its own choice.
    pub tokens: Vec<usize>,
    /// A program from `benches/peers` to measure beside ours.
    pub peer: Option<PathBuf>,
}

/// Runs a benchmark, telling each figure as soon as it is known.
///
/// # Errors
/// An unknown name, or what the runtime fails with.
pub async fn run(name: &str, setup: &Setup, tell: &mut (dyn FnMut(Figure) + Send)) -> Result<(), Error> {
    match name {
        "codec" => tokio::task::block_in_place(|| codec::run(setup, tell)),
        "engine" => tokio::task::block_in_place(|| engine::run(setup, tell)),
        "idle" => idle::run(setup, tell).await,
        "restore" => restore::run(setup, tell).await,
        _ => Err(Error::invalid(
            "bench_not_found",
            format!("there is no benchmark '{name}': choose one of {}", NAMES.join(", ")),
        )),
    }
}

/// The middle of the values; 0 without any.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
