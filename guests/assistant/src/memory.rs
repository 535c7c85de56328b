//! The calls a session has made, so that one whose result is in the conversation is not made again. They are in
//! the session's state, which outlives turns; the oldest are forgotten when they take too much room.

use serde_json::Value;
use tools_sdk::Error;
use tools_sdk::agent::state;

const KEY: &str = "calls";
/// Most bytes of remembered calls.
const MAX_BYTES: usize = 8 << 10;

/// Whether this call was made before.
pub(crate) fn has(name: &str, arguments: &Value) -> bool {
    load().contains(&line(name, arguments))
}

/// Remembers a call.
pub(crate) fn add(name: &str, arguments: &Value) -> Result<(), Error> {
    let mut calls = load();
    calls.push(line(name, arguments));
    while calls.iter().map(|call| call.len() + 1).sum::<usize>() > MAX_BYTES {
        calls.remove(0);
    }
    state::set(KEY, &calls.join("\n"))
}

fn load() -> Vec<String> {
    state::get(KEY).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// A call as one line: JSON text has no line breaks of its own.
fn line(name: &str, arguments: &Value) -> String {
    format!("{name} {arguments}")
}
