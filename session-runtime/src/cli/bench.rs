//! `session-runtime bench`: measurements of this build on this machine.

use std::path::PathBuf;

use clap::Args;
use tokio::runtime::Handle;

use super::failure::{Failure, Outcome};
use super::options::Options;
use super::terminal::print_line;
use crate::bench::{self, Figure, Setup};
use crate::models::catalog;

/// Models measured where none is named, as far as they are here.
const MODELS: [&str; 3] = ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"];

/// Options of `bench`.
#[derive(Args, Debug)]
pub(super) struct Bench {
    /// codec: bytes of KV packed without loss, and how fast; engine: prefill, decode, perplexity, load time; idle: agents that call tools, under each idle policy, on simulated
    /// time; restore: load, recompute and planned over a throttled disk
    #[arg(value_parser = bench::NAMES)]
    name: String,
    /// A peer's program to measure beside ours, as built by `cargo xtask bench engine --peer llama-cpp`
    #[arg(long, value_name = "PROGRAM")]
    peer: Option<PathBuf>,
    /// Tokens of the session that `restore` brings back; may be repeated [default: 4000 and 8000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    tokens: Vec<u32>,
    /// Prints one JSON object a line
    #[arg(long)]
    json: bool,
}

impl Bench {
    pub(super) fn run(&self, options: &Options, handle: &Handle) -> Outcome {
        let models = match &options.model {
            Some(model) => vec![model.clone()],
            None => self.models(),
        };
        let mut unprinted = Ok(());
        let mut tell = |figure: Figure| {
            if unprinted.is_ok() {
                unprinted = self.print(&figure);
            }
        };
        let tokens = self.tokens.iter().map(|tokens| *tokens as usize).collect();
        let setup = Setup { models, config: options.config()?, tokens, peer: self.peer.clone() };
        handle.block_on(bench::run(&self.name, &setup, &mut tell))?;
        unprinted
    }

    /// Those of [`MODELS`] that are here; all of them, for the error that says how to fetch one, where none is. Restores are
    /// measured on the two small ones, idle policies on the smallest: what is compared does not depend on the model's size.
    fn models(&self) -> Vec<String> {
        let wanted = match self.name.as_str() {
            "idle" => &MODELS[..1],
            "restore" => &MODELS[..2],
            _ => &MODELS[..],
        };
        let here: Vec<&str> = wanted.iter().copied().filter(|name| catalog::resolve(name).is_ok()).collect();
        let chosen = if here.is_empty() { wanted.to_vec() } else { here };
        chosen.into_iter().map(str::to_owned).collect()
    }

    fn print(&self, figure: &Figure) -> Outcome {
        if self.json {
            let line = serde_json::to_string(figure).map_err(|error| Failure::new(error.to_string()))?;
            return print_line(line);
        }
        let against = match (figure.against, figure.ratio) {
            (Some(against), Some(ratio)) => format!("  {ratio:.2} of {against}"),
            _ => String::new(),
        };
        let (case, metric, value, unit, n) =
            (&figure.case, figure.metric, figure.value, figure.unit, figure.n);
        print_line(format_args!("{case:<36} {metric:<24} {value:>12.2} {unit:<10} n={n}{against}"))
    }
}
