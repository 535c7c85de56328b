//! `session-runtime replay`: what a trace says, and what the scheduler makes of it again.

use std::path::PathBuf;

use clap::Args;

use super::bytes::Bytes;
use super::failure::{Failure, Outcome};
use super::options::Options;
use super::table::Table;
use super::terminal::{print, print_line};
use crate::scheduler::IdlePolicyName;
use crate::scheduler::replay::{Counts, Replay as Replayed, Simulated, WhatIf, replay};
use crate::scheduler::trace::{TraceEnd, TraceReader};

/// Options of `replay`.
#[derive(Args, Debug)]
#[command(after_help = "--device-budget and --host-budget ask what would have been with other budgets.")]
pub(super) struct Replay {
    /// A file that --trace wrote
    file: PathBuf,
    /// Asks what would have been under this idle policy
    #[arg(long, value_name = "NAME")]
    policy: Option<IdlePolicyName>,
    /// Fails unless the replay of what was does exactly what was recorded
    #[arg(long)]
    check: bool,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

impl Replay {
    pub(super) fn run(&self, options: &Options) -> Outcome {
        let bytes = |given: Option<Bytes>| given.map(|Bytes(bytes)| bytes);
        let what_if = WhatIf {
            policy: self.policy.or(options.idle_policy),
            device_budget_bytes: bytes(options.device_budget),
            host_budget_bytes: bytes(options.host_budget),
        };
        let replayed = replay(TraceReader::open(&self.file)?, what_if)?;
        if self.json {
            let line = serde_json::to_string(&replayed).map_err(|error| Failure::new(error.to_string()))?;
            print_line(line)?;
        } else {
            print(head(&replayed))?;
            print(table(&replayed).render())?;
            print(foot(&replayed))?;
        }
        match (self.check, replayed.is_exact()) {
            (true, false) => Err(Failure::new(format!("{}: {}", self.file.display(), verdict(&replayed)))),
            _ => Ok(()),
        }
    }
}

fn head(replayed: &Replayed) -> String {
    let end = match replayed.end {
        TraceEnd::Stopped => "to its end".to_owned(),
        TraceEnd::Open => "which end without a stop: the process was killed, or still runs".to_owned(),
        TraceEnd::Cut { bytes } => {
            format!(
                "which end within a record ({bytes} bytes were not read): the process was killed, or the disk full"
            )
        }
    };
    format!(
        "{} under {}, device {}, host {}, {:.1} s\n{} records were read, {end}\n\n",
        replayed.model,
        replayed.policy,
        Bytes(replayed.device_budget_bytes),
        Bytes(replayed.host_budget_bytes),
        replayed.seconds,
        replayed.records,
    )
}

/// What a run with the recorded choices and one with other choices are called.
fn simulated_heads(what_if: &Simulated) -> [String; 2] {
    let choice = format!(
        "{}, {}/{}",
        what_if.policy,
        Bytes(what_if.device_budget_bytes),
        Bytes(what_if.host_budget_bytes)
    );
    ["simulated as recorded".to_owned(), format!("simulated {choice}")]
}

fn table(replayed: &Replayed) -> Table {
    let mut heads = vec![String::new(), "recorded".to_owned(), "replayed".to_owned()];
    let mut runs = vec![&replayed.recorded, &replayed.replayed];
    if let (Some(simulated), Some(what_if)) = (&replayed.simulated, &replayed.what_if) {
        heads.extend(simulated_heads(what_if));
        runs.extend([&simulated.counts, &what_if.counts]);
    }
    let mut table = Table::new(&heads.iter().map(String::as_str).collect::<Vec<_>>());
    let mut row = |name: &str, of: &dyn Fn(&Counts) -> String| {
        table.row(std::iter::once(name.to_owned()).chain(runs.iter().map(|counts| of(counts))));
    };
    row("messages", &|counts| counts.messages.to_string());
    row("tokens before them", &|counts| counts.input_tokens.to_string());
    row("  hit on the device", &|counts| counts.device_hit_tokens.to_string());
    row("  hit in host memory", &|counts| counts.host_hit_tokens.to_string());
    row("  hit on disk", &|counts| counts.disk_hit_tokens.to_string());
    row("  computed", &|counts| counts.computed_tokens.to_string());
    row("evictions", &|counts| counts.evicted().to_string());
    row("  nothing kept", &|counts| counts.drops.to_string());
    row("restores", &|counts| counts.restored().to_string());
    row("  ahead of a return", &|counts| counts.restores.get("prefetch").copied().unwrap_or(0).to_string());
    row("  given up", &|counts| counts.abandoned.to_string());
    row("  tokens loaded", &|counts| counts.restored_loaded_tokens.to_string());
    row("  tokens mixed", &|counts| counts.restored_mixed_tokens.to_string());
    row("  tokens recomputed", &|counts| counts.restored_recomputed_tokens.to_string());
    row("to disk", &|counts| Bytes(counts.bytes_to_disk).to_string());
    row("from host memory", &|counts| Bytes(counts.bytes_from_host).to_string());
    row("from disk", &|counts| Bytes(counts.bytes_from_disk).to_string());
    row("mean wait for a token", &|counts| {
        counts.mean_wait_ms().map_or("-".to_owned(), |ms| format!("{ms:.0} ms"))
    });
    table
}

fn foot(replayed: &Replayed) -> String {
    let mut text = format!("\n{}\n", verdict(replayed));
    if let (Some(simulated), Some(what_if)) = (&replayed.simulated, &replayed.what_if) {
        text.push_str(
            "simulated: the same messages and pauses on simulated time, with costs that the recorded run had measured\n",
        );
        for (run, name) in [simulated, what_if].into_iter().zip(simulated_heads(what_if)) {
            if run.failed + run.stuck > 0 {
                text.push_str(&format!(
                    "{name}: {} messages failed, {} waited in vain\n",
                    run.failed, run.stuck
                ));
            }
        }
    }
    text
}

fn verdict(replayed: &Replayed) -> String {
    match &replayed.divergence {
        None => "the replay did exactly what was recorded".to_owned(),
        Some(divergence) => format!(
            "the replay went another way at record {}: {}; replay it with the program that wrote it, version {}",
            divergence.record, divergence.what, replayed.program
        ),
    }
}
