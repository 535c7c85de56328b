//! Agents that call tools: what each turn is given and writes, and how long the tool after it takes.
//!
//! Calculations and look-ups are back at once, sandboxes and searches take a moment, generators of media and people take long.
//! Each kind is a lognormal of its own, so that their mixture has a heavy tail over several decades. The medians are chosen,
//! not measured. How long pauses are beside the model's own work decides how busy the device is, and that differs from machine to
//! machine: the durations are scaled together, to a chosen load.

use std::sync::Arc;
use std::time::Duration;

use crate::scheduler::RestReason;

/// A kind of tool.
struct Tool {
    name: &'static str,
    /// Median seconds of a call, before scaling.
    median: f64,
    /// Standard deviation of the logarithm.
    spread: f64,
    /// Its share of the calls.
    share: f64,
}

const TOOLS: [Tool; 6] = [
    Tool { name: "calculate", median: 0.02, spread: 0.5, share: 0.2 },
    Tool { name: "run_in_sandbox", median: 0.1, spread: 0.6, share: 0.2 },
    Tool { name: "look_up", median: 0.7, spread: 0.4, share: 0.25 },
    Tool { name: "speak", median: 16.0, spread: 0.4, share: 0.1 },
    Tool { name: "draw", median: 19.0, spread: 0.4, share: 0.1 },
    Tool { name: "ask_a_person", median: 25.0, spread: 0.9, share: 0.15 },
];

/// Mean seconds of a call before scaling: a lognormal's mean is `median * exp(spread^2 / 2)`.
fn mean_pause() -> f64 {
    TOOLS.iter().map(|tool| tool.share * tool.median * (tool.spread * tool.spread / 2.0).exp()).sum()
}

/// Share of the calls that take longer than the mean.
fn long_share() -> f64 {
    TOOLS.iter().filter(|tool| tool.median > mean_pause()).map(|tool| tool.share).sum()
}

/// One message of a session, and the pause after it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Turn {
    /// Tokens given.
    pub input: usize,
    /// Tokens written.
    pub output: usize,
    /// The tool that is called then.
    pub reason: RestReason,
    /// How long it takes.
    pub pause: Duration,
}

/// A session's life.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Script {
    /// Its id.
    pub id: Arc<str>,
    /// Tokens it begins with.
    pub history: usize,
    /// When its first turn begins.
    pub start: Duration,
    /// Its turns.
    pub turns: Vec<Turn>,
}

impl Script {
    /// Tokens it ends with.
    pub(super) fn tokens(&self) -> usize {
        self.history + self.turns.iter().map(|turn| turn.input + turn.output).sum::<usize>()
    }
}

/// How agents are drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agents {
    /// How many.
    pub sessions: usize,
    /// Turns of each.
    pub turns: usize,
    /// Range of the tokens they begin with.
    pub history: (usize, usize),
    /// Range of the tokens a turn is given.
    pub input: (usize, usize),
    /// Range of the tokens a turn writes.
    pub output: (usize, usize),
    /// Mean seconds of a pause.
    pub pause: f64,
    /// Key of the draws.
    pub seed: u64,
}

impl Agents {
    /// Draws them.
    pub(super) fn scripts(&self) -> Vec<Script> {
        let scale = self.pause / mean_pause();
        (0..self.sessions)
            .map(|index| {
                let mut random = Random(self.seed ^ (index as u64).wrapping_mul(0xa076_1d64_78bd_642f));
                let turns = (0..self.turns).map(|_| self.turn(scale, &mut random)).collect();
                // They begin as if they had been at it for long: most of them in the middle of a long pause, after which a few
                // turns with short ones follow.
                let between_bursts = self.pause / long_share();
                let start = Duration::from_secs_f64(between_bursts * random.unit());
                let history = random.within(self.history);
                Script { id: format!("agent-{index}").into(), history, start, turns }
            })
            .collect()
    }

    fn turn(&self, scale: f64, random: &mut Random) -> Turn {
        let mut left = random.unit();
        let drawn = TOOLS.iter().find(|tool| {
            left -= tool.share;
            left < 0.0
        });
        let tool = drawn.unwrap_or(&TOOLS[0]);
        let seconds = scale * tool.median * (tool.spread * random.normal()).exp();
        // A tool declares what it usually takes, not what this call will.
        let declared_ms = Some((scale * tool.median * 1e3) as u64);
        Turn {
            input: random.within(self.input),
            output: random.within(self.output),
            reason: RestReason::ToolCall { tool: tool.name.into(), declared_ms },
            pause: Duration::from_secs_f64(seconds),
        }
    }
}

/// A generator of its own (SplitMix64), so that a seed gives the same draws for ever.
pub(super) struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// From 0 up to 1, without 1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// From the first to the last of a range.
    pub(super) fn within(&mut self, (first, last): (usize, usize)) -> usize {
        first + (self.unit() * (last - first + 1) as f64) as usize
    }

    /// From the standard normal distribution (Box and Muller).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn agents(seed: u64) -> Agents {
        let (history, input, output) = ((100, 300), (8, 32), (4, 16));
        Agents { sessions: 400, turns: 10, history, input, output, pause: 30.0, seed }
    }

    #[test]
    fn a_seed_gives_its_draws() {
        assert_eq!(agents(7).scripts(), agents(7).scripts());
        assert_ne!(agents(7).scripts(), agents(8).scripts());
    }

    #[test]
    fn pauses_have_the_mean_asked_for_and_a_heavy_tail() {
        let scripts = agents(1).scripts();
        let mut pauses: Vec<f64> = scripts
            .iter()
            .flat_map(|script| script.turns.iter().map(|turn| turn.pause.as_secs_f64()))
            .collect();
        let mean = pauses.iter().sum::<f64>() / pauses.len() as f64;
        assert!((mean / 30.0 - 1.0).abs() < 0.1, "{mean}");
        pauses.sort_by(f64::total_cmp);
        let at = |share: f64| pauses[(share * pauses.len() as f64) as usize];
        assert!(at(0.5) < mean / 5.0 && at(0.99) > 4.0 * mean, "{} {}", at(0.5), at(0.99));
    }

    #[test]
    fn sizes_stay_in_their_ranges() {
        for script in agents(2).scripts() {
            assert!((100..=300).contains(&script.history));
            assert!(script.turns.iter().all(|turn| (8..=32).contains(&turn.input)));
            assert!(script.turns.iter().all(|turn| (4..=16).contains(&turn.output)));
            let written: usize = script.turns.iter().map(|turn| turn.output + turn.input).sum();
            assert_eq!(script.tokens(), script.history + written);
        }
    }
}
