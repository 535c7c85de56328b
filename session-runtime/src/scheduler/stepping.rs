//! Steps: one forward pass over the rows of every running session, and what the logits lead to.

use std::sync::Arc;

use kernels::backend::Backend;

use super::generation::Outcome;
use super::sequence::Sequence;
use super::tenants::Tenant;
use super::trace::Taken;
use super::worker::{Phase, Purpose, Worker};
use super::{Finish, GenerationEvent, Speculation};
use crate::engine::{LogitRows, SequenceRows};
use crate::error::Error;
use crate::kv::pool::PagePool;
use crate::kv::state::{KvEvent, KvState};

/// Rows of one session in a step.
struct Share {
    session: Arc<str>,
    /// Rows of tokens of the history.
    rows: usize,
    /// Tokens guessed to follow, a row each.
    guess: Vec<u32>,
}

/// What a row of logits led to.
enum Row {
    /// The token belongs to the history; the message goes on.
    Token(u32),
    /// The message is over.
    Over,
}

impl<B: Backend> Worker<B> {
    /// A job whose history is on the device begins to compute.
    pub(super) fn begin_running(&mut self, index: usize) {
        let session = Arc::clone(&self.jobs[index].session);
        if matches!(self.jobs[index].purpose, Purpose::Restore { .. }) {
            self.already_resident(index, &session);
            return;
        }
        if let Some(sequence) = self.sequences.get_mut(&session) {
            // Logits need at least the last token's row; its K and V come out the same again.
            sequence.computed = sequence.computed.min(sequence.tokens.len().saturating_sub(1));
            if sequence.state != KvState::Active {
                self.change(&session, KvEvent::Activate, "turn", 0, 0.0);
            }
        }
        self.note_resident(&session);
        self.jobs[index].phase = Phase::Running;
    }

    /// A restore on command found everything on the device.
    fn already_resident(&mut self, index: usize, session: &str) {
        let report = self.sequences.get(session).map(|sequence| {
            let tokens = sequence.computed as u64;
            crate::restore::report::RestoreReport {
                tokens,
                tokens_resident: tokens,
                layers: self.engine.config().layers as u32,
                ..Default::default()
            }
        });
        if let Some(mut job) = self.jobs.remove(index)
            && let Purpose::Restore { reply } = &mut job.purpose
            && let (Some(reply), Some(report)) = (reply.take(), report)
        {
            let _ = reply.send(Ok(report));
        }
    }

    /// Runs one step; whether there was one.
    pub(super) fn step(&mut self) -> bool {
        self.finish_exhausted();
        let mut shares = self.shares();
        if shares.is_empty() {
            return false;
        }
        self.speculate(&mut shares);
        // What is still on its way to the device is no time of this step's.
        let ready = self.engine.finish();
        let begun = self.clock.monotonic();
        if let Err(error) = ready.and_then(|()| self.run_rows(&shares)) {
            for share in &shares {
                if let Some(index) = self.job(&share.session) {
                    self.fail_job(index, error.clone());
                }
            }
            return true;
        }
        let seconds = self.since(begun);
        self.learn(&shares, seconds);
        let tokens = self.take_logits(&shares);
        if let [Share { rows: 1, guess, .. }] = shares.as_slice() {
            match guess.len() {
                0 => self.gain.single(seconds),
                guessed => self.gain.guessed(seconds, guessed, tokens),
            }
        }
        true
    }

    /// Ends messages that are over before their first token.
    fn finish_exhausted(&mut self) {
        let mut index = 0;
        while index < self.jobs.len() {
            let job = &mut self.jobs[index];
            let over = match (&job.phase, &mut job.purpose) {
                (Phase::Running, Purpose::Message { generation, started: false, .. }) => {
                    generation.over().map(|finish| (finish, generation.rest()))
                }
                _ => None,
            };
            match over {
                Some((finish, text)) => {
                    self.trace.no_token(&self.jobs[index].session, Taken::Over);
                    self.finish_message(index, finish, text);
                }
                None => index += 1,
            }
        }
    }

    /// One row for each decoding session, the rest of the step for the one that reads its prompt.
    fn shares(&mut self) -> Vec<Share> {
        let running: Vec<Arc<str>> = self
            .jobs
            .iter()
            .filter(|job| matches!(job.phase, Phase::Running))
            .map(|job| Arc::clone(&job.session))
            .collect();
        let pending = |worker: &Self, session: &str| {
            worker.sequences.get(session).map_or(0, |sequence| sequence.tokens.len() - sequence.computed)
        };
        let mut left = self.engine.step_rows();
        let mut shares: Vec<Share> = Vec::new();
        let decoding = running.iter().filter(|session| pending(self, session) == 1).count().min(left);
        let mut prompt_rows = left - decoding;
        let reads = self.whose_prompt(&running);
        if decoding > 0 {
            let bounded = reads.as_deref().map_or(prompt_rows, |session| self.bounded_rows(session));
            prompt_rows = prompt_rows.min(bounded);
        }
        for session in running {
            let rows = match pending(self, &session) {
                1 => 1,
                // Only one prompt a step: the next one waits for this one's end.
                count if Some(&session) == reads.as_ref() => count.min(prompt_rows),
                _ => 0,
            };
            if rows == 0 || rows > left || !self.is_running(&session) {
                continue;
            }
            let end = self.sequences.get(&session).map_or(0, |sequence| sequence.computed + rows);
            match self.grow(&session, end) {
                Ok(true) => {
                    left -= rows;
                    shares.push(Share { session, rows, guess: Vec::new() });
                }
                Ok(false) => {}
                Err(error) => {
                    if let Some(index) = self.job(&session) {
                        self.fail_job(index, error);
                    }
                }
            }
        }
        // Growing may have made a session step back that already had its share.
        shares.retain(|share| self.is_running(&share.session));
        shares
    }

