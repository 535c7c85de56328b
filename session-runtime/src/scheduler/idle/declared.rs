//! Believes what tools declare: a call is expected back when its tool says so. Without a declaration, break-even.

use super::break_even::BreakEven;
use super::{IdlePolicy, RestReason, Resting};

/// A declaration is believed until this many times the declared duration.
const BELIEVED: f64 = 2.0;
/// KV is back this share of the declared duration before the return, because calls end early too.
const EARLY: f64 = 0.2;

#[derive(Debug)]
pub(super) struct Declared;

/// Seconds the tool says its call takes.
fn declared(resting: &Resting<'_>) -> Option<f64> {
    match resting.reason {
        RestReason::ToolCall { declared_ms: Some(ms), .. } => Some(*ms as f64 / 1e3),
        _ => None,
    }
}

impl IdlePolicy for Declared {
    /// A call that ends before its KV would have gone and come is waited for; another one is not worth its pages.
    fn deadline(&self, resting: &Resting<'_>) -> f64 {
        match declared(resting) {
            Some(seconds) if seconds <= resting.move_seconds + resting.restore_seconds => seconds * BELIEVED,
            Some(_) => 0.0,
            None => BreakEven.deadline(resting),
        }
    }

    /// The chance that the return falls into the next moments: those that going and coming would take.
    fn price(&self, resting: &Resting<'_>) -> f64 {
        let Some(seconds) = declared(resting) else { return BreakEven.price(resting) };
        let late = seconds * BELIEVED;
        if resting.rested > late {
            // The tool was wrong about this call, so nothing is known of it.
            return resting.price(resting.chance_after(late.max(resting.move_seconds)).min(0.5));
        }
        let left = (seconds - resting.rested).max(0.0);
        let moments = resting.move_seconds + resting.restore_seconds;
        resting.price(if left <= moments { 1.0 } else { moments / left })
    }

    fn prefetch(&self, resting: &Resting<'_>) -> Option<f64> {
        let seconds = declared(resting)?;
        (resting.rested <= seconds * BELIEVED)
            .then(|| (seconds * (1.0 - EARLY) - resting.restore_seconds).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{resting, tool};
    use super::*;

    #[test]
    fn a_return_is_prepared_when_the_declared_time_is_near() {
        let reason = tool("build", Some(30_000));
        // Restoring takes two seconds.
        assert_eq!(Declared.prefetch(&resting(&reason, 1.0)), Some(22.0));
        assert_eq!(Declared.prefetch(&resting(&reason, 61.0)), None, "the declaration was wrong");
        assert_eq!(Declared.prefetch(&resting(&tool("build", None), 1.0)), None);
    }

    #[test]
    fn the_price_rises_towards_the_return() {
        let reason = tool("build", Some(30_000));
        let price = |rested| Declared.price(&resting(&reason, rested));
        assert!(price(0.0) < price(20.0) && price(20.0) < price(28.0));
        assert_eq!(price(28.0), price(59.0), "late, but still believed");
        assert!(price(70.0) < price(59.0) && price(1000.0) < price(70.0));
    }

    #[test]
    fn a_short_call_is_waited_for_and_a_long_one_is_not() {
        assert_eq!(Declared.deadline(&resting(&tool("read", Some(1000)), 0.0)), 2.0);
        assert_eq!(Declared.deadline(&resting(&tool("build", Some(30_000)), 0.0)), 0.0);
        assert_eq!(Declared.deadline(&resting(&tool("?", None), 0.0)), 0.5);
    }
}
