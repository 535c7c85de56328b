//! Idle policies: what becomes of KV while its session rests.
//!
//! A policy is asked three things of a resting session. Until when its KV is better kept than moved: the *soft deadline*.
//! What keeping it is worth beside others: the *price*, chance of a return times what the return would cost, for each
//! byte; under pressure the cheapest leaves first, whatever was said about deadlines (I9). And from when on a return is so
//! near that the KV should be brought back ahead of it.
//!
//! Pure logic: no clock, no pages, no threads. Times are seconds since the session began to rest.

mod baselines;
mod break_even;
mod declared;
mod durations;
mod tool_history;
mod watermarks;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub(super) use watermarks::Watermarks;

/// Why a session rests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum RestReason {
    /// A tool runs.
    ToolCall {
        /// The tool's name.
        tool: Arc<str>,
        /// How long the tool says a call takes, milliseconds.
        declared_ms: Option<u64>,
    },
    /// The turn is over: the next one is someone else's to begin.
    #[default]
    EndOfTurn,
}

impl RestReason {
    /// The word used in the API, the journal and the metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::ToolCall { .. } => "tool_call",
            Self::EndOfTurn => "end_of_turn",
        }
    }
}

/// What is known of a resting session.
#[derive(Clone, Debug)]
pub struct Resting<'a> {
    /// Why it rests.
    pub reason: &'a RestReason,
    /// Seconds since it began to.
    pub rested: f64,
    /// Bytes of the device that its leaving would free, or that its return would take.
    pub bytes: u64,
    /// Predicted seconds to bring it back: the smaller of loading and recomputing.
    pub restore_seconds: f64,
    /// Predicted seconds to write what of it is not saved.
    pub save_seconds: f64,
    /// Predicted seconds to move its KV one way.
    pub move_seconds: f64,
    /// Seconds of its soft TTL.
    pub ttl_seconds: f64,
    /// Whether a fork of it has gone on since: a newer state of the same work.
    pub superseded: bool,
}

/// Share of its price that a superseded state keeps: who went on is likelier to return than who was left behind.
const SUPERSEDED: f64 = 0.25;

impl Resting<'_> {
    /// Seconds that leaving now and coming back later would cost, for each byte that it would free.
    fn cost_per_byte(&self) -> f64 {
        // What frees nothing is never worth its eviction.
        (self.restore_seconds + self.save_seconds) / self.bytes as f64
    }

    /// The price of a session with this chance of a return.
    fn price(&self, chance: f64) -> f64 {
        let superseded = if self.superseded { SUPERSEDED } else { 1.0 };
        if self.bytes == 0 { f64::INFINITY } else { chance * superseded * self.cost_per_byte() }
    }

    /// Chance that a return is still near where nothing is known of it: certain until the soft deadline, then falling as
    /// the deadline over the time rested. So fall the chances of a heavy tail, in which who has been away for long will
    /// be away for longer.
    fn chance_after(&self, deadline: f64) -> f64 {
        if self.rested <= deadline { 1.0 } else { deadline / self.rested }
    }
}

/// Decides how long KV is kept while its session rests.
pub trait IdlePolicy: Send + fmt::Debug {
    /// Seconds of rest after which the KV is better moved than kept, where someone could use its pages.
    fn deadline(&self, resting: &Resting<'_>) -> f64;

    /// What keeping the KV on the device is worth, in seconds for each byte: the cheapest leaves first.
    fn price(&self, resting: &Resting<'_>) -> f64;

    /// Seconds of rest after which KV that left should be brought back ahead of a return; `None`: no return is foreseen.
    fn prefetch(&self, _resting: &Resting<'_>) -> Option<f64> {
        None
    }

    /// Learns that a session returned after so many seconds.
    fn returned(&mut self, _reason: &RestReason, _seconds: f64) {}

    /// Whether KV that leaves the device is saved; else it is dropped and recomputed.
    fn saves(&self) -> bool {
        true
    }
}

/// The policies there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdlePolicyName {
    /// Keeps for as long as moving the KV takes.
    BreakEven,
    /// Learns how long each tool takes; break-even for those it does not know yet.
    #[default]
    ToolHistory,
    /// Believes what tools declare.
    Declared,
    /// Keeps until the soft TTL.
    Fixed,
    /// Moves what was used longest ago: a baseline.
    Lru,
    /// As `lru`, but drops instead of moving: a baseline.
    Drop,
}

impl IdlePolicyName {
    /// Every policy.
    pub const ALL: [Self; 6] =
        [Self::BreakEven, Self::ToolHistory, Self::Declared, Self::Fixed, Self::Lru, Self::Drop];

    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BreakEven => "break_even",
            Self::ToolHistory => "tool_history",
            Self::Declared => "declared",
            Self::Fixed => "fixed",
            Self::Lru => "lru",
            Self::Drop => "drop",
        }
    }

    /// The policy, knowing nothing yet.
    pub fn policy(self) -> Box<dyn IdlePolicy> {
        match self {
            Self::BreakEven => Box::new(break_even::BreakEven),
            Self::ToolHistory => Box::new(tool_history::ToolHistory::default()),
            Self::Declared => Box::new(declared::Declared),
            Self::Fixed => Box::new(baselines::Fixed),
            Self::Lru => Box::new(baselines::Lru { saves: true }),
            Self::Drop => Box::new(baselines::Lru { saves: false }),
        }
    }
}

