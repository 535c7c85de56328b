//! Making room: admission in turn, eviction of idle sessions, stepping back.

use std::sync::Arc;

use kernels::backend::Backend;

use super::tenants::{Admission, Leaving, Tenant};
use super::worker::{Job, Phase, Purpose, Worker, busy};
use super::{KvTransition, Reply};
use crate::error::{Error, ErrorKind};
use crate::kv::state::{KvEvent, KvState};
use crate::kv::table::Need;

/// One who may be evicted.
pub(super) struct Victim {
    /// What keeping it is worth.
    pub price: f64,
    pub session: Arc<str>,
}

/// Whether a job waits for pages. A restore ahead of a return never does.
fn waits(job: &Job) -> bool {
    matches!(job.phase, Phase::Waiting) && !matches!(job.purpose, Purpose::Prefetch)
}

impl<B: Backend> Worker<B> {
    /// Admits waiting jobs: tenants in turn, and the oldest first within one. A job that finds no room on the device keeps
    /// all others waiting, so that none is overtaken for ever; one that finds none within its tenant's quota keeps its
    /// tenant's waiting.
    pub(super) fn admit(&mut self) {
        // A restore ahead of a return never waits: one that was given up is forgotten.
        self.jobs.retain(|job| !matches!((&job.purpose, &job.phase), (Purpose::Prefetch, Phase::Waiting)));
        self.turns.waiting(self.jobs.iter().filter(|job| waits(job)).map(|job| &job.tenant));
        let mut full: Vec<Tenant> = Vec::new();
        while let Some(tenant) = self.turns.next(&full) {
            let own = |job: &Job| waits(job) && job.tenant == tenant;
            let Some(index) = self.jobs.iter().position(own) else {
                full.push(tenant);
                continue;
            };
            match self.admit_job(index) {
                Ok(Admission::Admitted) => self.turns.taken(&tenant),
                Ok(Admission::TenantFull) => full.push(tenant),
                Ok(Admission::DeviceFull) => return,
                Err(error) => self.fail_job(index, error),
            }
        }
    }

    /// Gives a job its pages, if they can be had now.
    pub(super) fn admit_job(&mut self, index: usize) -> Result<Admission, Error> {
        let session = Arc::clone(&self.jobs[index].session);
        if self.sequences.get(&session).is_some_and(|sequence| {
            !sequence.cuts.is_empty() && self.fits(&session, sequence.tokens.len() + 1).is_err()
        }) {
            // The whole history would not fit, what is left of it may.
            self.make_cuts(&session);
        }
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
        self.note_resident(&session);
        self.fits(&session, tokens)?;
        let need = self.need(&session, tokens);
        if !self.reserve(&session, need)? {
            let full = self.over_quota(&session, need) > 0;
            return Ok(if full { Admission::TenantFull } else { Admission::DeviceFull });
        }
        if self.jobs[index].admission.is_none() {
            self.admissions += 1;
            self.jobs[index].admission = Some(self.admissions);
        }
        let state = self.sequences.get(&session).map_or(KvState::None, |sequence| sequence.state);
        if state.is_resident() || state == KvState::None {
            self.begin_running(index);
        } else {
            self.begin_restore(index)?;
        }
        Ok(Admission::Admitted)
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
            return self.fits_quota(session, tokens);
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

    /// Makes a table hold what is needed, evicting idle sessions where needed: within the quota of its tenant only the tenant's
    /// own. `Ok(false)`: no room now.
    pub(super) fn reserve(&mut self, session: &Arc<str>, need: Need) -> Result<bool, Error> {
        let wanted = |worker: &Self| {
            worker
                .sequences
                .get(session)
                .map_or(0, |sequence| sequence.table.pages_wanted(&worker.pool, need))
        };
        if !self.make_tenant_room(session, need) {
            return Ok(false);
        }
        while wanted(self) > self.pool.free() {
            if wanted(self) <= self.pool.free() + self.evictable_pages(session) {
                let mut shares = self.device_shares(Some((session, wanted(self))));
                let mut leaving = Leaving::new(self.victims(session).into_iter());
                while wanted(self) > self.pool.free()
                    && let Some((tenant, victim)) = leaving.next(&shares)
                {
                    let free = self.pool.free();
                    self.evict(&victim.session, "pressure");
                    shares.left(&tenant, (self.pool.free() - free) as u64);
                }
                break;
            }
            // A return that is only foreseen yields to one that has come.
            if !self.give_up_prefetch(session, None) {
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
        if sequence.table.pages_wanted(&self.pool, need) > self.pool.free()
            || self.over_quota(session, need) > 0
        {
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

    /// Who may be evicted, by tenant, the cheapest first: those without a job before those that wait, then by the price
    /// of the idle policy.
    pub(super) fn victims(&self, keep: &str) -> Vec<(Tenant, Victim)> {
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
        victims
            .into_iter()
            .map(|(_, price, sequence)| {
                (sequence.tenant.clone(), Victim { price, session: Arc::clone(&sequence.id) })
            })
            .collect()
    }

    /// Saves what is not saved, then drops the device copy.
    pub(super) fn evict(&mut self, session: &Arc<str>, reason: &str) -> Option<KvTransition> {
        let begun = self.clock.monotonic();
        let sequence = self.sequences.get(session)?;
        let computed = sequence.computed;
        let mut kept = computed > 0 && self.policy.saves();
        let worth = if kept { computed } else { 0 };
        let mut unsaved = sequence.chunks(worth);
        for chunk in unsaved.drain(..sequence.save_asked.min(unsaved.len())) {
            // From now on the copy in host memory is the nearest.
            self.host.touch(&chunk.id);
        }
        if let Some(sequence) = self.sequences.get_mut(session) {
            sequence.saved_end = 0;
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

    /// Makes room for a running job's next rows, in the end by letting the running job that was admitted last step back: of
    /// its own tenant, where the quota is what is short. `Ok(false)`: this job stepped back itself.
    pub(super) fn grow(&mut self, session: &Arc<str>, tokens: usize) -> Result<bool, Error> {
        self.fits(session, tokens)?;
        let need = self.need(session, tokens);
        while !self.reserve(session, need)? {
            let tenant = (self.over_quota(session, need) > 0).then(|| self.tenant_of(session));
            let among = |job: &Job| tenant.as_ref().is_none_or(|tenant| job.tenant == *tenant);
            let own = self.job(session);
            let alone = self.jobs.iter().filter(|job| among(job)).count() == 1;
            let running = |index: &usize| {
                let job = &self.jobs[*index];
                matches!(job.phase, Phase::Running) && among(job)
            };
            let youngest =
                (0..self.jobs.len()).filter(running).max_by_key(|index| self.jobs[*index].admission);
            match youngest {
                Some(index) if Some(index) != own || !alone => {
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
