//! Turns what stopped a guest into a typed failure, and cleans the text a guest gives. The one place that
//! knows the codes.

use wasmtime::{PoolConcurrencyLimitError, Trap};

use super::limits::Stop;
use crate::error::{Error, ErrorKind};
use crate::session::tool::ToolFailure;

/// Most bytes of an error text a guest gives.
pub(super) const MESSAGE_BYTES: usize = 4096;

/// A failure of a tool.
pub(super) fn tool_failure(kind: &str, code: &str, message: impl Into<String>) -> ToolFailure {
    ToolFailure {
        kind: kind.to_owned(),
        code: code.to_owned(),
        message: message.into(),
        retryable: kind == "unavailable",
    }
}

/// `text` without control characters (line ends and tabs stay), cut to `most` bytes at a character.
pub(super) fn scrub(text: &str, most: usize) -> String {
    let mut clean = String::with_capacity(text.len().min(most));
    for c in text.chars() {
        let c = match c {
            '\n' | '\t' => c,
            c if c.is_control() || is_direction(c) => '\u{fffd}',
            c => c,
        };
        if clean.len() + c.len_utf8() > most {
            break;
        }
        clean.push(c);
    }
    clean
}

// Characters that reorder the text around them can make a log line read as another one.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A guest's own error code: `[a-z0-9_]`, dashes made underscores, or `failed`.
pub(super) fn guest_code(code: &str) -> String {
    let code = code.replace('-', "_");
    let fits = !code.is_empty()
        && code.len() <= 64
        && code.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    if fits { code } else { "failed".to_owned() }
}

struct Cause {
    kind: ErrorKind,
    /// Kind in the words of the tool world.
    word: &'static str,
    tool: &'static str,
    agent: &'static str,
    message: String,
}

fn cause(error: &wasmtime::Error) -> Cause {
    use ErrorKind::{Conflict, Internal, Limit, Unavailable};
    let of = |kind, word, tool, agent, message: String| Cause { kind, word, tool, agent, message };
    if let Some(stop) = error.downcast_ref::<Stop>() {
        let message = stop.to_string();
        return match stop {
            Stop::Memory(_) => of(Limit, "limit", "memory_limit", "agent_memory_limit", message),
            Stop::Tables(_) => of(Limit, "limit", "table_limit", "agent_table_limit", message),
            Stop::Cpu(_) => of(Limit, "limit", "cpu_limit", "agent_deadline", message),
            Stop::HostCalls(_) => of(Limit, "limit", "host_call_limit", "agent_host_call_limit", message),
            Stop::Cancelled => of(Conflict, "cancelled", "cancelled", "cancelled", message),
            Stop::Host(_) => of(Internal, "failed", "host", "internal", message),
        };
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::StackOverflow) => {
            let message = "its call stack is exhausted".to_owned();
            return of(Limit, "limit", "stack_overflow", "agent_stack_overflow", message);
        }
        Some(trap) => {
            let message = format!("it crashed: {trap}");
            return of(Internal, "failed", "trap", "agent_trap", message);
        }
        None => {}
    }
    if error.is::<PoolConcurrencyLimitError>() {
        let message = "every place for guests is taken; try again".to_owned();
        return of(Unavailable, "unavailable", "busy", "agent_busy", message);
    }
    let root = error.root_cause().to_string();
    // The type of this error is not public; its text is the only mark.
    if root.contains("fuel allocated for hostcalls") {
        let message = "it handed over too much data at once".to_owned();
        return of(Limit, "limit", "output_too_large", "agent_output_too_large", message);
    }
    of(Internal, "failed", "trap", "agent_trap", format!("it was stopped: {}", scrub(&root, 500)))
}

/// What stopped a tool's component.
pub(super) fn of_tool(tool: &str, error: &wasmtime::Error) -> ToolFailure {
    let cause = cause(error);
    tool_failure(cause.word, cause.tool, format!("tool '{tool}' was stopped: {}", cause.message))
}

/// What stopped an agent's component. An error of the host itself comes back unchanged.
pub(super) fn of_agent(agent: &str, error: &wasmtime::Error) -> Error {
    if let Some(Stop::Host(host)) = error.downcast_ref::<Stop>() {
        return host.clone();
    }
    let cause = cause(error);
    Error::new(cause.kind, cause.agent, format!("agent '{agent}' was stopped: {}", cause.message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_guests_is_cut_at_a_character_and_scrubbed() {
        assert_eq!(scrub("a\u{1b}[31mb\0c\r\n", 100), "a\u{fffd}[31mb\u{fffd}c\u{fffd}\n");
        assert_eq!(scrub("abc\u{202e}def", 100), "abc\u{fffd}def");
        assert_eq!(scrub("ééé", 3), "é");
    }

    #[test]
    fn codes_of_guests_are_words() {
        assert_eq!(guest_code("division-by-zero"), "division_by_zero");
        assert_eq!(guest_code("Nice try: \u{1b}"), "failed");
        assert_eq!(guest_code(""), "failed");
    }

    #[test]
    fn errors_of_the_host_keep_their_code() {
        let host = Error::not_found("something", "x");
        let error = of_agent("a", &wasmtime::Error::new(Stop::Host(host)));
        assert_eq!(error.code, "something");
    }
}
