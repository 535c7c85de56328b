//! The tools this session may call.

use crate::{Error, sys};

/// A tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Name it is called by.
    pub name: String,
    /// What it does.
    pub description: String,
    /// JSON Schema of its input, as text.
    pub input_schema: String,
}

/// The tools this session may call, by name order.
pub fn list() -> Vec<Info> {
    sys::tools_list()
}

/// Runs a tool to its end and gives its text. While it runs the session is idle.
///
/// # Errors
/// The tool's own error, [`crate::ErrorKind::NotFound`] for a name that is not in [`list`], and
/// [`crate::ErrorKind::Limit`] when the host stopped it.
pub fn call(name: &str, input: &str) -> Result<String, Error> {
    sys::tools_call(name, input)
}
