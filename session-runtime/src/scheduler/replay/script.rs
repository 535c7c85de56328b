//! A message whose tokens a trace has.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc::UnboundedReceiver;

use crate::error::Error;
use crate::scheduler::generation::{Outcome, TokenSource};
use crate::scheduler::trace::Taken;
use crate::scheduler::{Finish, GenerationEvent};

/// A token that follows nothing: pseudonyms are smaller.
const WRONG: u32 = u32::MAX;

#[derive(Default)]
struct State {
    tokens: VecDeque<Taken>,
    /// Tokens that are guessed next, and how many of them are right.
    guess: Option<(u32, u32)>,
    told: Option<UnboundedReceiver<GenerationEvent>>,
}

/// The tokens of a message. Cloning shares them.
#[derive(Clone, Default)]
pub(super) struct Script(Arc<Mutex<State>>);

impl Script {
    /// A message that is told through `told`.
    pub(super) fn new(told: UnboundedReceiver<GenerationEvent>) -> Self {
        Self(Arc::new(Mutex::new(State { told: Some(told), ..State::default() })))
    }

    /// A message of these tokens.
    pub(super) fn of(tokens: impl IntoIterator<Item = Taken>) -> Self {
        let tokens = tokens.into_iter().collect();
        Self(Arc::new(Mutex::new(State { tokens, ..State::default() })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What follows.
    pub(super) fn push(&self, taken: Taken) {
        self.state().tokens.push_back(taken);
    }

    /// So many tokens are guessed next, of which so many are right.
    pub(super) fn set_guess(&self, count: u32, right: u32) {
        self.state().guess = Some((count, right));
    }

    /// Whether nothing of it is left.
    pub(super) fn is_used_up(&self) -> bool {
        let state = self.state();
        state.tokens.is_empty() && state.guess.is_none()
    }

    /// What the message told since this was last asked.
    pub(super) fn heard(&self) -> Vec<GenerationEvent> {
        let mut state = self.state();
        let Some(told) = &mut state.told else { return Vec::new() };
        std::iter::from_fn(|| told.try_recv().ok()).collect()
    }
}

impl TokenSource for Script {
    fn over(&mut self) -> Option<Finish> {
        let mut state = self.state();
        let over = state.tokens.front() == Some(&Taken::Over);
        over.then(|| state.tokens.pop_front()).map(|_| Finish::MaxTokens)
    }

    fn rest(&mut self) -> String {
        String::new()
    }

    fn next(&mut self, _: &mut [f32], _: &[u32]) -> Result<Outcome, Error> {
        let mut state = self.state();
        let (text, finish) = (String::new(), Finish::EndOfTurn);
        match state.tokens.pop_front() {
            Some(Taken::Token(id)) => Ok(Outcome::Token { id, text }),
            Some(Taken::Unheard(id)) => {
                if let Some(told) = &mut state.told {
                    told.close();
                }
                Ok(Outcome::Token { id, text })
            }
            Some(Taken::Last(id)) => Ok(Outcome::Last { id, text, finish }),
            Some(Taken::End) => Ok(Outcome::End { text, finish }),
            Some(Taken::Over | Taken::Failed) | None => {
                Err(Error::internal("the trace has no further token"))
            }
        }
    }

    fn guess(&mut self, _: &[u32]) -> Vec<u32> {
        let mut state = self.state();
        let Some((count, right)) = state.guess.take() else { return Vec::new() };
        let names = state.tokens.iter().map(|taken| match taken {
            Taken::Token(id) | Taken::Unheard(id) | Taken::Last(id) => *id,
            Taken::End | Taken::Over | Taken::Failed => WRONG,
        });
        let right: Vec<u32> = names.take(right as usize).collect();
        right.into_iter().chain(std::iter::repeat(WRONG)).take(count as usize).collect()
    }
}
