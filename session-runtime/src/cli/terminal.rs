//! Writing results to standard output. When its reader is gone (`... | head`) the command ends quietly
//! instead of failing.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

use super::failure::{Failure, Outcome};

/// Writes a text as it is.
pub(super) fn print(text: impl Display) -> Outcome {
    let mut out = std::io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Failure::unread()),
        Err(error) => Err(Failure::new(format!("the output could not be written: {error}"))),
    }
}

/// Writes a line.
pub(super) fn print_line(text: impl Display) -> Outcome {
    print(format_args!("{text}\n"))
}
