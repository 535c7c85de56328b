//! `session-runtime demo`: the life of a session's KV on a real model, shown as a timeline.
//!
//! A device budget holds one session but not two. Session A asks about a folder of files; while it
//! waits in a slow tool, session B runs and forces A out; A comes back by loading some of its KV and
//! recomputing the rest, and finishes. Then the server is killed with SIGKILL and started again, and A
//! answers a follow-up. A control run that never left memory tells whether A's tokens are right.

mod scenario;
mod server;
mod timeline;

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::Value;

use super::failure::{Failure, Outcome};
use super::options::Options;
use super::terminal::print_line;
use scenario::Scenario;
use server::Server;
use timeline::Timeline;

/// Options of `demo`.
#[derive(Args, Debug)]
pub(super) struct Demo {
    /// Keeps the demo's data directory and logs here instead of in a temporary directory
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// What the control run told.
struct Control {
    tokens: Vec<u64>,
    answers: Vec<String>,
    /// Bytes per second at which loading A takes as long as recomputing it.
    break_even: f64,
    kv_bytes_per_token: u64,
}

impl Demo {
    pub(super) fn run(&self, options: &Options) -> Outcome {
        let begun = Instant::now();
        let temporary = std::env::temp_dir().join(crate::ids::fresh("demo"));
        let base = self.keep.clone().unwrap_or_else(|| temporary.clone());
        let outcome = play(&Scenario::prepare(&base, options)?, begun);
        if self.keep.is_none() {
            // The directory is the demo's own; what is left of it harms nobody.
            let _ = std::fs::remove_dir_all(&temporary);
        }
        outcome
    }
}

fn play(scenario: &Scenario, begun: Instant) -> Outcome {
    print_line(format_args!("model {}, folder with:", scenario.model))?;
    for (name, text) in scenario::FILES {
        print_line(format_args!("  {name}: {}", timeline::short(text)))?;
    }
    print_line("\n1. Control run: session A alone, with room for everything")?;
    let control = control(scenario)?;
    let length = control.tokens.len();
    print_line(format_args!("   A has {length} tokens at the end; it answered:"))?;
    for answer in &control.answers {
        print_line(format_args!("   > {}", timeline::short(answer)))?;
    }
    let budget_tokens = length as u64 + scenario::HEADROOM_TOKENS;
    let budget = budget_tokens * control.kv_bytes_per_token;
    print_line(format_args!(
        "\n2. The same with a device budget of {:.1} MB, which holds A but not A and B, and a disk that loads A's \
         KV about as fast as it can be recomputed ({:.1} MB/s)",
        budget as f64 / 1e6,
        control.break_even / 1e6
    ))?;
    // Host memory would have all of A, and leave nothing to plan.
    let arguments = scenario.arguments(&[
        "--device-budget".to_owned(),
        budget.to_string(),
        "--host-budget".to_owned(),
        "0".to_owned(),
        "--throttle-disk".to_owned(),
        (control.break_even as u64).max(1).to_string(),
    ]);
    let mut timeline = Timeline::new(false);
    let data = scenario.base.join("data");
    let log = scenario.base.join("server.log");
    let server = Server::start(&data, &log, &arguments)?;
    scenario.create_a(&server.client)?;
    scenario.create_b(&server.client)?;
    let first = scenario.start(&server.client, "A", scenario::QUESTION)?;
    timeline.follow_until(&server.client, &["A"], |timeline| {
        timeline.has("A", "tool.started", &[("tool", "wait")]) || timeline.has("A", "turn.finished", &[])
    })?;
    timeline.remark("A waits in a slow tool; B begins and needs the pages")?;
    let left = budget_tokens.saturating_sub(timeline.tokens("A").len() as u64);
    scenario.start(&server.client, "B", &scenario::b_prompt(left))?;
    timeline.follow_until(&server.client, &["A", "B"], |timeline| {
        timeline.has("A", "turn.finished", &[("turn", &first)]) && timeline.has("B", "turn.finished", &[])
    })?;
    timeline.remark("the server is killed with SIGKILL and started again")?;
    server.kill()?;
    let server = Server::start(&data, &log, &arguments)?;
    let second = scenario.start(&server.client, "A", scenario::FOLLOW_UP)?;
    timeline.follow_until(&server.client, &["A", "B"], |timeline| {
        timeline.has("A", "turn.finished", &[("turn", &second)])
    })?;
    server.kill()?;
    summary(&timeline, &control, begun)
}

/// Runs A without ever leaving memory, then measures what loading and recomputing it cost.
fn control(scenario: &Scenario) -> Outcome<Control> {
    let log = scenario.base.join("control.log");
    let server = Server::start(&scenario.base.join("control"), &log, &scenario.arguments(&[]))?;
    let client = &server.client;
    scenario.create_a(client)?;
    let mut timeline = Timeline::new(true);
    let mut answers = Vec::new();
    for question in [scenario::QUESTION, scenario::FOLLOW_UP] {
        let turn = scenario.start(client, "A", question)?;
        timeline.follow_until(client, &["A"], |timeline| {
            timeline.has("A", "turn.finished", &[("turn", &turn)])
        })?;
        let view = client.get(&format!("/v1/sessions/A/turns/{turn}"))?;
        if view["status"] != "completed" {
            return Err(Failure::new(format!("the control run's turn failed: {}", view["error"]["message"])));
        }
        answers.push(view["output_text"].as_str().unwrap_or_default().to_owned());
    }
    client.post("/v1/sessions/A/kv/evict", &serde_json::json!({}))?;
    let report = client.post("/v1/sessions/A/kv/restore", &serde_json::json!({"mode": "recompute"}))?;
    let kv_bytes_per_token = kv_bytes_per_token(&client.get("/v1/models")?)?;
    let tokens = timeline.tokens("A");
    let recompute_seconds = report["ms"].as_f64().unwrap_or(0.0).max(1.0) / 1e3;
    let break_even = (tokens.len() as u64 * kv_bytes_per_token) as f64 / recompute_seconds;
    server.kill()?;
    Ok(Control { tokens, answers, break_even, kv_bytes_per_token })
}

fn kv_bytes_per_token(models: &Value) -> Outcome<u64> {
    models["data"][0]["meta"]["kv_bytes_per_token"]
        .as_u64()
        .ok_or_else(|| Failure::new("the server does not say how many bytes of KV a token has"))
}

/// The table of reuse against recompute, and the verdict as the last line.
fn summary(timeline: &Timeline, control: &Control, begun: Instant) -> Outcome {
    print_line("\n3. What A's restores did")?;
    print_line("   tokens  loaded  by layer  recomputed      ms   recompute alone")?;
    // The first one is that of A coming back while B is there.
    let mut mixed = None;
    for event in timeline.of_kind("A", "kv.restore") {
        let report = &event["data"];
        let number = |name: &str| report[name].as_u64().unwrap_or(0);
        mixed.get_or_insert(number("cells_loaded") > 0 && number("cells_recomputed") > 0);
        print_line(format_args!(
            "   {:6}  {:6}  {:8}  {:10}  {:6.0}  {:6.0} ms predicted",
            number("tokens"),
            number("tokens_loaded"),
            number("tokens_mixed"),
            number("tokens_recomputed"),
            report["ms"].as_f64().unwrap_or(0.0),
            report["predicted_recompute_ms"].as_f64().unwrap_or(0.0),
        ))?;
    }
    for event in timeline.of_kind("A", "turn.finished") {
        let usage = &event["data"]["usage"];
        print_line(format_args!(
            "   turn: {} tokens read, {} of them reused from KV, {} written",
            usage["input_tokens"], usage["cached_tokens"], usage["output_tokens"]
        ))?;
    }
    print_line(format_args!("   demo took {:.0} s", begun.elapsed().as_secs_f64()))?;
    let evicted = timeline.has("A", "kv.transition", &[("to", "evicted"), ("reason", "pressure")]);
    let tokens = timeline.tokens("A");
    if tokens != control.tokens {
        let at = tokens.iter().zip(&control.tokens).take_while(|(left, right)| left == right).count();
        return Err(Failure::new(format!(
            "A's {} tokens DIFFER from those of the control run that was never evicted, from index {at} on",
            tokens.len()
        )));
    }
    if !evicted {
        return Err(Failure::new("session B did not force A out"));
    }
    if mixed != Some(true) {
        return Err(Failure::new("A's first restore did not both load and recompute"));
    }
    print_line(format_args!(
        "\nA's {} tokens equal those of the control run that was never evicted",
        tokens.len()
    ))
}
