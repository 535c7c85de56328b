//! Lines that contain a text, in a file or in everything below a folder.

use tools_sdk::{ErrorKind, ToolError};

use crate::place::Place;
use crate::read::text;
use crate::{Match, Operation, Output};

/// Most lines of an answer.
pub(crate) const MAX_MATCHES: usize = 50;
/// Most characters of a line that is shown.
pub(crate) const MAX_LINE: usize = 200;
/// Most bytes of one file that are searched.
pub(crate) const MAX_FILE_BYTES: u32 = 1 << 20;
/// Most files opened by one call.
pub(crate) const MAX_FILES: usize = 500;
/// Most folders inside each other.
pub(crate) const MAX_DEPTH: usize = 16;
/// Bytes asked of the host at once.
const PIECE: u32 = 1 << 16;

/// Walks depth first in name order; upper and lower case are the same. A place that is not there stands for the
/// whole folder, which the answer then says: small models fill in a path where none was meant.
pub(crate) fn search(place: &Place, query: &str) -> Result<Output, ToolError> {
    let query = query.trim().to_lowercase();
    if query.is_empty() {
        return Err(ToolError::invalid_input(
            "no_query",
            "search needs a query: a word to find in the files",
        ));
    }
    let mut walk = Walk { query, files: 0, matches: Vec::new(), left_out: Vec::new() };
    let mut searched = place.clone();
    if place.entries().is_ok() {
        walk.folder(place, 0)?;
    } else {
        match walk.file(place) {
            Err(error) if error.kind == ErrorKind::NotFound => {
                searched = place.whole();
                walk.left_out
                    .push(format!("{}, which is not there; the whole folder was searched", place.shown()));
                walk.folder(&searched, 0)?;
            }
            other => other?,
        }
    }
    let mut output = Output::new(Operation::Search, &searched);
    output.matches = walk.matches;
    output.left_out = walk.left_out.join("; ");
    Ok(output)
}

struct Walk {
    query: String,
    files: usize,
    matches: Vec<Match>,
    left_out: Vec<String>,
}

impl Walk {
    fn folder(&mut self, place: &Place, depth: usize) -> Result<(), ToolError> {
        if depth == MAX_DEPTH {
            self.left_out.push(format!("folders in {}", place.shown()));
            return Ok(());
        }
        for (inner, entry) in place.entries()? {
            if self.is_full() {
                return Ok(());
            }
            if entry.is_directory {
                self.folder(&inner, depth + 1)?;
            } else {
                self.file(&inner)?;
            }
        }
        Ok(())
    }

    /// Searches a file; one that is not text has no lines.
    fn file(&mut self, place: &Place) -> Result<(), ToolError> {
        self.files += 1;
        if self.files > MAX_FILES {
            self.left_out.push(format!("files after the first {MAX_FILES}"));
            return Ok(());
        }
        let mut bytes = Vec::new();
        while bytes.len() < MAX_FILE_BYTES as usize {
            let piece = place.bytes(bytes.len() as u64, PIECE)?;
            if piece.is_empty() {
                break;
            }
            bytes.extend(piece);
        }
        if bytes.len() >= MAX_FILE_BYTES as usize {
            self.left_out.push(format!("{} after {MAX_FILE_BYTES} bytes", place.shown()));
        }
        let Some(text) = text(&bytes, bytes.len()) else { return Ok(()) };
        for (line, number) in text.lines().zip(1..) {
            if !line.to_lowercase().contains(&self.query) {
                continue;
            }
            if self.matches.len() == MAX_MATCHES {
                self.left_out.push(format!("lines after the first {MAX_MATCHES}"));
                return Ok(());
            }
            let mut shown: String = line.trim().chars().take(MAX_LINE).collect();
            if line.trim().chars().nth(MAX_LINE).is_some() {
                shown.push_str("...");
            }
            self.matches.push(Match { path: place.shown(), line: number, text: shown });
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.files > MAX_FILES || self.left_out.iter().any(|left| left.starts_with("lines"))
    }
}
