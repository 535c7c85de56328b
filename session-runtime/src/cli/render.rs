//! A session's events on a terminal: the answer on standard output, everything around it on standard
//! error, so that `run ... > file` keeps the answer alone.

use std::collections::HashMap;
use std::io::IsTerminal;

use serde_json::Value;

use super::terminal;
use crate::restore::report::RestoreReport;

/// Most characters of a tool's input or output that are shown.
const SHOWN: usize = 400;

/// Where events are shown.
#[derive(Debug)]
pub(super) struct Screen {
    silent: bool,
    colour: bool,
    /// Kind of each segment being written.
    kinds: HashMap<String, String>,
    /// What the last piece of text belonged to; empty at the start of a line.
    writing: String,
}

impl Screen {
    /// A screen that shows everything.
    pub(super) fn terminal() -> Self {
        let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { silent: false, colour, kinds: HashMap::new(), writing: String::new() }
    }

    /// A screen that shows nothing.
    pub(super) fn silent() -> Self {
        Self { silent: true, colour: false, kinds: HashMap::new(), writing: String::new() }
    }

    /// Shows one event of the log.
    pub(super) fn show(&mut self, event: &Value) {
        if self.silent {
            return;
        }
        let data = &event["data"];
        let text = |name: &str| data[name].as_str().unwrap_or_default();
        match event["type"].as_str().unwrap_or_default() {
            "generation.started" => {
                self.kinds.insert(text("segment").to_owned(), text("kind").to_owned());
                self.write(text("segment"), text("text"));
            }
            "generation.tokens" => self.write(text("segment"), text("text")),
            "generation.finished" => self.end_line(),
            "tool.started" => self.note(&format!("-> {} {}", text("tool"), shortened(text("input")))),
            "tool.progress" => self.progress(data),
            "tool.finished" => self.tool_finished(data),
            "kv.restore" => {
                if let Ok(report) = serde_json::from_value::<RestoreReport>(data.clone()) {
                    self.note(&format!("kv restored: {}", report.summary()));
                }
            }
            "kv.relocated" => self.note(&format!("kv moved: {} tokens behind the cut", data["tokens"])),
            "kv.transition" if matches!(text("to"), "evicted" | "stale" | "lost") => {
                let bytes = super::bytes::Bytes(data["bytes"].as_u64().unwrap_or(0));
                let tokens = data["tokens"].as_u64().unwrap_or(0);
                self.note(&format!("kv {} ({}): {tokens} tokens, {bytes}", text("to"), text("reason")));
            }
            "segment.expired" | "segment.cut" => {
                self.note(&format!("segment {} cut ({})", text("segment"), text("reason")));
            }
            "turn.queued" => self.note("queued behind the running turn"),
            "call.refused" => {
                let why = data["error"]["message"].as_str().unwrap_or_default();
                self.note(&format!("refused to {}: {why}", text("name")));
            }
            "agent.log" => self.note(&format!("{}: {}", text("level"), text("message"))),
            "turn.finished" => self.end_line(),
            _ => {}
        }
    }

    fn write(&mut self, segment: &str, text: &str) {
        if text.is_empty() {
            return;
        }
        let kind = self.kinds.get(segment).cloned().unwrap_or_default();
        match kind.as_str() {
            "answer" => {
                self.begin(&kind);
                // When nobody reads the answer the turn still goes on to its end: it is part of the session.
                let _ = terminal::print(text);
            }
            "reasoning" => {
                if self.writing != kind {
                    self.begin(&kind);
                    eprint!("{}", self.dim("thinking: "));
                }
                eprint!("{}", self.dim(text));
            }
            // A call is shown as a whole when its tool starts.
            _ => {}
        }
    }

    fn begin(&mut self, kind: &str) {
        if self.writing != kind {
            self.end_line();
            kind.clone_into(&mut self.writing);
        }
    }

    fn end_line(&mut self) {
        match std::mem::take(&mut self.writing).as_str() {
            "" => {}
            "answer" => {
                let _ = terminal::print_line("");
            }
            _ => eprintln!(),
        }
    }

    fn note(&mut self, text: &str) {
        self.end_line();
        eprintln!("{}", self.dim(text));
    }

    fn progress(&mut self, data: &Value) {
        let (done, total) = (data["done"].as_u64().unwrap_or(0), data["total"].as_u64().unwrap_or(0));
        let message = data["message"].as_str().unwrap_or_default();
        let share = if total > 0 { format!("{done}/{total} ") } else { String::new() };
        if self.colour {
            self.begin("progress");
            eprint!("\r\x1b[K{}", self.dim(&format!("   {share}{message}")));
        } else {
            self.note(&format!("   {share}{message}"));
        }
    }

    fn tool_finished(&mut self, data: &Value) {
        if data["ok"].as_bool().unwrap_or(false) {
            self.note(&format!("<- {}", shortened(data["text"].as_str().unwrap_or_default())));
        } else {
            let error = &data["error"];
            let message = error["message"].as_str().unwrap_or("failed");
            self.note(&format!("<- error {}: {message}", error["code"].as_str().unwrap_or_default()));
        }
    }

    fn dim(&self, text: &str) -> String {
        if self.colour { format!("\x1b[2m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// One line of at most `SHOWN` characters, without control characters.
pub(super) fn shortened(text: &str) -> String {
    let line: String =
        text.trim().chars().take(SHOWN).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.trim().chars().count() > SHOWN { format!("{line}...") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_shortened_to_one_line() {
        assert_eq!(shortened(" a\nb\x1b[2J "), "a b [2J");
        let long = shortened(&"x".repeat(SHOWN + 1));
        assert_eq!(long.len(), SHOWN + 3);
        assert!(long.ends_with("..."));
    }
}
