//! The tool `wait`: passes time in short steps and reports how far it is. It stands for whatever is slow in an
//! agent's world: an approval, a build, a delivery.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

use tools_sdk::prelude::*;

/// Longest wait of one call, in seconds.
pub const MAX_SECONDS: f64 = 86_400.0;
/// Milliseconds between two reports.
const STEP_MS: u64 = 500;

/// How long, and what for.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct Input {
    /// Seconds to wait.
    #[schemars(range(min = 0, max = 86_400))]
    pub seconds: f64,
    /// What is waited for, in a few words.
    #[serde(default)]
    pub reason: String,
}

/// What was waited for, and how long.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Output {
    /// Seconds that passed.
    pub waited_seconds: f64,
    /// What was waited for.
    pub reason: String,
}

/// Pauses for a number of seconds, only if the user asks to wait.
#[tool(effect = "idempotent", text = reading, expected_seconds_of = "seconds")]
pub fn wait(input: Input, context: &Context) -> Result<Output, ToolError> {
    if !(0.0..=MAX_SECONDS).contains(&input.seconds) {
        let message = format!("{} seconds: a wait is from 0 to {MAX_SECONDS} seconds", input.seconds);
        return Err(ToolError::invalid_input("seconds_out_of_range", message));
    }
    // In range as checked above, so the conversion neither saturates nor loses a sign.
    let total = (input.seconds * 1_000.0).round() as u64;
    if total > context.deadline_ms && context.deadline_ms > 0 {
        let message = format!("{total} ms are more than the {} ms this call may take", context.deadline_ms);
        return Err(ToolError::limit("deadline", message));
    }
    let mut done = 0;
    progress::report(done, total, &input.reason);
    while done < total {
        let step = STEP_MS.min(total - done);
        clock::sleep_ms(step)?;
        done += step;
        progress::report(done, total, &input.reason);
    }
    Ok(Output { waited_seconds: total as f64 / 1_000.0, reason: input.reason })
}

fn reading(output: &Output) -> String {
    let seconds = output.waited_seconds;
    if output.reason.is_empty() {
        format!("Waited {seconds} seconds.")
    } else {
        format!("Waited {seconds} seconds: {}", output.reason)
    }
}

#[cfg(test)]
mod tests {
    use tools_sdk::testing::Host;

    #[test]
    fn passes_the_time_in_steps_and_reports_each() {
        let host = Host::new();
        let output = host.call::<super::wait>(r#"{"seconds": 1.2, "reason": "approval"}"#).unwrap();
        assert_eq!(output.text, "Waited 1.2 seconds: approval");
        assert_eq!(output.json, r#"{"waited_seconds":1.2,"reason":"approval"}"#);
        assert_eq!(host.now_ms(), 1_200);
        let done: Vec<u64> = host.progress().iter().map(|(done, total, _)| (*done, *total).0).collect();
        assert_eq!(done, [0, 500, 1_000, 1_200]);
        assert_eq!(host.call::<super::wait>(r#"{"seconds": 0}"#).unwrap().text, "Waited 0 seconds.");
    }

    #[test]
    fn refuses_what_it_cannot_wait_for() {
        for (input, code) in [
            (r#"{"seconds": -1, "reason": "x"}"#, "seconds_out_of_range"),
            (r#"{"seconds": 1e9, "reason": "x"}"#, "seconds_out_of_range"),
            (r#"{"seconds": "5", "reason": "x"}"#, "input_mismatch"),
        ] {
            assert_eq!(Host::new().call::<super::wait>(input).unwrap_err().code, code);
        }
        let host = Host::new().deadline_ms(1_000);
        let error = host.call::<super::wait>(r#"{"seconds": 2, "reason": "x"}"#).unwrap_err();
        assert_eq!((error.code.as_str(), host.now_ms()), ("deadline", 0));
    }
}
