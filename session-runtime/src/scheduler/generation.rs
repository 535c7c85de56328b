//! A message being written: which token comes next, what of it can be shown, and when it ends.

use std::sync::Arc;

use super::lookup;
use super::view::Finish;
use crate::engine::sampler::{PENALTY_WINDOW, SamplingParams, sample};
use crate::error::Error;
use crate::models::constraint::Constraint;
use crate::models::tokenizer::{StreamDecoder, Tokenizer};

/// What a session asks of the scheduler for one message. The default is greedy, and over before its first token.
#[derive(Default)]
pub struct GenerationRequest {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most sampled tokens, those of an interrupted attempt included.
    pub max_tokens: usize,
    /// Texts that end the message.
    pub stop: Vec<String>,
    /// What the text must match.
    pub constraint: Option<Constraint>,
    /// Tokens of this message that were sampled before an interruption; they stand at the end of the
    /// session's history already.
    pub sampled: Vec<u32>,
    /// The model's tokenizer; without one, tokens show no text and none of them ends the message.
    pub tokenizer: Option<Arc<Tokenizer>>,
}

/// What one sampled token led to.
#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    /// The token belongs to the message; text may be shown.
    Token { id: u32, text: String },
    /// The token belongs to the message and ends it.
    Last { id: u32, text: String, finish: Finish },
    /// The message ended before this token.
    End { text: String, finish: Finish },
}

/// Where the tokens of a message come from.
pub(super) trait TokenSource: Send {
    /// Whether the message is over before a further token.
    fn over(&mut self) -> Option<Finish>;
    /// Text that was held back, once the message is over.
    fn rest(&mut self) -> String;
    /// Chooses the next token from the logits after `history`.
    fn next(&mut self, logits: &mut [f32], history: &[u32]) -> Result<Outcome, Error>;
    /// Tokens that may follow `history`; each is worth a row of the next step.
    fn guess(&mut self, history: &[u32]) -> Vec<u32>;
}

/// State of a message between two tokens.
pub(super) struct Generation {
    sampling: SamplingParams,
    left: usize,
    stop: Vec<String>,
    constraint: Option<Constraint>,
    decoder: StreamDecoder,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Text decoded but not shown yet, because a stop text may begin in it.
    held: String,
}

impl Generation {
    /// Begins or resumes a message.
    pub(super) fn new(request: GenerationRequest) -> Result<Self, Error> {
        let mut generation = Self {
            sampling: request.sampling,
            left: request.max_tokens.saturating_sub(request.sampled.len()),
            stop: request.stop,
            constraint: request.constraint,
            decoder: StreamDecoder::new(),
            tokenizer: request.tokenizer,
            held: String::new(),
        };
        for id in &request.sampled {
            generation.take(*id)?;
        }
        Ok(generation)
    }

    /// Takes a token into the message; the text that can be shown, and whether a stop text appeared.
    fn take(&mut self, id: u32) -> Result<(String, bool), Error> {
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(id)?;
        }
        if let Some(tokenizer) = &self.tokenizer
            && let Some(text) = self.decoder.push(tokenizer, id)
        {
            self.held.push_str(&text);
        }
        let found = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = found {
            self.held.truncate(at);
            return Ok((std::mem::take(&mut self.held), true));
        }
        let keep = self.stop.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let shown = self.held.len() - keep;
        Ok((self.held.drain(..shown).collect(), false))
    }
}

impl TokenSource for Generation {
    fn over(&mut self) -> Option<Finish> {
        if self.left == 0 {
            return Some(Finish::MaxTokens);
        }
        self.constraint
            .as_mut()
            .is_some_and(|constraint| constraint.is_complete())
            .then_some(Finish::ConstraintComplete)
    }

    fn rest(&mut self) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.extend(self.decoder.finish());
        text
    }

    fn next(&mut self, logits: &mut [f32], history: &[u32]) -> Result<Outcome, Error> {
        let mask = match &mut self.constraint {
            Some(constraint) => Some(constraint.allowed()?),
            None => None,
        };
        let recent = &history[history.len().saturating_sub(PENALTY_WINDOW)..];
        let position = history.len() as u64;
        let Some(id) = sample(logits, &self.sampling, recent, mask.as_ref(), position) else {
            return Ok(Outcome::End { text: self.rest(), finish: Finish::ConstraintComplete });
        };
        if self.tokenizer.as_ref().is_some_and(|tokenizer| tokenizer.is_end_of_turn(id)) {
            let finish =
                if self.constraint.is_some() { Finish::ConstraintComplete } else { Finish::EndOfTurn };
            return Ok(Outcome::End { text: self.rest(), finish });
        }
        self.left -= 1;
        let (text, stopped) = self.take(id)?;
        if stopped {
            return Ok(Outcome::Last { id, text, finish: Finish::StopString });
        }
        match self.over() {
            Some(finish) => Ok(Outcome::Last { id, text: text + &self.rest(), finish }),
            None => Ok(Outcome::Token { id, text }),
        }
    }

    fn guess(&mut self, history: &[u32]) -> Vec<u32> {
        lookup::guess(history).to_vec()
    }
}

/// Length of the longest end of `text` that begins `stop` and is shorter than it.
fn overlap(text: &str, stop: &str) -> usize {
    (1..stop.len())
        .rev()
        .find(|length| stop.is_char_boundary(*length) && text.ends_with(&stop[..*length]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn text_that_may_begin_a_stop_text_is_held_back() {
        assert_eq!(overlap("answer\nUse", "\nUser:"), 4);
        assert_eq!(overlap("answer", "\nUser:"), 0);
        assert_eq!(overlap("\nUser:", "\nUser:"), 0, "a whole stop text is found, not held");
        assert_eq!(overlap("é", "éa"), 2);
    }
}
