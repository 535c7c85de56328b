//! The receipt of an append: waits for, or is told of, the moment its record is durable.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};

use super::JournalError;
use crate::sync::{lock, wait};

type Callback = Box<dyn FnOnce(Result<(), JournalError>) + Send>;

enum State {
    Waiting(Vec<Callback>),
    Done(Result<(), JournalError>),
}

/// A receipt. Cloning shares it.
#[derive(Clone)]
pub struct Ticket(Arc<(Mutex<State>, Condvar)>);

impl Ticket {
    pub(crate) fn new() -> Self {
        Self(Arc::new((Mutex::new(State::Waiting(Vec::new())), Condvar::new())))
    }

    /// Waits until the record is durable and readable.
    ///
    /// # Errors
    /// [`JournalError::Poisoned`] if it could not be made durable; whether it survives is then unknown.
    pub fn wait(&self) -> Result<(), JournalError> {
        let mut state = lock(&self.0.0);
        loop {
            match &*state {
                State::Done(result) => return result.clone(),
                State::Waiting(_) => state = wait(&self.0.1, state),
            }
        }
    }

    /// Calls `f` once, when the record is durable and readable or known not to be: on the journal's thread, or at
    /// once on this one if that has been decided. `f` must be quick and must not call the store.
    pub fn on_durable(&self, f: Box<dyn FnOnce(Result<(), JournalError>) + Send>) {
        let mut state = lock(&self.0.0);
        match &mut *state {
            State::Waiting(callbacks) => callbacks.push(f),
            State::Done(result) => {
                let result = result.clone();
                drop(state);
                f(result);
            }
        }
    }

    /// What was decided, if anything was.
    pub fn outcome(&self) -> Option<Result<(), JournalError>> {
        match &*lock(&self.0.0) {
            State::Waiting(_) => None,
            State::Done(result) => Some(result.clone()),
        }
    }

    /// Decides. Later decisions are ignored.
    pub(crate) fn complete(&self, result: &Result<(), JournalError>) {
        let callbacks = {
            let mut state = lock(&self.0.0);
            match std::mem::replace(&mut *state, State::Done(result.clone())) {
                State::Waiting(callbacks) => callbacks,
                decided @ State::Done(_) => {
                    *state = decided;
                    return;
                }
            }
        };
        self.0.1.notify_all();
        for callback in callbacks {
            let result = result.clone();
            // One caller's panic must not end the journal's thread.
            if catch_unwind(AssertUnwindSafe(move || callback(result))).is_err() {
                tracing::error!("a callback of the journal panicked");
            }
        }
    }
}
