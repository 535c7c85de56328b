//! Lines for the operator. The host bounds them; nothing here reaches the model.

use crate::sys;

/// How much a line matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// For whoever is looking for a fault.
    Debug,
    /// What happened.
    Info,
    /// Something that should not be.
    Warn,
    /// Something that went wrong.
    Error,
}

/// Writes one line.
pub fn write(level: Level, message: &str) {
    sys::log(level, message);
}

/// Writes a line at [`Level::Debug`].
pub fn debug(message: &str) {
    write(Level::Debug, message);
}

/// Writes a line at [`Level::Info`].
pub fn info(message: &str) {
    write(Level::Info, message);
}

/// Writes a line at [`Level::Warn`].
pub fn warn(message: &str) {
    write(Level::Warn, message);
}

/// Writes a line at [`Level::Error`].
pub fn error(message: &str) {
    write(Level::Error, message);
}
