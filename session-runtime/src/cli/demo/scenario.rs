//! The demo's files, questions and sessions.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::client::Client;
use super::super::failure::{Failure, Outcome};
use super::super::options::Options;
use super::timeline::Timeline;

/// The folder session A asks about.
pub(super) const FILES: [(&str, &str); 4] = [
    ("hotel.txt", "Trip to Porto, March.\nHotel Aurora, three nights.\nAmount paid: 412.50 EUR\n"),
    ("train.txt", "Trip to Porto, March.\nTrain tickets, both ways.\nAmount paid: 138.20 EUR\n"),
    ("meals.txt", "Trip to Porto, March.\nMeals, all days together.\nAmount paid: 96.75 EUR\n"),
    ("packing.txt", "Trip to Porto, March.\nTake the blue folder and the charger.\n"),
];

/// A's first question.
pub(super) const QUESTION: &str = "What did the trip cost in total? Search the files for 'Amount paid', add the \
                                   amounts with the calculator, wait 12 seconds for the approval, then tell me \
                                   the total.";

/// A's question after the server was killed.
pub(super) const FOLLOW_UP: &str = "How much did the hotel cost?";

/// Tokens of room in the device budget beyond A's own.
pub(super) const HEADROOM_TOKENS: u64 = 96;

/// Longest wait for something to happen.
const PATIENCE: Duration = Duration::from_secs(170);
const POLL: Duration = Duration::from_millis(120);

/// Fewest tokens of one line of B's prompt.
const LINE_TOKENS: u64 = 18;

/// B's prompt: at least `tokens` tokens, so that B does not fit beside A.
pub(super) fn b_prompt(tokens: u64) -> String {
    let places = ["harbour", "library", "station", "mill", "garden"];
    let lines: String = (1..=tokens.div_ceil(LINE_TOKENS) as usize)
        .map(|day| {
            let place = places[day % places.len()];
            format!("On day {day} the keeper of the {place} counted {} lamps and wrote it down. ", day * 3)
        })
        .collect();
    format!("{lines}Say in one short sentence what the keepers did.")
}

/// Where the demo works and with what.
pub(super) struct Scenario {
    pub(super) base: PathBuf,
    pub(super) model: String,
    notes: PathBuf,
    guests: Vec<PathBuf>,
}

impl Scenario {
    /// Makes the demo's folder.
    pub(super) fn prepare(base: &Path, options: &Options) -> Outcome<Self> {
        let failed =
            |error: std::io::Error| Failure::new(format!("{} cannot be written: {error}", base.display()));
        let notes = base.join("notes");
        fs::create_dir_all(&notes).map_err(failed)?;
        for (name, text) in FILES {
            fs::write(notes.join(name), text).map_err(failed)?;
        }
        let notes = fs::canonicalize(notes).map_err(failed)?;
        let guests = options.guest_dirs()?;
        if guests.is_empty() {
            return Err(Failure::new("there are no guests: build them with `cargo xtask guests`"));
        }
        Ok(Self { base: base.to_owned(), model: options.model_name().to_owned(), notes, guests })
    }

    /// Arguments of a server of this demo.
    pub(super) fn arguments(&self, more: &[String]) -> Vec<String> {
        let mut arguments = vec!["--model".to_owned(), self.model.clone()];
        arguments.extend(["--grant-root".to_owned(), self.notes.display().to_string()]);
        for directory in &self.guests {
            arguments.extend(["--guests".to_owned(), directory.display().to_string()]);
        }
        arguments.extend_from_slice(more);
        arguments
    }

    /// Creates session A: an agent with three tools and the folder.
    pub(super) fn create_a(&self, client: &Client) -> Outcome {
        let spec = json!({
            "id": "A",
            "agent": "assistant",
            "tools": ["files", "calculator", "wait"],
            "grants": [{"name": "notes", "path": self.notes}],
        });
        client.post("/v1/sessions", &spec).map(drop)
    }

    /// Creates session B: a plain chat.
    pub(super) fn create_b(&self, client: &Client) -> Outcome {
        client.post("/v1/sessions", &json!({"id": "B"})).map(drop)
    }

    /// Begins a turn; its id.
    pub(super) fn start(&self, client: &Client, session: &str, input: &str) -> Outcome<String> {
        let body = json!({"input": input, "background": true, "max_tokens": 96});
        let turn = client.post(&format!("/v1/sessions/{session}/turns"), &body)?;
        turn["id"]
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| Failure::new(format!("the server began a turn without an id: {turn}")))
    }
}

impl Timeline {
    /// Reads and shows events until `done`.
    pub(super) fn follow_until(
        &mut self,
        client: &Client,
        sessions: &[&'static str],
        done: impl Fn(&Self) -> bool,
    ) -> Outcome {
        let begun = Instant::now();
        loop {
            self.read(client, sessions)?;
            if let Some(failed) = sessions
                .iter()
                .flat_map(|session| self.of_kind(session, "turn.finished"))
                .find(|event| event["data"]["status"] != "completed")
            {
                return Err(Failure::new(format!("a turn did not complete: {}", message(failed))));
            }
            if done(self) {
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                return Err(Failure::new("the sessions did not get on within three minutes"));
            }
            std::thread::sleep(POLL);
        }
    }
}

fn message(event: &Value) -> &str {
    event["data"]["error"]["message"].as_str().unwrap_or("no reason given")
}
