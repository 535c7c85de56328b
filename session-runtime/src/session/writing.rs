//! A message of the model inside a turn: begun, streamed, ended, each step durable before it is seen
//! (I6), and continued after an interruption from the tokens that were sampled.

use std::collections::VecDeque;
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
    /// Pieces of the message that are on record, not given to the driver again yet.
    recorded: VecDeque<String>,
    /// Tokens on record.
    sampled: Vec<u32>,
    /// How the message ended, when that is on record.
    finished: Option<Finish>,
    events: Option<UnboundedReceiver<GenerationEvent>>,
    usage: Usage,
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
        let call = self.next_call();
        if !self.replay.is_empty() {
            return self.replay_generation(options);
        }
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
        self.session.host.scheduler.append(&self.session.id, ids)?;
        self.last_written = Some(segment.clone());
        self.writing = Some(Writing {
            segment,
            options,
            recorded: VecDeque::new(),
            sampled: Vec::new(),
            finished: None,
            events: None,
            usage: Usage::default(),
        });
        self.ask_scheduler()
    }

    /// Takes a begun message from the record.
    fn replay_generation(&mut self, options: GenerateOptions) -> Result<(), Error> {
        let segment = match self.replay.pop_front() {
            Some(SessionEvent::GenerationStarted { segment, options: recorded, .. })
                if *recorded == options =>
            {
                segment
            }
            _ => return Err(self.diverged("generate")),
        };
        let mut writing = Writing {
            segment: segment.clone(),
            options,
            recorded: VecDeque::new(),
            sampled: Vec::new(),
            finished: None,
            events: None,
            usage: Usage::default(),
        };
        while let Some(SessionEvent::GenerationTokens { ids, text, .. }) =
            self.replay.pop_front_if(|event| matches!(event, SessionEvent::GenerationTokens { .. }))
        {
            writing.sampled.extend(ids);
            // A live message gives no empty pieces either.
            if !text.is_empty() {
                writing.recorded.push_back(text);
            }
        }
        if let Some(SessionEvent::GenerationFinished { finish, .. }) =
            self.replay.pop_front_if(|event| matches!(event, SessionEvent::GenerationFinished { .. }))
        {
            self.next_call();
            writing.finished = Some(finish);
        }
        self.last_written = Some(segment);
        self.writing = Some(writing);
        Ok(())
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
            tokenizer: Arc::clone(&host.tokenizer),
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
            Err(_) => {
                // The history stays well formed: what was written of the message is closed.
                if let Err(error) = self.finish_message(Finish::Cancelled).await {
                    tracing::warn!(session = %self.session.id, %error, "message not closed");
                }
                self.writing = None;
            }
        }
        outcome
    }

    async fn read_chunk(&mut self) -> Result<Chunk, Error> {
        let Some(writing) = &mut self.writing else {
            return Err(Error::invalid("no_generation", "there is no message being written"));
        };
        if let Some(text) = writing.recorded.pop_front() {
            return Ok(Chunk::Text(text));
        }
        if let Some(finish) = writing.finished {
            return Ok(Chunk::Done(finish));
        }
        if writing.events.is_none() {
            self.ask_scheduler()?;
        }
        loop {
            let (ids, text, end) = self.receive().await?;
            if !ids.is_empty() || !text.is_empty() {
                self.write_tokens(ids, text.clone()).await?;
            }
            if let Some(finish) = end {
                self.finish_message(finish).await?;
                if text.is_empty() {
                    return Ok(Chunk::Done(finish));
                }
                if let Some(writing) = &mut self.writing {
                    writing.finished = Some(finish);
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
                GenerationEvent::Failed(error) => return Err(error),
            }
        }
    }

    async fn write_tokens(&mut self, ids: Vec<u32>, text: String) -> Result<(), Error> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        writing.sampled.extend_from_slice(&ids);
        let event = SessionEvent::GenerationTokens {
            turn: self.turn.clone(),
            segment: writing.segment.clone(),
            kind: writing.options.kind,
            ids,
            text,
        };
        self.session.write(event).await?;
        Ok(())
    }

    /// Closes the message's frame.
    async fn finish_message(&mut self, finish: Finish) -> Result<(), Error> {
        let call = self.next_call();
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let ids = self.session.host.encode_closing(&writing.options)?;
        let sampled = writing.sampled.len() as u64;
        writing.usage.output_tokens = sampled;
        writing.usage.reasoning_tokens =
            if writing.options.kind == SegmentKind::Reasoning { sampled } else { 0 };
        let event = SessionEvent::GenerationFinished {
            call,
            turn: self.turn.clone(),
            segment: writing.segment.clone(),
            finish,
            ids: ids.clone(),
            usage: writing.usage,
        };
        self.session.write(event).await?;
        self.session.host.scheduler.append(&self.session.id, ids)
    }

    /// Where the message that is or was last written stands.
    pub fn generation(&self) -> Option<SegmentRange> {
        let id = self.last_written.as_deref()?;
        let record = self.session.record();
        let segment = record.segment(id)?;
        Some(SegmentRange { id: segment.id.clone(), start: segment.start, end: segment.end })
    }

    /// Ends a message that its driver left unfinished, so that the history stays well formed.
    pub(super) async fn abandon_message(&mut self) -> Result<(), Error> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        if writing.finished.is_some() {
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
        self.finish_message(Finish::Cancelled).await?;
        self.writing = None;
        Ok(())
    }
}
