//! What a session has done: its calls, so that one whose result is in the conversation is not made again, and its
//! tasks, because a small model copies its last plan. They are in the session's state, which outlives turns; the
//! oldest are forgotten when they take too much room.

use tools_sdk::Error;
use tools_sdk::agent::state;

/// Most bytes of what is remembered of a kind.
const MAX_BYTES: usize = 8 << 10;

/// What is remembered.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Calls that gave a result.
    Calls,
    /// Tasks of plans whose tool gave a result.
    Tasks,
}

impl Kind {
    fn key(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Tasks => "tasks",
        }
    }

    /// Whether this was done before: `what` with `tool`.
    pub(crate) fn has(self, tool: &str, what: &str) -> bool {
        self.load().contains(&line(tool, what))
    }

    /// Remembers it.
    pub(crate) fn add(self, tool: &str, what: &str) -> Result<(), Error> {
        let mut lines = self.load();
        lines.push(line(tool, what));
        while lines.iter().map(|line| line.len() + 1).sum::<usize>() > MAX_BYTES {
            lines.remove(0);
        }
        state::set(self.key(), &lines.join("\n"))
    }

    fn load(self) -> Vec<String> {
        state::get(self.key()).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

/// One line, whatever line breaks are in it.
fn line(tool: &str, what: &str) -> String {
    format!("{tool} {}", what.replace(['\n', '\r'], " "))
}