    /// Whose prompt is read next: the one under way to its end, then that of the oldest of the next tenant.
    fn whose_prompt(&mut self, running: &[Arc<str>]) -> Option<Arc<str>> {
        let reads = |session: &&Arc<str>| {
            self.sequences.get(*session).is_some_and(|sequence| sequence.tokens.len() - sequence.computed > 1)
        };
        let reading: Vec<(Tenant, &Arc<str>)> =
            running.iter().filter(reads).map(|session| (self.tenant_of(session), session)).collect();
        if let Some((_, session)) = reading.iter().find(|(_, session)| Some(*session) == self.prompt.as_ref())
        {
            return Some(Arc::clone(session));
        }
        self.reading.waiting(reading.iter().map(|(tenant, _)| tenant));
        let tenant = self.reading.next(&[]);
        let next = reading.iter().find(|(other, _)| Some(other) == tenant.as_ref());
        self.prompt = next.map(|(_, session)| Arc::clone(session));
        if let Some(tenant) = tenant {
            self.reading.taken(&tenant);
        }
        self.prompt.clone()
    }

    /// Whether somebody waits for its next token.
    pub(super) fn somebody_decodes(&self) -> bool {
        let decodes = |session: &str| {
            self.sequences.get(session).is_some_and(|sequence| sequence.tokens.len() - sequence.computed == 1)
        };
        self.jobs.iter().any(|job| matches!(job.phase, Phase::Running) && decodes(&job.session))
    }

    /// Rows of a session's history that a step has time for while others wait for their next token.
    pub(super) fn bounded_rows(&self, session: &str) -> usize {
        let context = self.sequences.get(session).map_or(0, |sequence| sequence.computed.max(sequence.known));
        let layers = self.engine.config().layers;
        self.costs.compute.rows_within(self.options.step_seconds, layers, context as f64)
    }

    /// Adds a guess of the next tokens where one session decodes alone.
    fn speculate(&mut self, shares: &mut [Share]) {
        let [Share { session, rows: 1, guess }] = shares else { return };
        if self.options.speculation == Speculation::Off {
            return;
        }
        let Some(index) = self.job(session) else { return };
        let Purpose::Message { generation, .. } = &mut self.jobs[index].purpose else { return };
        let Some(sequence) = self.sequences.get(session) else { return };
        let room = self.options.context_length.saturating_sub(sequence.tokens.len());
        let mut found = generation.guess(&sequence.tokens);
        if !found.is_empty() {
            self.trace.guessed(session, found.len());
        }
        found.truncate(room.min(self.engine.step_rows() - 1));
        let end = sequence.tokens.len() + found.len();
        if found.is_empty() || !self.gain.wanted(self.options.speculation) {
            return;
        }
        // A guess is not worth anyone's pages.
        if matches!(self.reserve_free(session, end), Ok(true)) {
            *guess = found;
        }
    }

    fn is_running(&self, session: &str) -> bool {
        self.job(session).is_some_and(|index| matches!(self.jobs[index].phase, Phase::Running))
    }

    fn run_rows(&mut self, shares: &[Share]) -> Result<(), Error> {
        for share in shares {
            if let Some(sequence) = self.sequences.get_mut(&share.session) {
                sequence.tokens.extend(&share.guess);
            }
        }
        let outcome = self.run_appended(shares);
        for share in shares {
            if let Some(sequence) = self.sequences.get_mut(&share.session) {
                sequence.tokens.truncate(sequence.tokens.len() - share.guess.len());
            }
        }
        outcome
    }

