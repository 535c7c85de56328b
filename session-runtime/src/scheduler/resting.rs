//! Sessions at rest: what the idle policy is told of them, when their KV leaves unasked, and when it is brought back ahead
//! of a return.

use std::sync::Arc;
use std::time::Duration;

use kernels::backend::Backend;

use super::idle::{RestReason, Resting};
use super::sequence::{Rest, Sequence};
use super::tenants::{Admission, Leaving, Tenant};
use super::worker::{Job, Phase, Purpose, Worker};
use crate::kv::codec::KvCodec;
use crate::kv::state::{KvEvent, KvState};
use crate::kv::table::Need;
use crate::restore::plan::RestoreMode;

/// How much dearer than its victims KV must be that is brought back ahead of a return: a guess that is little better than
/// another is not worth moving both.
const DEARER: f64 = 2.0;

impl<B: Backend> Worker<B> {
    /// The session will not generate for a while.
    pub(super) fn rest(&mut self, session: &Arc<str>, reason: RestReason) {
        let (now, now_ms) = (self.clock.monotonic(), self.clock.monotonic_ms());
        // A tool that ran until another rest began has ended.
        self.learn_rest(session, now);
        let Some(sequence) = self.sequences.get_mut(session) else { return };
        sequence.last_used_ms = now_ms;
        let word = reason.as_str();
        sequence.rest = Some(Rest { reason, since: now, prefetched: false });
        if sequence.state == KvState::Active {
            self.change(session, KvEvent::Rest, word, 0, 0.0);
        }
        if self.options.save_when_idle && self.policy.saves() {
            self.saver.enqueue(session);
        }
        self.keep_costs();
    }

    /// The session generates again.
    pub(super) fn wake(&mut self, session: &str) {
        self.learn_rest(session, self.clock.monotonic());
        let Some(sequence) = self.sequences.get_mut(session) else { return };
        sequence.superseded = false;
        // Who goes on from a fork leaves its source behind, until that goes on too.
        if let Some(source) = sequence.forked_from.take()
            && let Some(source) = self.sequences.get_mut(&source)
        {
            source.superseded = true;
        }
    }

    fn learn_rest(&mut self, session: &str, now: Duration) {
        if let Some(rest) = self.sequences.get_mut(session).and_then(|sequence| sequence.rest.take()) {
            self.policy.returned(&rest.reason, now.saturating_sub(rest.since).as_secs_f64());
        }
    }

