//! Telling how far a long operation on a model file is, and one way to show it.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Asking a source.
    Connecting,
    /// Bytes are arriving.
    Downloading,
    /// Bytes are read to check or compute a digest.
    Verifying,
    /// Weights are repacked for a device.
    Repacking,
}

impl Stage {
    /// A word for people.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Connecting => "connecting",
            Stage::Downloading => "downloading",
            Stage::Verifying => "verifying",
            Stage::Repacking => "repacking",
        }
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// `done` of `total` bytes are done.
    Bytes {
        /// Where the bytes come from, for people.
        source: &'a str,
        /// What is being done.
        stage: Stage,
        /// Bytes done.
        done: u64,
        /// Bytes in all, where known.
        total: Option<u64>,
    },
    /// A source could not be used; another is tried if there is one.
    SourceFailed {
        /// The source.
        source: &'a str,
        /// Why.
        error: &'a str,
    },
    /// The operation is over.
    Finished,
}

/// Whom to tell, where that is decided elsewhere.
pub type Listener = Arc<dyn Progress + Send + Sync>;

/// Receives events. Called from the thread that works, often: implementations decide what to show.
pub trait Progress {
    /// Takes an event.
    fn event(&self, event: Event<'_>);

    /// Shorthand for [`Event::Bytes`].
    fn bytes(&self, source: &str, stage: Stage, done: u64, total: Option<u64>) {
        self.event(Event::Bytes { source, stage, done, total });
    }
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn event(&self, _: Event<'_>) {}
}

/// Time between two plain lines.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Shows a bar with bytes, speed and remaining time on standard error, or a plain line every few
/// seconds when that is not a terminal.
#[derive(Debug)]
pub struct Terminal {
    state: Mutex<Shown>,
}

#[derive(Debug, Default)]
struct Shown {
    bar: Option<ProgressBar>,
    /// What the bar or the last line is about.
    about: Option<(String, Stage)>,
    last_line: Option<Instant>,
}

impl Default for Terminal {
    fn default() -> Terminal {
        Terminal::new()
    }
}

impl Terminal {
    /// Nothing is shown before the first event.
    pub fn new() -> Terminal {
        Terminal { state: Mutex::new(Shown::default()) }
    }
}

impl Progress for Terminal {
    fn event(&self, event: Event<'_>) {
        // A poisoned lock only means that another thread stopped while drawing.
        let mut shown = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        match event {
            Event::Bytes { source, stage, done, total } => shown.bytes(source, stage, done, total),
            Event::SourceFailed { source, error } => {
                shown.clear();
                line(&format!("{source}: {error}"));
            }
            Event::Finished => shown.clear(),
        }
    }
}

impl Shown {
    fn bytes(&mut self, source: &str, stage: Stage, done: u64, total: Option<u64>) {
        let new = self.about.as_ref().is_none_or(|(at, what)| at != source || *what != stage);
        if new {
            self.clear();
            self.about = Some((source.to_string(), stage));
        }
        if !std::io::stderr().is_terminal() {
            // What a model needs at every start is told only where it takes a while.
            if new && matches!(stage, Stage::Verifying | Stage::Repacking) {
                self.last_line = Some(Instant::now());
                return;
            }
            let due = self.last_line.is_none_or(|at| at.elapsed() >= LINE_INTERVAL);
            let end = Some(done) == total && done > 0 && stage != Stage::Repacking;
            if new || due || end {
                self.last_line = Some(Instant::now());
                let total = total.map_or(String::new(), |total| format!(" of {}", mebibytes(total)));
                line(&format!("{} {source}: {}{total}", stage.name(), mebibytes(done)));
            }
            return;
        }
        let bar = self.bar.get_or_insert_with(|| bar(source, stage, total));
        if let Some(total) = total {
            bar.set_length(total);
        }
        bar.set_position(done);
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        self.about = None;
        self.last_line = None;
    }
}

fn bar(source: &str, stage: Stage, total: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
    let template = "{prefix} {bar:24} {bytes}/{total_bytes} {bytes_per_sec} {eta} {msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_prefix(stage.name());
    bar.set_message(source.to_string());
    bar
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// A line on standard error; a closed one is no reason to stop working.
fn line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
