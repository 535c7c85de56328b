//! The one error of the library's face: what kind of failure, a stable code, a sentence with the fix.

use std::borrow::Cow;
use std::fmt;

use kernels::cuda::DeviceError;
use kernels::error::KernelError;
use serde::{Deserialize, Serialize};

/// Code of the error of a device that is not there, or cannot run the kernels.
pub const DEVICE_UNAVAILABLE: &str = "device_unavailable";
/// Code of the error of a device that stopped working: nothing else runs on it in this process.
pub const DEVICE_LOST: &str = "device_lost";

/// What a caller can do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request is wrong and will stay wrong.
    InvalidInput,
    /// The thing named does not exist.
    NotFound,
    /// Another turn or an earlier state stands in the way.
    Conflict,
    /// Policy forbids it.
    Denied,
    /// A limit or a budget is reached.
    Limit,
    /// Not possible now; later it may be.
    Unavailable,
    /// A fault of the runtime or its host.
    Internal,
}

/// A failure with a stable `code` (`session_not_found`, `kv_capacity`, ...) and a sentence that names
/// the thing and, where there is one, the fix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct Error {
    /// What kind of failure.
    pub kind: ErrorKind,
    /// Stable code.
    pub code: Cow<'static, str>,
    /// One sentence.
    pub message: String,
    /// Whether the same request can succeed later.
    pub retryable: bool,
}

impl Error {
    /// An error of `kind` with a stable code.
    pub fn new(kind: ErrorKind, code: &'static str, message: impl Into<String>) -> Self {
        let retryable = matches!(kind, ErrorKind::Unavailable);
        Self { kind, code: Cow::Borrowed(code), message: message.into(), retryable }
    }

    /// Marks the error as worth trying again.
    #[must_use]
    pub fn retryable(mut self) -> Self {
        self.retryable = true;
        self
    }

    /// A wrong request.
    pub fn invalid(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidInput, code, message)
    }

    /// A missing thing.
    pub fn not_found(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, code, message)
    }

    /// A fault of the runtime.
    pub fn internal(what: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Internal, "internal", what.to_string())
    }

    /// No session of this id.
    pub fn no_session(id: &str) -> Self {
        Self::not_found(
            "session_not_found",
            format!("there is no session '{id}'; list the existing ones with `session-runtime sessions ls`"),
        )
    }
}

macro_rules! internal_from {
    ($($source:ty),* $(,)?) => {$(
        impl From<$source> for Error {
            fn from(error: $source) -> Self {
                Self::internal(error)
            }
        }
    )*};
}

internal_from!(serde_json::Error);

impl From<KernelError> for Error {
    fn from(error: KernelError) -> Self {
        let message = error.to_string();
        match error {
            KernelError::OutOfMemory { .. } | KernelError::Device(DeviceError::OutOfMemory { .. }) => {
                Self::new(ErrorKind::Limit, "out_of_memory", message)
            }
            // Later, on another device or this one, the same request can succeed.
            KernelError::Device(DeviceError::Lost { .. }) => {
                Self::new(ErrorKind::Unavailable, DEVICE_LOST, message)
            }
            KernelError::Device(
                DeviceError::NoDriver
                | DeviceError::OldDriver { .. }
                | DeviceError::NoDevice { .. }
                | DeviceError::OldDevice { .. }
                | DeviceError::HeadSize { .. }
                | DeviceError::NoCompiler { .. },
            ) => Self::invalid(DEVICE_UNAVAILABLE, message),
            KernelError::Device(DeviceError::Compile { .. }) => {
                Self::invalid("kernels_not_compiled", message)
            }
            _ => Self::internal(message),
        }
    }
}
