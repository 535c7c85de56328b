//! The tool `files`: lists, searches and reads text files in the directories the operator granted.
//!
//! `place` turns a path a model wrote into a grant and a path, `search` walks, `read` cuts. What may be
//! reached is decided by the host, not here; here are only the bounds on how much is answered.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod place;
mod read;
mod search;

use place::Place;
use tools_sdk::prelude::*;

/// Most entries of a listing.
pub const MAX_ENTRIES: usize = 200;

/// What to do with the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
#[expect(missing_docs, reason = "documented variants would make the schema a list of alternatives")]
pub enum Operation {
    Search,
    Read,
    List,
}

/// What to look at. Two arguments say it all for a small model; the others narrow it.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct Input {
    /// "search" finds the lines with a word, "read" gives the text of a file, "list" gives the names in a folder.
    pub operation: Operation,
    /// The word to search for, or the file to read, or the folder to list; empty is the whole folder.
    pub query: String,
    /// For search: only this file or folder. For read and list: the file or folder, instead of the query.
    #[serde(default)]
    pub path: String,
    /// For read: byte to start at.
    #[serde(default)]
    pub offset: u64,
}

impl Input {
    /// The file or folder that is meant.
    fn place(&self) -> Result<Place, ToolError> {
        let by_query = self.operation != Operation::Search && self.path.trim().is_empty();
        Place::find(if by_query { &self.query } else { &self.path })
    }
}

/// One entry of a listing.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Entry {
    /// Path that `read`, `list` and `search` take.
    pub path: String,
    /// Whether it is a folder.
    pub folder: bool,
    /// Bytes; 0 for a folder.
    pub bytes: u64,
}

/// One line that was found.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Match {
    /// File it is in.
    pub path: String,
    /// Line number, from 1.
    pub line: u64,
    /// The line, cut when it is long.
    pub text: String,
}

/// What was found.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Output {
    /// What was done.
    pub operation: Operation,
    /// Where.
    pub path: String,
    /// For list: the entries.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<Entry>,
    /// For search: the lines.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub matches: Vec<Match>,
    /// For read: the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// For read: where the rest begins, when there is a rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_offset: Option<u64>,
    /// What was left out, in words; empty when nothing was.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub left_out: String,
}

impl Output {
    fn new(operation: Operation, place: &Place) -> Self {
        Self {
            operation,
            path: place.shown(),
            entries: Vec::new(),
            matches: Vec::new(),
            text: None,
            next_offset: None,
            left_out: String::new(),
        }
    }
}

/// Looks into the user's folder of text files: list names, search for a word, read a file.
#[tool(effect = "read", wants = ["files"], text = reading)]
pub fn files(input: Input, _context: &Context) -> Result<Output, ToolError> {
    let place = input.place()?;
    match input.operation {
        Operation::List => list(&place),
        Operation::Search => search::search(&place, &input.query),
        Operation::Read => read::read(&place, input.offset),
    }
}

fn list(place: &Place) -> Result<Output, ToolError> {
    let mut output = Output::new(Operation::List, place);
    let mut entries = place.entries()?;
    if entries.len() > MAX_ENTRIES {
        output.left_out = format!("{} more entries", entries.len() - MAX_ENTRIES);
        entries.truncate(MAX_ENTRIES);
    }
    output.entries = entries
        .into_iter()
        .map(|(place, entry)| Entry { path: place.shown(), folder: entry.is_directory, bytes: entry.size })
        .collect();
    Ok(output)
}

fn reading(output: &Output) -> String {
    let mut lines = Vec::new();
    match output.operation {
        Operation::List if output.entries.is_empty() => lines.push("The folder is empty.".to_owned()),
        Operation::List => lines.extend(output.entries.iter().map(|entry| {
            if entry.folder {
                format!("{}/", entry.path)
            } else {
                format!("{} ({} bytes)", entry.path, entry.bytes)
            }
        })),
        Operation::Search if output.matches.is_empty() => lines.push("No line was found.".to_owned()),
        Operation::Search => {
            lines.extend(
                output
                    .matches
                    .iter()
                    .map(|found| format!("{} line {}: {}", found.path, found.line, found.text)),
            );
        }
        Operation::Read => lines.push(output.text.clone().unwrap_or_default()),
    }
    if !output.left_out.is_empty() {
        lines.push(format!("[left out: {}]", output.left_out));
    }
    lines.join("\n")
}
