//! Learns how long each tool takes, and the users between turns: of a session that has rested for some time, how likely
//! its return within the next moments is.

use std::collections::HashMap;
use std::sync::Arc;

use super::break_even::BreakEven;
use super::durations::Durations;
use super::{IdlePolicy, RestReason, Resting};

/// Durations after which a tool is known.
const KNOWN: f64 = 4.0;
/// Tools that are told apart; further ones are one.
const TOOLS: usize = 1024;
/// A return is foreseen where so many of the tool's calls end within `SPREAD` times of each other.
const SPREAD: f64 = 4.0;
/// The share of calls that may have returned before their KV is back.
const EARLY: f64 = 0.1;

#[derive(Debug, Default)]
pub(super) struct ToolHistory {
    tools: HashMap<Arc<str>, Durations>,
    other_tools: Durations,
    between_turns: Durations,
}

impl ToolHistory {
    fn durations(&self, reason: &RestReason) -> &Durations {
        match reason {
            RestReason::ToolCall { tool, .. } => self.tools.get(tool).unwrap_or(&self.other_tools),
            RestReason::EndOfTurn => &self.between_turns,
        }
    }

    /// The history that says something of this rest.
    fn known(&self, resting: &Resting<'_>) -> Option<&Durations> {
        Some(self.durations(resting.reason)).filter(|durations| durations.weight() >= KNOWN)
    }
}

/// The next moments: those that going and coming would take.
fn moments(resting: &Resting<'_>) -> f64 {
    (resting.move_seconds + resting.restore_seconds).max(1e-3)
}

impl IdlePolicy for ToolHistory {
    /// As long as a return within the next moments is likelier than not.
    fn deadline(&self, resting: &Resting<'_>) -> f64 {
        let Some(durations) = self.known(resting) else { return BreakEven.deadline(resting) };
        if durations.ends_within(0.0, moments(resting), resting.move_seconds) >= 0.5 {
            durations.quantile(0.9).max(resting.move_seconds)
        } else {
            0.0
        }
    }

    fn price(&self, resting: &Resting<'_>) -> f64 {
        let Some(durations) = self.known(resting) else { return BreakEven.price(resting) };
        let chance = durations.ends_within(resting.rested, moments(resting), moments(resting));
        resting.price(chance)
    }

    fn prefetch(&self, resting: &Resting<'_>) -> Option<f64> {
        let durations = self.known(resting)?;
        let (early, late) = (durations.quantile(EARLY), durations.quantile(0.9));
        let foreseen = late <= early * SPREAD + moments(resting) && resting.rested <= late;
        foreseen.then(|| (early - resting.restore_seconds).max(0.0))
    }

    fn returned(&mut self, reason: &RestReason, seconds: f64) {
        match reason {
            RestReason::EndOfTurn => self.between_turns.observe(seconds),
            RestReason::ToolCall { tool, .. } => {
                let told_apart = self.tools.contains_key(tool) || self.tools.len() < TOOLS;
                let durations = match told_apart {
                    true => self.tools.entry(Arc::clone(tool)).or_default(),
                    false => &mut self.other_tools,
                };
                durations.observe(seconds);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{resting, tool};
    use super::*;

    fn taught(lessons: &[(&str, f64)]) -> ToolHistory {
        let mut history = ToolHistory::default();
        for _ in 0..20 {
            lessons.iter().for_each(|(name, seconds)| history.returned(&tool(name, None), *seconds));
        }
        history
    }

    #[test]
    fn an_unknown_tool_is_treated_by_break_even() {
        let (history, reason) = (taught(&[("known", 1.0)]), tool("unknown", None));
        for rested in [0.0, 1.0, 7.0] {
            let resting = resting(&reason, rested);
            assert_eq!(history.price(&resting), BreakEven.price(&resting));
            assert_eq!(history.deadline(&resting), BreakEven.deadline(&resting));
        }
    }

    #[test]
    fn who_waits_for_a_slow_tool_leaves_before_who_waits_for_a_quick_one() {
        let history = taught(&[("read", 0.4), ("build", 90.0)]);
        let (read, build) = (tool("read", None), tool("build", None));
        let price = |reason, rested| history.price(&resting(reason, rested));
        assert!(price(&read, 0.2) > 10.0 * price(&build, 0.2));
        assert!(price(&build, 88.0) > 10.0 * price(&build, 20.0), "its return is near");
        assert!(history.deadline(&resting(&read, 0.0)) >= 0.4);
        assert_eq!(history.deadline(&resting(&build, 0.0)), 0.0);
    }

    #[test]
    fn a_regular_tool_is_prefetched_and_an_irregular_one_is_not() {
        let history = taught(&[("build", 90.0), ("search", 5.0), ("search", 300.0)]);
        let at = history.prefetch(&resting(&tool("build", None), 1.0)).unwrap();
        // Restoring takes two seconds, and a bucket is a fifth wide.
        assert!((70.0..88.0).contains(&at), "{at}");
        assert_eq!(history.prefetch(&resting(&tool("search", None), 1.0)), None);
        assert_eq!(history.prefetch(&resting(&tool("build", None), 200.0)), None, "it should have been back");
    }

    #[test]
    fn i8_tools_that_are_told_apart_are_bounded() {
        let mut history = ToolHistory::default();
        for index in 0..2 * TOOLS {
            history.returned(&tool(&format!("tool-{index}"), None), 2.0);
        }
        assert_eq!(history.tools.len(), TOOLS);
        assert!(history.known(&resting(&tool("tool-9999", None), 0.0)).is_some(), "the others are one");
    }
}
