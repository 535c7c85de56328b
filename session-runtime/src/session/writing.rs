//! A message of the model inside a turn: begun, streamed, ended, each step durable before it is seen
//! (I6), and continued after an interruption from the tokens that were sampled.

use std::sync::Arc;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::event::SessionEvent;
use super::host::sampling_params;
use super::scope::{SegmentRange, TurnScope};
use super::spec::{Chunk, Finish, GenerateOptions, SegmentKind};
use super::view::Usage;
use crate::error::Error;
use crate::ids;
use crate::scheduler::{GenerationEvent, GenerationRequest};

/// Tokens that one event may hold.
const EVENT_TOKENS: usize = 32;

/// A message being written.
pub(super) struct Writing {
    segment: String,
    options: GenerateOptions,
    /// Tokens on record.
    sampled: Vec<u32>,
    /// How the message ended, when that is on record and its driver does not know it yet.
    ended: Option<Result<Finish, Error>>,
    events: Option<UnboundedReceiver<GenerationEvent>>,
    /// What the scheduler failed with, after tokens that are told first.
    failed: Option<Error>,
    usage: Usage,
}

impl Writing {
    fn new(segment: String, options: GenerateOptions) -> Self {
        Self {
            segment,
            options,
            sampled: Vec::new(),
            ended: None,
            events: None,
            failed: None,
            usage: Usage::default(),
        }
    }
}

impl TurnScope {
    /// Begins a message of the model.
    ///
    /// # Errors
    /// An invalid constraint or sampling, `context_length_exceeded`, `replay_divergence`, or the store.
    pub async fn generate(&mut self, options: GenerateOptions) -> Result<(), Error> {
        self.refuse_while_writing()?;
        let mut options = options;
        options.sampling = options.sampling.or(&self.request().sampling).or(&self.spec().sampling);
        sampling_params(&options.sampling)?;
        self.session.host.constraint(&options.constraint)?;
        let call = self.replay.begin_call();
        match self.replay.take(call, "generate")? {
            Some(SessionEvent::GenerationStarted { segment, options: recorded, start, ids, .. })
                if *recorded == options =>
            {
                self.open_message(segment, options, start, ids.len());
                Ok(())
            }
            Some(_) => Err(self.replay.diverged("generate")),
            None => {
                let begun = self.begin_message(call, options).await;
                self.keep_refusal(call, "generate", begun).await
            }
        }
    }

    async fn begin_message(&mut self, call: u64, options: GenerateOptions) -> Result<(), Error> {
        let start = self.session.record().tokens.len();
        let ids = self.session.host.encode_opening(&options.prefix)?;
        self.session.host.check_context(start + ids.len() + 1)?;
        let segment = ids::fresh("seg");
        let event = SessionEvent::GenerationStarted {
            call,
            turn: self.turn.clone(),
            segment: segment.clone(),
            kind: options.kind,
            retention: options.retention,
            options: Box::new(options.clone()),
            start: start as u64,
            ids: ids.clone(),
            text: options.prefix.clone(),
        };
        self.session.write(event).await?;
        self.open_message(segment, options, start as u64, ids.len());
        self.session.host.scheduler.append(&self.session.id, ids)?;
        self.ask_scheduler()
    }

    fn open_message(&mut self, segment: String, options: GenerateOptions, start: u64, tokens: usize) {
        self.written = Some(SegmentRange { id: segment.clone(), start, end: start + tokens as u64 });
        self.writing = Some(Writing::new(segment, options));
    }

    fn extend_written(&mut self, tokens: usize) {
        if let Some(written) = &mut self.written {
            written.end += tokens as u64;
        }
    }

    /// The next piece of the message as the record has it; `None` where the record is over.
    fn replay_chunk(&mut self) -> Result<Option<Chunk>, Error> {
        let Some(writing) = &mut self.writing else { return Ok(None) };
        let mut piece = String::new();
        let mut tokens = 0;
        // A live message gives no empty pieces either, and its end is on record with its last piece.
        while piece.is_empty() || self.replay.ends_message(&writing.segment) {
            match self.replay.take_of_message(&writing.segment) {
                Some(SessionEvent::GenerationTokens { ids, text, .. }) => {
                    tokens += ids.len();
                    writing.sampled.extend(ids);
                    piece = text;
                }
                Some(SessionEvent::GenerationFinished { finish, ids, error, .. }) => {
                    tokens += ids.len();
                    writing.ended = Some(error.map_or(Ok(finish), |error| Err(*error)));
                }
                _ => break,
            }
        }
        let ended = writing.ended.clone();
        self.extend_written(tokens);
        match ended {
            _ if !piece.is_empty() => Ok(Some(Chunk::Text(piece))),
            Some(ended) => ended.map(|finish| Some(Chunk::Done(finish))),
            None if self.replay.is_over() => Ok(None),
            None => Err(self.replay.diverged("read a message")),
        }
    }

