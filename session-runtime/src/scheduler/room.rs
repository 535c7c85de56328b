//! Making room: admission in order, eviction of idle sessions, stepping back.

use std::sync::Arc;

use kernels::backend::Backend;

use super::worker::{Phase, Purpose, Worker, busy};
use super::{KvTransition, Reply};
use crate::error::{Error, ErrorKind};
use crate::kv::chunk::chunks;
use crate::kv::state::{KvEvent, KvState};
use crate::kv::table::Need;

impl<B: Backend> Worker<B> {
    /// Admits waiting jobs, oldest first. A job that finds no room keeps younger ones waiting, so that
    /// none is overtaken for ever.
    pub(super) fn admit(&mut self) {
        // A restore ahead of a return never waits: one that was given up is forgotten.
        self.jobs.retain(|job| !matches!((&job.purpose, &job.phase), (Purpose::Prefetch, Phase::Waiting)));
        let mut index = 0;
        while index < self.jobs.len() {
            let given_up = matches!(self.jobs[index].purpose, Purpose::Prefetch);
            if given_up || !matches!(self.jobs[index].phase, Phase::Waiting) {
                index += 1;
                continue;
            }
            match self.admit_job(index) {
                Ok(true) => index += 1,
                Ok(false) => return,
                Err(error) => self.fail_job(index, error),
            }
        }
    }

    /// Gives a job its pages. `Ok(false)`: not now.
    pub(super) fn admit_job(&mut self, index: usize) -> Result<bool, Error> {
        let session = Arc::clone(&self.jobs[index].session);
        let Some(sequence) = self.sequences.get_mut(&session) else {
            return Err(Error::no_session(&session));
        };
        let tokens = match self.jobs[index].purpose {
            Purpose::Message { .. } => {
                // Logits need at least the last token's row.
                let last = sequence.tokens.len().saturating_sub(1);
                if sequence.state.is_resident() || sequence.state == KvState::None {
                    sequence.computed = sequence.computed.min(last);
                }
                sequence.tokens.len() + 1
            }
            Purpose::Restore { .. } | Purpose::Prefetch => sequence.known,
        };
        self.fits(&session, tokens)?;
        let need = self.need(&session, tokens);
        if !self.reserve(&session, need)? {
            return Ok(false);
        }
        let state = self.sequences.get(&session).map_or(KvState::None, |sequence| sequence.state);
        if state.is_resident() || state == KvState::None {
            self.begin_running(index);
        } else {
            self.begin_restore(index)?;
        }
        Ok(true)
    }

    /// What a job that will have `tokens` tokens needs of its table.
    fn need(&self, session: &str, tokens: usize) -> Need {
        match self.sequences.get(session) {
            Some(sequence) if sequence.state.is_resident() || sequence.state == KvState::None => {
                Need::Write { written: sequence.computed, tokens }
            }
            sequence => Need::Restore { known: sequence.map_or(0, |sequence| sequence.known), tokens },
        }
    }

    /// Refuses what no eviction could make room for.
    fn fits(&self, session: &str, tokens: usize) -> Result<(), Error> {
        let pages = self.shape.pages_most(tokens);
        if pages <= self.pool.total() {
            return Ok(());
        }
        let page_bytes = self.engine.pool_spec().page_bytes() as u64;
        Err(Error::new(
            ErrorKind::Limit,
            "kv_capacity",
            format!(
                "session '{session}' needs {} bytes of KV for {tokens} tokens and the device budget is {} bytes: \
                 start with a larger --device-budget",
                pages as u64 * page_bytes,
                self.pool.total() as u64 * page_bytes
            ),
        ))
    }

    /// Makes a table hold what is needed, evicting idle sessions where needed. `Ok(false)`: no room now.
    pub(super) fn reserve(&mut self, session: &Arc<str>, need: Need) -> Result<bool, Error> {
        let wanted = |worker: &Self| {
            worker
                .sequences
                .get(session)
                .map_or(0, |sequence| sequence.table.pages_wanted(&worker.pool, need))
        };
        while wanted(self) > self.pool.free() {
            if wanted(self) <= self.pool.free() + self.evictable_pages(session) {
                for (_, victim) in self.victims(session) {
                    if wanted(self) <= self.pool.free() {
                        break;
                    }
                    self.evict(&victim, "pressure");
                }
                break;
            }
            // A return that is only foreseen yields to one that has come.
            if !self.give_up_prefetch(session) {
                return Ok(false);
            }
        }
        if wanted(self) > self.pool.free() {
            return Ok(false);
        }
        let Some(sequence) = self.sequences.get_mut(session) else { return Ok(false) };
        let copies = sequence.table.prepare_for(&mut self.pool, need).map_err(Error::internal)?;
        for copy in copies {
            self.engine.copy_page(copy.source, copy.target)?;
        }
        Ok(true)
    }

    /// As [`Worker::reserve`] for a history of `tokens` tokens, from free pages alone: nothing is evicted for it.
    pub(super) fn reserve_free(&mut self, session: &Arc<str>, tokens: usize) -> Result<bool, Error> {
        let need = self.need(session, tokens);
        let Some(sequence) = self.sequences.get(session) else { return Ok(false) };
        if sequence.table.pages_wanted(&self.pool, need) > self.pool.free() {
            return Ok(false);
        }
        self.reserve(session, need)
    }

    /// Whether a session's pages may be taken: it has no job, or its job waits and has begun nothing. A
    /// running or restoring session is never a victim (I9).
    fn is_evictable(&self, session: &str) -> bool {
        self.job(session).is_none_or(|index| matches!(self.jobs[index].phase, Phase::Waiting))
    }