    /// What the policy is told at `now` of a session whose KV has `bytes` bytes on the device, or would have.
    fn resting<'a>(&self, sequence: &'a Sequence, bytes: u64, now: Duration) -> Resting<'a> {
        let layers = self.engine.config().layers;
        let tokens = sequence.known.max(sequence.computed);
        let token_bytes = layers * self.engine.cell_bytes(1);
        let load = self.load_costs(sequence.codec).disk;
        let cells = layers * tokens.div_ceil(crate::kv::chunk::CHUNK_TOKENS);
        let raw = tokens * token_bytes;
        let moved = if sequence.codec == KvCodec::Lossless { self.costs.packed_bytes(raw) } else { raw };
        let move_seconds = load.seconds(cells, moved);
        let recompute = self.costs.compute.seconds(tokens, layers, tokens as f64 / 2.0);
        let saves = self.policy.saves();
        let unsaved = if saves { tokens.saturating_sub(sequence.saved_tokens()) } else { 0 };
        let begun = sequence
            .rest
            .as_ref()
            .map_or_else(|| Duration::from_millis(sequence.last_used_ms), |rest| rest.since);
        Resting {
            reason: sequence.rest.as_ref().map_or(&RestReason::EndOfTurn, |rest| &rest.reason),
            rested: now.saturating_sub(begun).as_secs_f64(),
            bytes,
            restore_seconds: if saves { recompute.min(move_seconds) } else { recompute },
            save_seconds: load.seconds(0, unsaved * token_bytes),
            move_seconds,
            ttl_seconds: sequence.idle_ttl_ms as f64 / 1e3,
            superseded: sequence.superseded,
        }
    }

    /// What the policy says of a session on the device: its price, its deadline, and how long it has rested.
    fn resident(&self, sequence: &Sequence, now: Duration) -> (f64, f64, f64) {
        let pages = sequence.table.all().count() - sequence.table.shared_pages(&self.pool);
        let resting = self.resting(sequence, (pages * self.engine.pool_spec().page_bytes()) as u64, now);
        (self.policy.price(&resting), self.policy.deadline(&resting), resting.rested)
    }

    /// What keeping a session on the device is worth.
    pub(super) fn price(&self, sequence: &Sequence, now: Duration) -> f64 {
        self.resident(sequence, now).0
    }

    /// Evicts sessions whose soft TTL has passed and, where the device is nearly full, the cheapest of those that are
    /// past the policy's deadline.
    pub(super) fn evict_expired(&mut self) {
        let now = self.clock.monotonic_ms();
        let expired: Vec<Arc<str>> = self
            .sequences
            .values()
            .filter(|sequence| {
                sequence.deadline_ms().is_some_and(|deadline| deadline <= now)
                    && self.job(&sequence.id).is_none()
            })
            .map(|sequence| Arc::clone(&sequence.id))
            .collect();
        for session in expired {
            self.evict(&session, "ttl");
        }
        self.evict_idle();
    }

    /// Frees pages ahead of need, from the high watermark down to the low one.
    fn evict_idle(&mut self) {
        let total = self.pool.total();
        let excess = self.watermarks.excess(total - self.pool.free(), total);
        if excess == 0 {
            return;
        }
        let now = self.clock.monotonic();
        let mut idle: Vec<(f64, Arc<str>, Tenant)> = self
            .sequences
            .values()
            .filter(|sequence| sequence.is_idle() && self.job(&sequence.id).is_none())
            .filter_map(|sequence| {
                let (price, deadline, rested) = self.resident(sequence, now);
                (rested >= deadline).then(|| (price, Arc::clone(&sequence.id), sequence.tenant.clone()))
            })
            .collect();
        idle.sort_by(|(a, first, _), (b, second, _)| a.total_cmp(b).then_with(|| first.cmp(second)));
        let enough = self.pool.free() + excess;
        let mut shares = self.device_shares(None);
        let mut leaving = Leaving::new(idle.into_iter().map(|(_, session, tenant)| (tenant, session)));
        while self.pool.free() < enough
            && let Some((tenant, session)) = leaving.next(&shares)
        {
            let free = self.pool.free();
            self.evict(&session, "idle");
            shares.left(&tenant, (self.pool.free() - free) as u64);
        }
    }

    /// Begins to bring KV back whose session is expected soon: into free pages, or those of sessions that are worth
    /// less. Never while someone waits.
    pub(super) fn prefetch_some(&mut self) {
        // One at a time: more of them would only share the tier.
        if self.lost.get().is_some() || self.jobs.iter().any(|job| !matches!(job.phase, Phase::Running)) {
            return;
        }
        let Some((price, session)) = self.next_return() else { return };
        if !self.room_below(&session, price) {
            return;
        }
        self.jobs.push_back(Job {
            tenant: self.tenant_of(&session),
            session: Arc::clone(&session),
            purpose: Purpose::Prefetch,
            phase: Phase::Waiting,
            // What nobody waits for takes no compute from those who do.
            mode: RestoreMode::Load,
            admission: None,
            computed_tokens: 0,
        });
        if let Some(rest) = self.sequences.get_mut(&session).and_then(|sequence| sequence.rest.as_mut()) {
            rest.prefetched = true;
        }
        let index = self.jobs.len() - 1;
        match self.admit_job(index) {
            Ok(Admission::Admitted) => {}
            Ok(Admission::TenantFull | Admission::DeviceFull) => {
                self.jobs.remove(index);
            }
            Err(error) => {
                tracing::debug!(%session, %error, "not brought back ahead of its return");
                self.fail_job(index, error);
            }
        }
    }

    /// The dearest of the sessions whose KV left and should be on its way back by now.
    fn next_return(&self) -> Option<(f64, Arc<str>)> {
        let now = self.clock.monotonic();
        let due = |sequence: &Sequence| {
            if sequence.state != KvState::Evicted
                || sequence.rest.as_ref().is_none_or(|rest| rest.prefetched)
                || self.job(&sequence.id).is_some()
            {
                return None;
            }
            let bytes = sequence.known * self.engine.cell_bytes(1) * self.engine.config().layers;
            let resting = self.resting(sequence, bytes as u64, now);
            let at = self.policy.prefetch(&resting)?;
            (resting.rested >= at).then(|| self.policy.price(&resting))
        };
        self.sequences
            .values()
            .filter_map(|sequence| Some((due(sequence)?, Arc::clone(&sequence.id))))
            .max_by(|(a, first), (b, second)| a.total_cmp(b).then_with(|| second.cmp(first)))
    }

    /// Makes room for a session to come back by evicting idle ones that are worth clearly less than `price`, as far as the
    /// order of tenants has these leave first. Evicts nobody where that is not enough, or for a tenant whose quota is full.
    fn room_below(&mut self, session: &Arc<str>, price: f64) -> bool {
        let Some(sequence) = self.sequences.get(session) else { return false };
        let need = Need::Restore { known: sequence.known, tokens: sequence.known };
        let wanted = sequence.table.pages_wanted(&self.pool, need);
        if self.over_quota(session, need) > 0 {
            return false;
        }
        let mut free = self.pool.free();
        let mut evicted = Vec::new();
        let mut shares = self.device_shares(Some((session, wanted)));
        let mut leaving = Leaving::new(self.victims(session).into_iter());
        while free < wanted
            && let Some((tenant, victim)) = leaving.next(&shares)
            && victim.price * DEARER <= price
        {
            let idle = |sequence: &&Sequence| sequence.is_idle() && self.job(&sequence.id).is_none();
            let Some(sequence) = self.sequences.get(&victim.session).filter(idle) else { continue };
            let pages = sequence.table.all().count() - sequence.table.shared_pages(&self.pool);
            free += pages;
            shares.left(&tenant, pages as u64);
            evicted.push(victim.session);
        }
        if free < wanted {
            return false;
        }
        for victim in evicted {
            self.evict(&victim, "pressure");
        }
        true
    }

    /// Gives a restore up that only foresaw a return, for one who needs its pages; whether there was one, of this tenant where
    /// one is given.
    pub(super) fn give_up_prefetch(&mut self, keep: &str, tenant: Option<&Tenant>) -> bool {
        let under_way = |job: &Job| {
            matches!((&job.purpose, &job.phase), (Purpose::Prefetch, Phase::Restoring(_)))
                && &*job.session != keep
                && tenant.is_none_or(|tenant| job.tenant == *tenant)
        };
        let Some(index) = self.jobs.iter().rposition(under_way) else { return false };
        let session = Arc::clone(&self.jobs[index].session);
        // The job stays in its place until `admit` forgets it: others hold places of the list.
        self.jobs[index].phase = Phase::Waiting;
        self.abandon_restore(&session);
        true
    }

    /// Takes a restore that only foresaw a return off the list, for a command on its session.
    pub(super) fn drop_prefetch(&mut self, session: &str) {
        if let Some(index) = self.job(session)
            && matches!(self.jobs[index].purpose, Purpose::Prefetch)
        {
            self.remove_job(index);
        }
    }
}
