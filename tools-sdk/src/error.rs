//! The one shape of failure: what kind, a stable code, a sentence for people, whether trying again can help.

use std::fmt;

/// Why a call failed, coarse enough to decide on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// What was passed cannot be used.
    InvalidInput,
    /// What was named is not there.
    NotFound,
    /// The policy of this session does not allow it.
    Denied,
    /// A bound was reached.
    Limit,
    /// Someone asked for it to stop.
    Cancelled,
    /// It cannot be reached now.
    Unavailable,
    /// It was tried and went wrong.
    Failed,
}

/// A failure of a host call, a tool or an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Coarse reason.
    pub kind: ErrorKind,
    /// Stable name of the reason, in snake case.
    pub code: String,
    /// A sentence for people: what went wrong, where, and what to do.
    pub message: String,
    /// Whether the same call can succeed later.
    pub retryable: bool,
}

/// A failure of a tool.
pub type ToolError = Error;

/// A failure of an agent.
pub type AgentError = Error;

impl Error {
    /// A failure that trying again does not help.
    pub fn new(kind: ErrorKind, code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { kind, code: code.into(), message: message.into(), retryable: false }
    }

    /// [`ErrorKind::InvalidInput`] under `code`.
    pub fn invalid_input(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidInput, code, message)
    }

    /// [`ErrorKind::NotFound`] under `code`.
    pub fn not_found(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, code, message)
    }

    /// [`ErrorKind::Limit`] under `code`.
    pub fn limit(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Limit, code, message)
    }

    /// [`ErrorKind::Failed`] under `code`.
    pub fn failed(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Failed, code, message)
    }

    /// The same failure, marked as one that can pass.
    #[must_use]
    pub fn retryable(mut self) -> Self {
        self.retryable = true;
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Error {}
