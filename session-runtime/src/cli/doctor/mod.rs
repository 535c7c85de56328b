//! `session-runtime doctor`: what could keep the runtime from working here, each with its fix.

mod gpu;
mod guests;
mod host;
mod storage;

use clap::Args;
use serde::Serialize;
use tokio::runtime::Handle;

use super::failure::{Failure, Outcome};
use super::options::Options;
use super::terminal::print_line;

/// Options of `doctor`.
#[derive(Args, Debug)]
pub(super) struct Doctor {
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// Fine.
    Ok,
    /// It works, but not as well as it could.
    Warning,
    /// It keeps the runtime from working.
    Problem,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    /// What was found.
    found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Ok, found: found.into(), fix: None }
    }

    fn warning(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Warning, found: found.into(), fix: Some(fix.into()) }
    }

    fn problem(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Problem, found: found.into(), fix: Some(fix.into()) }
    }
}

impl Doctor {
    pub(super) fn run(&self, options: &Options, handle: &Handle) -> Outcome {
        let mut checks = vec![host::processor(), host::memory(options)];
        checks.extend(gpu::checks(options)?);
        checks.extend(storage::model(options));
        checks.push(storage::data_directory(options)?);
        checks.push(storage::disk_space(options)?);
        checks.extend(guests::guests(options, handle)?);
        checks.push(host::port(options)?);
        if self.json {
            let value = serde_json::to_value(&checks).map_err(crate::error::Error::from)?;
            print_line(format_args!("{value:#}"))?;
        } else {
            checks.iter().try_for_each(show)?;
        }
        let problems: Vec<&str> =
            checks.iter().filter(|check| check.verdict == Verdict::Problem).map(|check| check.name).collect();
        if problems.is_empty() {
            return Ok(());
        }
        Err(Failure::new(format!("the runtime cannot work here yet: see {} above", problems.join(", "))))
    }
}

fn show(check: &Check) -> Outcome {
    let mark = match check.verdict {
        Verdict::Ok => "ok",
        Verdict::Warning => "warning",
        Verdict::Problem => "problem",
    };
    print_line(format_args!("{mark:<8} {:<15} {}", check.name, check.found))?;
    match &check.fix {
        Some(fix) => print_line(format_args!("{:<24} -> {fix}", "")),
        None => Ok(()),
    }
}
