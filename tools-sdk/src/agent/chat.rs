//! The model: append a message, or let the model write one. Text is appended, never re-rendered.

use std::fmt;

use crate::{Error, sys};

/// Whose message it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// A tool.
    Tool,
}

/// What a range of tokens is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    /// Instructions.
    System,
    /// What the user wrote.
    User,
    /// What the model thought.
    Reasoning,
    /// A call of a tool.
    ToolCall,
    /// What a tool gave back.
    ToolResult,
    /// What the user is told.
    Answer,
    /// A shorter form of earlier segments.
    Summary,
}

/// How long a segment is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// For the life of the session.
    Keep,
    /// Until the turn ends.
    DropAfterTurn,
    /// Seconds.
    Expire(u64),
}

/// A range of token indices in the session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its id.
    pub id: String,
    /// First token.
    pub start: u32,
    /// One past the last token.
    pub end: u32,
}

/// What the model's text must match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// Anything.
    None,
    /// A JSON Schema, as text.
    JsonSchema(String),
    /// A regular expression over the whole text.
    Regex(String),
}

/// How a message is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// What the message is.
    pub kind: SegmentKind,
    /// How long it is kept.
    pub retention: Retention,
    /// Most tokens sampled.
    pub max_tokens: u32,
    /// `None` takes the session's default.
    pub temperature: Option<f32>,
    /// Texts that end the message.
    pub stop: Vec<String>,
    /// What the sampled text must match.
    pub constraint: Constraint,
    /// Text the message begins with, given rather than sampled.
    pub prefix: String,
}

impl Options {
    /// An unconstrained message of one kind that is kept, of at most `max_tokens` tokens.
    pub fn new(kind: SegmentKind, max_tokens: u32) -> Self {
        Self {
            kind,
            retention: Retention::Keep,
            max_tokens,
            temperature: None,
            stop: Vec::new(),
            constraint: Constraint::None,
            prefix: String::new(),
        }
    }
}

/// Why a message ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn.
    EndOfTurn,
    /// One of the stop texts came.
    StopString,
    /// The bound on tokens was reached.
    MaxTokens,
    /// The constraint is satisfied and allows nothing more.
    ConstraintComplete,
    /// Someone asked the turn to stop.
    Cancelled,
}

/// The next piece of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// More text.
    Text(String),
    /// Nothing more comes.
    Done(Finish),
}

/// A message being written by the model.
pub struct Generation {
    inner: sys::Generation,
}

/// A message the model has written, without its prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The sampled text.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// Where it is in the session.
    pub segment: Segment,
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation").finish_non_exhaustive()
    }
}

impl Generation {
    /// The next piece; after [`Chunk::Done`] there is no more.
    ///
    /// # Errors
    /// What the engine refuses or fails at.
    pub fn next_chunk(&mut self) -> Result<Chunk, Error> {
        self.inner.next_chunk()
    }

    /// The segment written so far.
    pub fn segment(&self) -> Segment {
        self.inner.segment()
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// As for [`Generation::next_chunk`].
    pub fn finish(mut self) -> Result<Written, Error> {
        let mut text = String::new();
        loop {
            match self.next_chunk()? {
                Chunk::Text(piece) => text.push_str(&piece),
                Chunk::Done(finish) => return Ok(Written { text, finish, segment: self.segment() }),
            }
        }
    }
}

/// Appends a whole message.
///
/// # Errors
/// [`crate::ErrorKind::Limit`] when the context is full.
pub fn append(role: Role, kind: SegmentKind, retention: Retention, text: &str) -> Result<Segment, Error> {
    sys::chat_append(role, kind, retention, text)
}

/// Lets the model write a message.
///
/// # Errors
/// [`crate::ErrorKind::InvalidInput`] for a constraint that cannot be compiled, [`crate::ErrorKind::Limit`] when
/// the context is full.
pub fn generate(options: &Options) -> Result<Generation, Error> {
    sys::chat_generate(options).map(|inner| Generation { inner })
}
