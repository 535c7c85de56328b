//! What a command ends with when it fails: one sentence, and an exit code.

use std::fmt;

use crate::error::Error;

/// A failure of a command.
#[derive(Debug)]
pub(super) struct Failure {
    message: String,
    /// 1: it failed. 2: it was called wrongly. 0: it ended early, without a message.
    pub(super) exit: u8,
}

/// What a command gives back.
pub(super) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// The command could not do its work.
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), exit: 1 }
    }

    /// Nobody reads the output any more: the command ends, which is no fault.
    pub(super) fn unread() -> Self {
        Self { message: String::new(), exit: 0 }
    }

    /// The command was called wrongly.
    pub(super) fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), exit: 2 }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(error.message)
    }
}