impl fmt::Display for IdlePolicyName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

impl FromStr for IdlePolicyName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|policy| policy.as_str() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::as_str).join(", ");
            format!("'{name}' is not an idle policy: use one of {names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A session of 1 MB that has rested for so long, in whose favour nothing else is known.
    pub(super) fn resting(reason: &RestReason, rested: f64) -> Resting<'_> {
        Resting {
            reason,
            rested,
            bytes: 1 << 20,
            restore_seconds: 2.0,
            save_seconds: 0.0,
            move_seconds: 0.5,
            ttl_seconds: 300.0,
            superseded: false,
        }
    }

    pub(super) fn tool(name: &str, declared_ms: Option<u64>) -> RestReason {
        RestReason::ToolCall { tool: name.into(), declared_ms }
    }

    #[test]
    fn names_are_read_back() {
        for name in IdlePolicyName::ALL {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        let refused = "mru".parse::<IdlePolicyName>().unwrap_err();
        assert!(refused.contains("'mru'") && refused.contains("break_even, tool_history"), "{refused}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// What is kept is priced finitely, so that pressure can always take it, and never gains by resting on.
        #[test]
        fn i9_a_price_is_finite_and_positive(
            rested in 0.0..1e6_f64,
            bytes in 1_u64..1 << 40,
            seconds in prop::array::uniform4(0.0..1e3_f64),
            superseded: bool,
            declared in proptest::option::of(0_u64..1_000_000),
            past in prop::collection::vec(1e-4..1e5_f64, 0..40),
        ) {
            let reason = tool("t", declared);
            let [restore_seconds, save_seconds, move_seconds, ttl_seconds] = seconds;
            let resting = Resting {
                reason: &reason, rested, bytes, restore_seconds: restore_seconds + 1e-6, save_seconds, move_seconds,
                ttl_seconds, superseded,
            };
            for name in IdlePolicyName::ALL {
                let mut policy = name.policy();
                for seconds in &past {
                    policy.returned(&reason, *seconds);
                }
                let price = policy.price(&resting);
                prop_assert!(price.is_finite() && price >= 0.0, "{name}: {price}");
                prop_assert!(policy.deadline(&resting) >= 0.0, "{name}");
                prop_assert!(policy.prefetch(&resting).is_none_or(|at| at.is_finite() && at >= 0.0), "{name}");
            }
        }

        /// The policies that know nothing of the tool: the longer the rest, the lower the price.
        #[test]
        fn a_price_decays(first in 0.0..1e5_f64, more in 0.0..1e5_f64) {
            let reason = tool("t", None);
            for name in [IdlePolicyName::BreakEven, IdlePolicyName::Declared, IdlePolicyName::Fixed, IdlePolicyName::Lru] {
                let policy = name.policy();
                let (before, after) = (resting(&reason, first), resting(&reason, first + more));
                prop_assert!(policy.price(&after) <= policy.price(&before), "{name}");
            }
        }
    }

    #[test]
    fn a_newer_state_lowers_the_price_of_the_older() {
        let reason = RestReason::EndOfTurn;
        for name in [IdlePolicyName::BreakEven, IdlePolicyName::ToolHistory, IdlePolicyName::Declared] {
            let policy = name.policy();
            let newer = resting(&reason, 3.0);
            let older = Resting { superseded: true, ..newer.clone() };
            assert_eq!(policy.price(&older), policy.price(&newer) * SUPERSEDED, "{name}");
        }
    }

    #[test]
    fn what_frees_nothing_leaves_last() {
        let reason = RestReason::EndOfTurn;
        for name in [IdlePolicyName::BreakEven, IdlePolicyName::ToolHistory, IdlePolicyName::Declared] {
            let shared = Resting { bytes: 0, ..resting(&reason, 1e6) };
            assert_eq!(name.policy().price(&shared), f64::INFINITY, "{name}");
        }
    }
}
