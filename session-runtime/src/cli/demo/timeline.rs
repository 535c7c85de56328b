//! What happened, as the sessions' own events tell it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::super::client::Client;
use super::super::failure::Outcome;
use super::super::terminal::print_line;

/// Widest text shown of a tool's input or an answer.
const TEXT_WIDTH: usize = 100;

/// Follows the events of some sessions and prints those that matter.
pub(super) struct Timeline {
    begun_ms: Option<u64>,
    seen: BTreeMap<&'static str, u64>,
    /// Every event read, by session.
    pub(super) events: BTreeMap<&'static str, Vec<Value>>,
    quiet: bool,
}

impl Timeline {
    /// An empty timeline; a quiet one prints nothing.
    pub(super) fn new(quiet: bool) -> Self {
        Self { begun_ms: None, seen: BTreeMap::new(), events: BTreeMap::new(), quiet }
    }

    /// Reads what is new of a session.
    pub(super) fn read(&mut self, client: &Client, sessions: &[&'static str]) -> Outcome {
        let mut fresh: Vec<(&'static str, Value)> = Vec::new();
        for session in sessions {
            let after = self.seen.get(session).copied().unwrap_or(0);
            let page = client.get(&format!("/v1/sessions/{session}/events?after={after}&limit=1000"))?;
            for event in page["data"].as_array().into_iter().flatten() {
                self.seen.insert(session, event["seq"].as_u64().unwrap_or(after));
                fresh.push((session, event.clone()));
            }
        }
        fresh.sort_by_key(|(_, event)| event["time_ms"].as_u64());
        for (session, event) in fresh {
            if !self.quiet {
                self.print(session, &event)?;
            }
            self.events.entry(session).or_default().push(event);
        }
        Ok(())
    }

    /// Prints a remark of the demo itself.
    pub(super) fn remark(&self, text: &str) -> Outcome {
        if self.quiet { Ok(()) } else { print_line(format_args!("          -- {text}")) }
    }

    fn print(&mut self, session: &str, event: &Value) -> Outcome {
        let Some(text) = describe(event) else { return Ok(()) };
        let time = event["time_ms"].as_u64().unwrap_or(0);
        let begun = *self.begun_ms.get_or_insert(time);
        let seconds = time.saturating_sub(begun) as f64 / 1e3;
        print_line(format_args!("{seconds:7.2} s  {session}  {text}"))
    }

    /// Whether a session has an event of this kind whose data has these members.
    pub(super) fn has(&self, session: &str, kind: &str, wanted: &[(&str, &str)]) -> bool {
        self.of_kind(session, kind)
            .any(|event| wanted.iter().all(|(name, value)| event["data"][*name].as_str() == Some(value)))
    }

    /// A session's events of one kind.
    pub(super) fn of_kind<'a>(&'a self, session: &str, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.events.get(session).into_iter().flatten().filter(move |event| event["type"] == kind)
    }

    /// The session's tokens: what its events appended, in order.
    pub(super) fn tokens(&self, session: &str) -> Vec<u64> {
        let events = self.events.get(session).into_iter().flatten();
        events
            .filter(|event| {
                matches!(
                    event["type"].as_str(),
                    Some(
                        "segment.appended"
                            | "generation.started"
                            | "generation.tokens"
                            | "generation.finished"
                    )
                )
            })
            .flat_map(|event| event["data"]["ids"].as_array().into_iter().flatten())
            .filter_map(Value::as_u64)
            .collect()
    }
}

/// One line for an event, or none for the many small ones.
fn describe(event: &Value) -> Option<String> {
    let data = &event["data"];
    let text = |name: &str| data[name].as_str().unwrap_or_default().to_owned();
    Some(match event["type"].as_str()? {
        "turn.started" => format!("turn {} begins: {}", data["number"], short(&text("input"))),
        "turn.finished" => format!("turn ends: {}, {}", text("status"), usage(&data["usage"])),
        "tool.started" => format!("calls {} {}", text("tool"), short(&text("input"))),
        "tool.finished" => match data["ok"].as_bool() {
            Some(true) => format!("{} gave {}", text("tool"), short(&text("text"))),
            _ => {
                format!(
                    "{} failed: {}",
                    text("tool"),
                    short(data["error"]["message"].as_str().unwrap_or("?"))
                )
            }
        },
        "kv.transition" => format!(
            "KV {} -> {} ({}), {} tokens{}",
            text("from"),
            text("to"),
            text("reason"),
            data["tokens"],
            moved(data)
        ),
        "kv.restore" => format!("restore: {}", restore(data)),
        _ => return None,
    })
}

fn moved(data: &Value) -> String {
    match (data["bytes"].as_u64(), data["ms"].as_f64()) {
        (Some(bytes), Some(ms)) if bytes > 0 => {
            format!(", {:.1} MB in {ms:.0} ms", bytes as f64 / 1e6)
        }
        _ => String::new(),
    }
}

fn usage(usage: &Value) -> String {
    format!(
        "{} tokens read ({} from KV), {} written",
        usage["input_tokens"], usage["cached_tokens"], usage["output_tokens"]
    )
}

/// A restore's report in one line, the plan as one letter a chunk.
pub(super) fn restore(report: &Value) -> String {
    let layers = report["layers"].as_u64().unwrap_or(0);
    let plan: String = report["plan"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|cut| match cut.as_u64() {
            Some(0) => 'L',
            Some(cut) if cut == layers => 'R',
            _ => 'm',
        })
        .collect();
    format!(
        "{} tokens in {:.0} ms: {} from host, {} from disk, {} mixed, {} recomputed; plan {plan} (L load, R recompute, m by \
         layer); predicted {:.0} ms, recompute alone {:.0} ms",
        report["tokens"],
        report["ms"].as_f64().unwrap_or(0.0),
        report["from_host"]["tokens"],
        report["from_disk"]["tokens"],
        report["tokens_mixed"],
        report["tokens_recomputed"],
        report["predicted_ms"].as_f64().unwrap_or(0.0),
        report["predicted_recompute_ms"].as_f64().unwrap_or(0.0),
    )
}

/// A text on one line, cut to a width.
pub(super) fn short(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= TEXT_WIDTH {
        return line;
    }
    let cut: String = line.chars().take(TEXT_WIDTH).collect();
    format!("{cut}...")
}
