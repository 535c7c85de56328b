//! Prompt lookup: agents repeat what stands in their history, so the tokens that followed an earlier place that ends
//! alike are guessed to come next. A step computes the guess's rows with the last token's; sampling then goes row by row
//! as without a guess, and what follows the first wrong token is dropped. Rows do not depend on each other's company
//! (I1), so the tokens are those of decoding one by one. (Yang et al., "Inference with Reference", 2023, section 3.)

use std::str::FromStr;

/// Tokens that have to be alike.
const ALIKE: usize = 3;
/// Tokens guessed at most: as many rows as a weight is read once for.
const GUESS: usize = 3;
/// How far back an earlier place is looked for.
const REACH: usize = 16_384;
/// Guesses before their times are believed.
const TRIALS: u32 = 6;
/// Guesses passed over before one is tried again although they did not pay.
const PATIENCE: u32 = 64;
/// Weight of a new sample in the averages.
const WEIGHT: f64 = 0.1;

/// When to guess.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculation {
    /// Where it is measured to be faster.
    #[default]
    Auto,
    /// Whenever there is a guess.
    Always,
    /// Never.
    Off,
}

impl Speculation {
    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Always => "always",
            Self::Off => "off",
        }
    }
}

impl FromStr for Speculation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "always" => Ok(Self::Always),
            "off" => Ok(Self::Off),
            other => Err(format!("'{other}' is not a way to speculate: use auto, always or off")),
        }
    }
}

/// The tokens that followed the latest earlier place that ends as `history` does; none without one.
pub(super) fn guess(history: &[u32]) -> &[u32] {
    let Some(end) = history.len().checked_sub(ALIKE) else { return &[] };
    let alike = &history[end..];
    let from = end.saturating_sub(REACH);
    let found = (from..end).rev().find(|at| &history[*at..*at + ALIKE] == alike);
    found.map_or(&[], |at| &history[at + ALIKE..(at + ALIKE + GUESS).min(history.len())])
}

/// Whether guesses pay: seconds of steps with and without one, and what those with one gave.
#[derive(Debug, Default)]
pub(super) struct Gain {
    single: Option<f64>,
    guessed: Option<f64>,
    /// Tokens of a guessing step, on average.
    tokens: f64,
    trials: u32,
    passed_over: u32,
    /// Tokens guessed, and those that were right, since the start.
    pub totals: [u64; 2],
}

fn average(old: Option<f64>, new: f64) -> f64 {
    old.map_or(new, |old| old + WEIGHT * (new - old))
}

impl Gain {
    /// Whether the next guess is worth a try.
    pub(super) fn wanted(&mut self, speculation: Speculation) -> bool {
        match speculation {
            Speculation::Off => return false,
            Speculation::Always => return true,
            Speculation::Auto => {}
        }
        let (Some(single), Some(guessed)) = (self.single, self.guessed) else {
            // The time of a step without a guess has to be known first.
            return self.single.is_some();
        };
        if self.trials < TRIALS || self.tokens / guessed > 1.0 / single || self.passed_over >= PATIENCE {
            self.passed_over = 0;
            return true;
        }
        self.passed_over += 1;
        false
    }

    /// Learns from a step of one row.
    pub(super) fn single(&mut self, seconds: f64) {
        self.single = Some(average(self.single, seconds));
    }

    /// Learns from a step with a guess of `guess` tokens that gave `tokens` tokens.
    pub(super) fn guessed(&mut self, seconds: f64, guess: usize, tokens: usize) {
        self.tokens =
            if self.trials == 0 { tokens as f64 } else { average(Some(self.tokens), tokens as f64) };
        self.guessed = Some(average(self.guessed, seconds));
        self.trials = self.trials.saturating_add(1);
        self.totals[0] += guess as u64;
        self.totals[1] += tokens.saturating_sub(1) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_earlier_place_is_continued() {
        assert_eq!(guess(&[1, 2, 3, 4, 5, 1, 2, 3]), [4, 5, 1]);
        assert_eq!(guess(&[1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]), [8, 1, 2], "the later of two");
        assert_eq!(guess(&[7, 7, 7, 7]), [7], "what follows may be the end itself");
        assert!(guess(&[1, 2, 3, 4]).is_empty() && guess(&[1, 2]).is_empty() && guess(&[]).is_empty());
    }

    #[test]
    fn guesses_stop_where_they_do_not_pay_and_are_tried_again() {
        let mut gain = Gain::default();
        assert!(!gain.wanted(Speculation::Auto), "nothing is known");
        assert!(gain.wanted(Speculation::Always) && !gain.wanted(Speculation::Off));
        gain.single(1.0);
        for trial in 0..TRIALS {
            assert!(gain.wanted(Speculation::Auto));
            // Twice the time for one token and a half.
            gain.guessed(2.0, 3, 1 + trial as usize % 2);
        }
        let refused = (0..PATIENCE).filter(|_| !gain.wanted(Speculation::Auto)).count();
        assert_eq!(refused, PATIENCE as usize);
        assert!(gain.wanted(Speculation::Auto), "patience ends");
        for _ in 0..60 {
            // Now three tokens in twice the time.
            gain.guessed(2.0, 3, 3);
        }
        assert!((0..200).all(|_| gain.wanted(Speculation::Auto)));
        assert_eq!(gain.totals, [3 * (6 + 60), 3 + 120]);
    }
}