    /// Runs the rows of histories at whose ends the guesses stand.
    fn run_appended(&mut self, shares: &[Share]) -> Result<(), Error> {
        let mut sequences = Vec::with_capacity(shares.len());
        for share in shares {
            let sequence =
                self.sequences.get(&share.session).ok_or_else(|| Error::no_session(&share.session))?;
            let end = sequence.computed + share.rows + share.guess.len();
            let logits = match (end == sequence.tokens.len(), share.guess.is_empty()) {
                (true, true) => LogitRows::Last,
                (true, false) => LogitRows::All,
                (false, _) => LogitRows::None,
            };
            sequences.push(SequenceRows {
                tokens: &sequence.tokens[sequence.computed..end],
                start: sequence.computed,
                tables: &sequence.table,
                logits,
            });
        }
        self.logits.clear();
        let begun = self.clock.monotonic();
        let layers = self.engine.config().layers;
        let forward = self.engine.forward(&sequences, layers, &mut self.logits);
        // A device may have answered before it was done.
        let outcome = forward.and_then(|()| self.engine.finish());
        self.forward_seconds += self.clock.monotonic().saturating_sub(begun).as_secs_f64();
        outcome
    }

    fn learn(&mut self, shares: &[Share], seconds: f64) {
        let rows: usize = shares.iter().map(|share| share.rows + share.guess.len()).sum();
        let context: f64 = shares
            .iter()
            .filter_map(|share| Some((self.sequences.get(&share.session)?.computed, share.rows)))
            .map(|(computed, rows)| (computed as f64 + rows as f64 / 2.0) * rows as f64)
            .sum();
        self.costs.compute.observe(rows, self.engine.config().layers, context / rows as f64, seconds);
        self.tokens_computed += rows as u64;
    }

    /// Samples from the logits of every session that has some; the tokens this gave.
    fn take_logits(&mut self, shares: &[Share]) -> usize {
        let vocab = self.engine.config().vocab;
        let mut logits = std::mem::take(&mut self.logits);
        let mut rows = logits.chunks_exact_mut(vocab);
        let mut tokens = 0;
        for share in shares {
            let Some(sequence) = self.sequences.get_mut(&share.session) else { continue };
            advance(sequence, &mut self.pool, share.rows);
            let read = sequence.computed == sequence.tokens.len();
            if !read && let Some(index) = self.job(&share.session) {
                self.jobs[index].computed_tokens += share.rows as u64;
            }
            let mut guess = share.guess.iter().copied();
            let mut going = read;
            for row in rows.by_ref().take(if read { 1 + share.guess.len() } else { 0 }) {
                if !going {
                    // Behind the first wrong guess.
                    continue;
                }
                tokens += 1;
                going = match self.take_row(share, row) {
                    Row::Token(id) if guess.next() == Some(id) => {
                        // The guess was right: its row is this token's.
                        self.trace.guessed_right();
                        if let Some(sequence) = self.sequences.get_mut(&share.session) {
                            advance(sequence, &mut self.pool, 1);
                        }
                        true
                    }
                    _ => false,
                };
            }
            self.note_resident(&share.session);
        }
        drop(rows);
        logits.clear();
        self.logits = logits;
        tokens
    }

    /// Samples from one session's logits.
    fn take_row(&mut self, share: &Share, logits: &mut [f32]) -> Row {
        let Some(index) = self.job(&share.session) else { return Row::Over };
        let job = &mut self.jobs[index];
        let (Purpose::Message { generation, events, started, input_tokens }, Some(sequence)) =
            (&mut job.purpose, self.sequences.get_mut(&share.session))
        else {
            return Row::Over;
        };
        if !*started {
            *started = true;
            job.computed_tokens += share.rows as u64;
            let input_tokens = *input_tokens as u64;
            let cached_tokens = input_tokens.saturating_sub(job.computed_tokens);
            self.tokens_reused += cached_tokens;
            self.trace.started(&share.session, input_tokens, cached_tokens);
            let _ = events.send(GenerationEvent::Started { input_tokens, cached_tokens });
        }
        match generation.next(logits, &sequence.tokens) {
            Ok(Outcome::Token { id, text }) => {
                sequence.tokens.push(id);
                let full = sequence.tokens.len() >= self.options.context_length;
                let gone = events.send(GenerationEvent::Token { id, text }).is_err();
                self.trace.token(&share.session, id, if gone { Taken::Unheard } else { Taken::Token });
                if full {
                    let text = generation.rest();
                    self.finish_message(index, Finish::MaxTokens, text);
                } else if gone {
                    self.finish_message(index, Finish::Cancelled, String::new());
                } else {
                    return Row::Token(id);
                }
            }
            Ok(Outcome::Last { id, text, finish }) => {
                sequence.tokens.push(id);
                self.trace.token(&share.session, id, Taken::Last);
                let _ = events.send(GenerationEvent::Token { id, text });
                self.finish_message(index, finish, String::new());
            }
            Ok(Outcome::End { text, finish }) => {
                self.trace.no_token(&share.session, Taken::End);
                self.finish_message(index, finish, text);
            }
            Err(error) => {
                self.trace.no_token(&share.session, Taken::Failed);
                self.fail_job(index, error);
            }
        }
        Row::Over
    }
}

/// Counts `rows` more tokens of a history as computed.
fn advance(sequence: &mut Sequence, pool: &mut PagePool, rows: usize) {
    sequence.computed += rows;
    sequence.known = sequence.known.max(sequence.computed);
    sequence.table.trim(pool, sequence.computed);
}
