//! What a mocked host remembers.

use std::collections::{BTreeMap, VecDeque};

use super::Message;
use super::files::Files;
use crate::agent::chat::{Chunk, Constraint, Finish, Options, Retention, Role, Segment, SegmentKind};
use crate::agent::context::{KvState, Status};
use crate::agent::{segments, tools};
use crate::log::Level;
use crate::{Error, ErrorKind};

/// Characters of a reply that come at once.
const PIECE: usize = 8;
/// Context length a mocked model claims.
const CONTEXT_LENGTH: u32 = 32_768;

type Run = Box<dyn FnMut(&str) -> Result<String, Error>>;

/// A tool of a mocked session.
pub(crate) struct ToolMock {
    pub(crate) info: tools::Info,
    run: Run,
}

/// The state behind [`super::Host`].
#[derive(Default)]
pub(crate) struct State {
    pub(crate) logs: Vec<(Level, String)>,
    pub(crate) now_ms: u64,
    /// 0 means no bound.
    pub(crate) deadline_ms: u64,
    pub(crate) progress: Vec<(u64, u64, String)>,
    pub(crate) files: Files,
    pub(crate) params: String,
    pub(crate) turn: u32,
    pub(crate) cancelled: bool,
    pub(crate) replies: VecDeque<(String, Option<Finish>)>,
    pub(crate) tools: BTreeMap<String, ToolMock>,
    pub(crate) tool_calls: Vec<(String, String)>,
    pub(crate) state: BTreeMap<String, String>,
    randoms: u64,
    messages: Vec<(Message, segments::Info)>,
}

impl State {
    pub(crate) fn sleep(&mut self, duration: u64) -> Result<(), Error> {
        if self.deadline_ms > 0 && self.now_ms.saturating_add(duration) > self.deadline_ms {
            let left = self.deadline_ms.saturating_sub(self.now_ms);
            return Err(Error::limit("deadline", format!("{duration} ms are more than the {left} ms left")));
        }
        self.now_ms = self.now_ms.saturating_add(duration);
        Ok(())
    }

    pub(crate) fn add_tool(&mut self, name: &str, description: &str, input_schema: &str, run: Run) {
        let info = tools::Info {
            name: name.to_owned(),
            description: description.to_owned(),
            input_schema: input_schema.to_owned(),
        };
        self.tools.insert(name.to_owned(), ToolMock { info, run });
    }

    pub(crate) fn call_tool(&mut self, name: &str, input: &str) -> Result<String, Error> {
        self.tool_calls.push((name.to_owned(), input.to_owned()));
        match self.tools.get_mut(name) {
            Some(tool) => (tool.run)(input),
            None => Err(Error::not_found("no_such_tool", format!("there is no tool {name}"))),
        }
    }

    /// Appends a message; a token is a word here.
    pub(crate) fn append(
        &mut self,
        role: Role,
        kind: SegmentKind,
        retention: Retention,
        text: &str,
    ) -> Segment {
        self.push(Message { role, kind, text: text.to_owned(), options: None }, retention)
    }

    pub(crate) fn generate(&mut self, options: &Options) -> Result<(Reply, Segment), Error> {
        let Some((text, finish)) = self.replies.pop_front() else {
            let message = "the model was given nothing more to say: add Host::reply";
            return Err(Error::new(ErrorKind::Unavailable, "no_reply", message));
        };
        let finish = finish.unwrap_or(match options.constraint {
            Constraint::None => Finish::EndOfTurn,
            Constraint::JsonSchema(_) | Constraint::Regex(_) => Finish::ConstraintComplete,
        });
        let message = Message {
            role: Role::Assistant,
            kind: options.kind,
            text: format!("{}{text}", options.prefix),
            options: Some(options.clone()),
        };
        let segment = self.push(message, options.retention);
        Ok((Reply { rest: text, finish }, segment))
    }

    pub(crate) fn status(&self) -> Status {
        let tokens = self.messages.last().map_or(0, |(_, segment)| segment.end);
        let state = if tokens == 0 { KvState::None } else { KvState::Active };
        Status { state, tokens, resident_tokens: tokens, context_length: CONTEXT_LENGTH }
    }

    pub(crate) fn segments(&self) -> Vec<segments::Info> {
        self.messages.iter().map(|(_, segment)| segment.clone()).collect()
    }

    pub(crate) fn set_retention(&mut self, id: &str, retention: Retention) -> Result<(), Error> {
        let found = self.messages.iter_mut().find(|(_, segment)| segment.id == id);
        let (_, segment) =
            found.ok_or_else(|| Error::not_found("no_such_segment", format!("there is no segment {id}")))?;
        segment.retention = retention;
        Ok(())
    }

    /// 1, 2, 3, ...
    pub(crate) fn next_random(&mut self) -> u64 {
        self.randoms += 1;
        self.randoms
    }

    pub(crate) fn messages(&self) -> Vec<Message> {
        self.messages.iter().map(|(message, _)| message.clone()).collect()
    }

    fn push(&mut self, message: Message, retention: Retention) -> Segment {
        let start = self.messages.last().map_or(0, |(_, segment)| segment.end);
        let words = u32::try_from(message.text.split_whitespace().count()).unwrap_or(u32::MAX);
        let end = start.saturating_add(words);
        let id = format!("seg_{}", self.messages.len());
        let segment = Segment { id: id.clone(), start, end };
        self.messages
            .push((message.clone(), segments::Info { id, kind: message.kind, start, end, retention }));
        segment
    }
}

/// A reply that is being read.
pub(crate) struct Reply {
    rest: String,
    finish: Finish,
}

impl Reply {
    pub(crate) fn next_chunk(&mut self) -> Chunk {
        if self.rest.is_empty() {
            return Chunk::Done(self.finish);
        }
        let cut = self.rest.char_indices().nth(PIECE).map_or(self.rest.len(), |(at, _)| at);
        let rest = self.rest.split_off(cut);
        Chunk::Text(std::mem::replace(&mut self.rest, rest))
    }
}