    /// Lets the scheduler write the message, from where the record ends.
    fn ask_scheduler(&mut self) -> Result<(), Error> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let host = &self.session.host;
        let request = GenerationRequest {
            sampling: sampling_params(&writing.options.sampling)?,
            max_tokens: writing.options.max_tokens as usize,
            stop: writing.options.stop.clone(),
            constraint: host.constraint(&writing.options.constraint)?,
            sampled: writing.sampled.clone(),
            tokenizer: Some(Arc::clone(&host.tokenizer)),
        };
        let (events, inbox) = unbounded_channel();
        host.scheduler.generate(&self.session.id, request, events)?;
        writing.events = Some(inbox);
        Ok(())
    }

    /// The next piece of the message.
    ///
    /// # Errors
    /// What the engine fails with, `kv_capacity`, or the store; the message is over then.
    pub async fn next_chunk(&mut self) -> Result<Chunk, Error> {
        let outcome = self.read_chunk().await;
        match &outcome {
            Ok(Chunk::Text(_)) => {}
            Ok(Chunk::Done(_)) => self.writing = None,
            Err(error) => {
                let ended = self.writing.as_ref().is_none_or(|writing| writing.ended.is_some());
                // The history stays well formed: what was written of the message is closed. A turn that
                // diverges from its record ends, and closes it then.
                if !ended && self.replay.is_over() {
                    let closed = self.finish_message(Finish::Cancelled, Some(error.clone())).await;
                    if let Err(error) = closed {
                        tracing::warn!(session = %self.session.id, %error, "message not closed");
                    }
                }
                if ended || self.replay.is_over() {
                    self.writing = None;
                }
            }
        }
        outcome
    }

    async fn read_chunk(&mut self) -> Result<Chunk, Error> {
        let Some(writing) = &mut self.writing else {
            return Err(Error::invalid("no_generation", "there is no message being written"));
        };
        if let Some(ended) = &writing.ended {
            return ended.clone().map(Chunk::Done);
        }
        if !self.replay.is_over()
            && let Some(chunk) = self.replay_chunk()?
        {
            return Ok(chunk);
        }
        if self.writing.as_ref().is_some_and(|writing| writing.events.is_none()) {
            self.ask_scheduler()?;
        }
        loop {
            let (ids, text, end) = self.receive().await?;
            if !ids.is_empty() || !text.is_empty() {
                self.write_tokens(ids, text.clone()).await?;
            }
            if let Some(finish) = end {
                self.finish_message(finish, None).await?;
                if text.is_empty() {
                    return Ok(Chunk::Done(finish));
                }
                if let Some(writing) = &mut self.writing {
                    writing.ended = Some(Ok(finish));
                }
            }
            if !text.is_empty() {
                return Ok(Chunk::Text(text));
            }
        }
    }

    /// Waits for the next token and takes what else is there; tokens, text, and the end.
    async fn receive(&mut self) -> Result<(Vec<u32>, String, Option<Finish>), Error> {
        let stopped = || Error::internal("the scheduler dropped the message");
        let Some(writing) = &mut self.writing else { return Err(stopped()) };
        let Some(events) = &mut writing.events else { return Err(stopped()) };
        if let Some(error) = writing.failed.take() {
            return Err(error);
        }
        let (mut ids, mut text) = (Vec::new(), String::new());
        let mut cancelled = *self.cancel.borrow();
        if cancelled {
            self.session.host.scheduler.cancel(&self.session.id)?;
        }
        loop {
            let event = if ids.is_empty() && text.is_empty() {
                tokio::select! {
                    event = events.recv() => event,
                    outcome = self.cancel.changed(), if !cancelled => {
                        cancelled = outcome.is_err() || *self.cancel.borrow();
                        if cancelled && outcome.is_ok() {
                            self.session.host.scheduler.cancel(&self.session.id)?;
                        }
                        continue;
                    }
                }
            } else {
                match events.try_recv() {
                    Ok(event) => Some(event),
                    Err(_) => return Ok((ids, text, None)),
                }
            };
            match event.ok_or_else(stopped)? {
                GenerationEvent::Started { input_tokens, cached_tokens } => {
                    writing.usage.input_tokens = input_tokens;
                    writing.usage.cached_tokens = cached_tokens;
                }
                GenerationEvent::Token { id, text: more } => {
                    ids.push(id);
                    text.push_str(&more);
                    if ids.len() == EVENT_TOKENS {
                        return Ok((ids, text, None));
                    }
                }
                GenerationEvent::Done { finish, text: more } => {
                    text.push_str(&more);
                    return Ok((ids, text, Some(finish)));
                }
                GenerationEvent::Failed(error) if ids.is_empty() && text.is_empty() => return Err(error),
                GenerationEvent::Failed(error) => {
                    writing.failed = Some(error);
                    return Ok((ids, text, None));
                }
            }
        }
    }

    async fn write_tokens(&mut self, ids: Vec<u32>, text: String) -> Result<(), Error> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        writing.sampled.extend_from_slice(&ids);
        let tokens = ids.len();
        let event = SessionEvent::GenerationTokens {
            turn: self.turn.clone(),
            segment: writing.segment.clone(),
            kind: writing.options.kind,
            ids,
            text,
        };
        self.session.write(event).await?;
        self.extend_written(tokens);
        Ok(())
    }

    /// Closes the message's frame; `error` says why it could not go on.
    async fn finish_message(&mut self, finish: Finish, error: Option<Error>) -> Result<(), Error> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let ids = self.session.host.encode_closing(&writing.options)?;
        let sampled = writing.sampled.len() as u64;
        writing.usage.output_tokens = sampled;
        writing.usage.reasoning_tokens =
            if writing.options.kind == SegmentKind::Reasoning { sampled } else { 0 };
        let event = SessionEvent::GenerationFinished {
            call: self.replay.begin_call(),
            turn: self.turn.clone(),
            segment: writing.segment.clone(),
            finish,
            ids: ids.clone(),
            usage: writing.usage,
            error: error.map(Box::new),
        };
        self.session.write(event).await?;
        self.extend_written(ids.len());
        self.session.host.scheduler.append(&self.session.id, ids)
    }

    /// Where the message that is or was last written stands, as far as it has been read.
    pub fn generation(&self) -> Option<SegmentRange> {
        self.written.clone()
    }

    /// Ends what its driver left unfinished, so that the history stays well formed.
    ///
    /// # Errors
    /// `replay_divergence` when the turn did less than its record says, or the store.
    pub(super) async fn abandon_message(&mut self) -> Result<(), Error> {
        let did_less = self.skip_record();
        self.close_message().await?;
        if did_less && !self.is_cancelled() {
            return Err(self.replay.diverged("end"));
        }
        Ok(())
    }

    /// Passes over what is left of the record; whether that is more than the rest of a message.
    fn skip_record(&mut self) -> bool {
        let mut more = false;
        for event in self.replay.give_up() {
            match event {
                SessionEvent::GenerationStarted { segment, options, .. } => {
                    more = true;
                    self.writing = Some(Writing::new(segment, *options));
                }
                SessionEvent::GenerationTokens { ids, .. } => {
                    if let Some(writing) = &mut self.writing {
                        writing.sampled.extend(ids);
                    }
                }
                SessionEvent::GenerationFinished { .. } => self.writing = None,
                _ => more = true,
            }
        }
        more
    }

    async fn close_message(&mut self) -> Result<(), Error> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        if writing.ended.is_some() {
            self.writing = None;
            return Ok(());
        }
        if let Some(mut events) = writing.events.take() {
            self.session.host.scheduler.cancel(&self.session.id)?;
            let mut late: (Vec<u32>, String) = Default::default();
            while let Some(event) = events.recv().await {
                match event {
                    GenerationEvent::Token { id, text } => {
                        late.0.push(id);
                        late.1.push_str(&text);
                    }
                    GenerationEvent::Started { .. } => {}
                    GenerationEvent::Done { .. } | GenerationEvent::Failed(_) => break,
                }
            }
            if !late.0.is_empty() {
                self.write_tokens(late.0, late.1).await?;
            }
        }
        self.finish_message(Finish::Cancelled, None).await?;
        self.writing = None;
        Ok(())
    }
}