    /// Pages that evicting every victim could free at most.
    fn evictable_pages(&self, keep: &str) -> usize {
        self.sequences
            .values()
            .filter(|sequence| &*sequence.id != keep && self.is_evictable(&sequence.id))
            .map(|sequence| sequence.table.all().count())
            .sum()
    }

    /// Who may be evicted and what keeping each is worth, the cheapest first: those without a job before those that
    /// wait, then by the price of the idle policy.
    pub(super) fn victims(&self, keep: &str) -> Vec<(f64, Arc<str>)> {
        let now = self.clock.monotonic();
        let mut victims: Vec<_> = self
            .sequences
            .values()
            .filter(|sequence| {
                &*sequence.id != keep && !sequence.table.is_empty() && self.is_evictable(&sequence.id)
            })
            .map(|sequence| (self.job(&sequence.id).is_some(), self.price(sequence, now), sequence))
            .collect();
        victims.sort_by(|(waits, price, sequence), (other_waits, other_price, other)| {
            waits
                .cmp(other_waits)
                .then_with(|| price.total_cmp(other_price))
                .then_with(|| sequence.last_used_ms.cmp(&other.last_used_ms))
                .then_with(|| sequence.id.cmp(&other.id))
        });
        victims.into_iter().map(|(_, price, sequence)| (price, Arc::clone(&sequence.id))).collect()
    }

    /// Saves what is not saved, then drops the device copy.
    pub(super) fn evict(&mut self, session: &Arc<str>, reason: &str) -> Option<KvTransition> {
        let begun = self.clock.monotonic();
        let sequence = self.sequences.get(session)?;
        let computed = sequence.computed;
        let mut kept = computed > 0 && self.policy.saves();
        let worth = if kept { computed } else { 0 };
        let mut unsaved = chunks(&sequence.contract, &sequence.tokens[..worth]);
        for chunk in unsaved.drain(..sequence.save_asked.min(unsaved.len())) {
            // From now on the copy in host memory is the nearest.
            self.host.touch(&chunk.id);
        }
        let mut bytes = 0;
        for chunk in unsaved {
            match self.save_chunk(session, chunk) {
                Ok(saved) => bytes += saved,
                Err(error) => {
                    self.notice_loss(&error);
                    tracing::warn!(%session, %error, "cells not saved on eviction");
                    kept = false;
                    break;
                }
            }
        }
        let sequence = self.sequences.get_mut(session)?;
        sequence.known = sequence.known.max(computed);
        sequence.table.truncate(&mut self.pool, 0);
        sequence.computed = 0;
        let event = if kept && sequence.state.is_resident() { KvEvent::Evict } else { KvEvent::Drop };
        let ms = self.since(begun) * 1e3;
        self.change(session, event, reason, bytes, ms)
    }

    /// Evicts on command; answers once the cells are on disk, at once where they are and the device holds none.
    pub(super) fn evict_on_command(&mut self, session: &Arc<str>, reply: Reply<KvTransition>) {
        let begun = self.clock.monotonic();
        self.drop_prefetch(session);
        let outcome = match self.sequences.get(session) {
            None => Err(Error::no_session(session)),
            Some(_) if self.job(session).is_some() => Err(busy(session)),
            // The idle policy may have been quicker: what was asked for holds.
            Some(sequence) if sequence.state == KvState::Evicted => Ok(KvTransition {
                from: KvState::Evicted,
                to: KvState::Evicted,
                reason: "command".to_owned(),
                tokens: sequence.saved_tokens() as u64,
                bytes: 0,
                ms: 0.0,
            }),
            Some(sequence) if !sequence.state.is_resident() => Err(Error::new(
                ErrorKind::Conflict,
                "not_resident",
                format!("session '{session}' has no KV on the device: it is {}", sequence.state.as_str()),
            )),
            Some(_) => {
                self.evict(session, "command").ok_or_else(|| Error::internal("the eviction changed nothing"))
            }
        };
        match outcome {
            Ok(change) => {
                self.evicting.push((Arc::clone(session), change, begun, reply));
                self.answer_evictions();
            }
            Err(error) => {
                let _ = reply.send(Err(error));
            }
        }
    }

    /// Answers eviction commands once nothing is under way to the tier.
    pub(super) fn answer_evictions(&mut self) {
        if self.saver.in_flight() > 0 {
            return;
        }
        let now = self.clock.monotonic();
        for (_, mut change, begun, reply) in self.evicting.drain(..) {
            change.ms = now.saturating_sub(begun).as_secs_f64() * 1e3;
            let _ = reply.send(Ok(change));
        }
    }

    /// Makes room for a running job's next rows, in the end by letting the youngest other running job
    /// step back. `Ok(false)`: this job stepped back itself.
    pub(super) fn grow(&mut self, session: &Arc<str>, tokens: usize) -> Result<bool, Error> {
        self.fits(session, tokens)?;
        let need = self.need(session, tokens);
        while !self.reserve(session, need)? {
            let running = |phase: &Phase| matches!(phase, Phase::Running);
            let own = self.job(session);
            let youngest = (0..self.jobs.len()).rev().find(|index| running(&self.jobs[*index].phase));
            match youngest {
                Some(index) if Some(index) != own || self.jobs.len() > 1 => {
                    let stepping_back = Arc::clone(&self.jobs[index].session);
                    self.evict(&stepping_back, "pressure");
                    self.jobs[index].phase = Phase::Waiting;
                    if Some(index) == own {
                        return Ok(false);
                    }
                }
                // Alone, with everything else evicted, and `fits` held: the pages are there.
                _ => return Err(Error::internal("no room for the only running session")),
            }
        }
        Ok(true)
    }
}
