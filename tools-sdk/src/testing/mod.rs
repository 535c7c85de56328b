//! A host made of memory, for testing guests natively: a clock that only moves when slept on, files that are
//! given, a model that says what it was told to say, and a record of everything a guest did.
//!
//! It knows nothing of WebAssembly, budgets or journals: those are the real host's.

mod files;
mod state;

use std::cell::RefCell;
use std::rc::Rc;

use crate::Error;
use crate::agent::chat::{Finish, Options, Role, SegmentKind};
use crate::agent::{self, Agent, Event};
use crate::log::Level;
use crate::tool::{self, Context, Output, Tool};

pub(crate) use state::{Reply, State};

/// A message of a mocked session.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Whose it is.
    pub role: Role,
    /// What it is.
    pub kind: SegmentKind,
    /// Its text, with the prefix if the model wrote it.
    pub text: String,
    /// How the model was asked for it; `None` when it was appended.
    pub options: Option<Options>,
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<RefCell<State>>>> = const { RefCell::new(None) };
}

/// Runs `f` on the state of the host that is installed on this thread.
pub(crate) fn with<R>(f: impl FnOnce(&mut State) -> R) -> Option<R> {
    let current = CURRENT.with(|current| current.borrow().clone());
    current.map(|state| f(&mut state.borrow_mut()))
}

/// A mocked host. Setters take and give the host, so that a test reads as one sentence.
#[derive(Clone, Default)]
pub struct Host {
    state: Rc<RefCell<State>>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").finish_non_exhaustive()
    }
}

impl Host {
    /// A host with no files, no tools, a model with nothing to say, and a clock at 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Grants a directory of this name and puts a file into it; `path` may have `/`.
    #[must_use]
    pub fn file(self, grant: &str, path: &str, bytes: impl AsRef<[u8]>) -> Self {
        self.state.borrow_mut().files.put(grant, path, bytes.as_ref());
        self
    }

    /// Milliseconds the next calls may take; sleeping past them fails, as on the real host.
    #[must_use]
    pub fn deadline_ms(self, milliseconds: u64) -> Self {
        self.state.borrow_mut().deadline_ms = milliseconds;
        self
    }

    /// The session's parameters, a JSON object.
    #[must_use]
    pub fn params(self, json: &str) -> Self {
        self.state.borrow_mut().params = json.to_owned();
        self
    }

    /// What the model writes next, after earlier replies. It ends the way a model does: by its constraint when
    /// it has one, by the end of its turn otherwise.
    #[must_use]
    pub fn reply(self, text: &str) -> Self {
        self.state.borrow_mut().replies.push_back((text.to_owned(), None));
        self
    }

    /// What the model writes next, and why it ends.
    #[must_use]
    pub fn reply_ending(self, text: &str, finish: Finish) -> Self {
        self.state.borrow_mut().replies.push_back((text.to_owned(), Some(finish)));
        self
    }

    /// A tool the agent may call.
    #[must_use]
    pub fn tool(
        self,
        name: &str,
        description: &str,
        input_schema: &str,
        run: impl FnMut(&str) -> Result<String, Error> + 'static,
    ) -> Self {
        self.state.borrow_mut().add_tool(name, description, input_schema, Box::new(run));
        self
    }

    /// Whether the turn has been asked to stop.
    #[must_use]
    pub fn cancelled(self, cancelled: bool) -> Self {
        self.state.borrow_mut().cancelled = cancelled;
        self
    }

    /// Runs one call of a tool.
    ///
    /// # Errors
    /// As for [`tool::call`].
    pub fn call<T: Tool>(&self, input: &str) -> Result<Output, Error> {
        let context = Context {
            call_id: "call_test".to_owned(),
            session_id: "sess_test".to_owned(),
            deadline_ms: self.state.borrow().deadline_ms,
        };
        self.enter(|| tool::call::<T>(input, &context))
    }

    /// Starts an agent.
    ///
    /// # Errors
    /// As for [`agent::start`].
    pub fn start<A: Agent>(&self) -> Result<(), Error> {
        self.enter(agent::start::<A>)
    }

    /// Runs an agent's turn on a user's message. The agent appends it, as on the real host.
    ///
    /// # Errors
    /// As for [`agent::on_event`].
    pub fn user_message<A: Agent>(&self, text: &str) -> Result<(), Error> {
        self.state.borrow_mut().turn += 1;
        self.enter(|| agent::on_event::<A>(Event::UserMessage(text.to_owned())))
    }

    /// Everything in the session, in order.
    pub fn messages(&self) -> Vec<Message> {
        self.state.borrow().messages()
    }

    /// The tools that were called, with their input.
    pub fn tool_calls(&self) -> Vec<(String, String)> {
        self.state.borrow().tool_calls.clone()
    }

    /// Lines logged.
    pub fn logs(&self) -> Vec<(Level, String)> {
        self.state.borrow().logs.clone()
    }

    /// Progress reported: done, total, line.
    pub fn progress(&self) -> Vec<(u64, u64, String)> {
        self.state.borrow().progress.clone()
    }

    /// Milliseconds since the host began.
    pub fn now_ms(&self) -> u64 {
        self.state.borrow().now_ms
    }

    fn enter<R>(&self, f: impl FnOnce() -> R) -> R {
        let previous = CURRENT.with(|current| current.replace(Some(Rc::clone(&self.state))));
        let _restore = Restore(previous);
        f()
    }
}

/// Puts the previous host back, also when a guest panics.
struct Restore(Option<Rc<RefCell<State>>>);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.with(|current| *current.borrow_mut() = self.0.take());
    }
}
