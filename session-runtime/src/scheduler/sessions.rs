//! What is done to one session besides writing messages: open, fork, close, view.

use std::sync::Arc;

use kernels::backend::Backend;

use super::packing::{Packing, approximate};
use super::sequence::{Origin, Sequence};
use super::worker::Worker;
use super::{DeviceView, KvView, OpenSession};
use crate::error::{Error, ErrorKind};
use crate::kv::contract::{Place, Relation, element_type};
use crate::kv::state::KvState;

impl<B: Backend> Worker<B> {
    pub(super) fn open(&mut self, session: Arc<str>, opening: OpenSession) {
        let OpenSession { tenant, tokens, saved_under, idle_ttl_ms, codec, reuse } = opening;
        let Packing { codec, cells, pages } = self.packing(&session, &tenant, codec, reuse);
        let (mut foreign, mut origin) = (Vec::new(), None);
        if let Some(saved) = &saved_under {
            match self.contract.relation(saved, Place::Same, reuse) {
                Relation::Convert(_) if self.converts(codec, saved) => {
                    origin = Some(Origin {
                        contract: approximate(saved, &tenant, codec, &session),
                        elements: element_type(&saved.kv_layout).unwrap_or(self.engine.pool_spec().kv_type),
                    });
                }
                relation => foreign = relation.fields().into_iter().map(str::to_owned).collect(),
            }
        }
        let state = match (tokens.is_empty(), saved_under.is_some(), foreign.is_empty()) {
            (true, ..) => KvState::None,
            (_, false, _) => KvState::Lost,
            (_, _, true) => KvState::Evicted,
            (_, _, false) => KvState::Stale,
        };
        let own = state == KvState::Evicted && origin.is_none();
        let saved_chunks = if own { self.lookup(&cells, &tokens).disk } else { 0 };
        let sequence = Sequence {
            id: Arc::clone(&session),
            tenant,
            known: tokens.len(),
            tokens,
            table: self.table(),
            computed: 0,
            state,
            codec,
            reuse,
            contract: cells,
            pages,
            foreign,
            origin,
            cuts: Vec::new(),
            save_asked: saved_chunks,
            saved_chunks,
            saved_end: 0,
            last_used_ms: self.clock.monotonic_ms(),
            idle_ttl_ms: idle_ttl_ms.unwrap_or(self.options.idle_ttl_ms),
            rest: None,
            forked_from: None,
            superseded: false,
            last_restore: None,
        };
        self.sequences.insert(session, sequence);
    }

    pub(super) fn close(&mut self, session: &Arc<str>) {
        if let Some(index) = self.job(session) {
            self.finish_message_or_restore(index);
        }
        if let Some(mut sequence) = self.sequences.remove(session) {
            sequence.table.truncate(&mut self.pool, 0);
        }
        self.note_resident(session);
    }

    fn finish_message_or_restore(&mut self, index: usize) {
        let closed = Error::new(ErrorKind::Conflict, "session_closed", "the session was closed");
        self.fail_job(index, closed);
    }

    pub(super) fn fork(&mut self, source: &str, target: Arc<str>) -> Result<(), Error> {
        let now = self.clock.monotonic_ms();
        let empty = self.table();
        let source = self.sequences.get(source).ok_or_else(|| Error::no_session(source))?;
        // A restore under way is not shared: the fork restores for itself.
        let (state, computed) = match source.state {
            KvState::Active | KvState::Idle | KvState::Restored => (KvState::Idle, source.computed),
            KvState::Restoring => (KvState::Evicted, 0),
            state => (state, 0),
        };
        let table = if computed > 0 { source.table.fork(&mut self.pool, computed) } else { empty };
        let Packing { codec, cells, pages } =
            self.packing(&target, &source.tenant, source.codec, source.reuse);
        // Cells that are not exactly what would be computed are no other session's. A fork's first restore may take its source's.
        let own = cells == source.contract;
        let (saved_chunks, saved_end) = if own { (source.saved_chunks, source.saved_end) } else { (0, 0) };
        let elements = self.engine.pool_spec().kv_type;
        let sources = || Some(Origin { contract: source.contract, elements });
        let origin = if own || state != KvState::Evicted { None } else { source.origin.or_else(sources) };
        let forked = Sequence {
            id: Arc::clone(&target),
            tenant: source.tenant.clone(),
            tokens: source.tokens.clone(),
            table,
            computed,
            known: source.known,
            state,
            codec,
            reuse: source.reuse,
            contract: cells,
            pages,
            foreign: source.foreign.clone(),
            origin,
            cuts: source.cuts.clone(),
            save_asked: saved_chunks,
            saved_chunks,
            saved_end,
            last_used_ms: now,
            idle_ttl_ms: source.idle_ttl_ms,
            rest: None,
            forked_from: Some(Arc::clone(&source.id)),
            superseded: false,
            last_restore: None,
        };
        self.sequences.insert(Arc::clone(&target), forked);
        self.note_resident(&target);
        Ok(())
    }

    pub(super) fn view(&self, session: &str) -> Result<KvView, Error> {
        let sequence = self.sequences.get(session).ok_or_else(|| Error::no_session(session))?;
        let deadline = sequence.deadline_ms().map(|deadline| {
            // The scheduler keeps monotonic time; clients read wall time.
            self.clock.now_ms().saturating_add(deadline.saturating_sub(self.clock.monotonic_ms()))
        });
        let (host_tokens, host_bytes) = self.in_host(sequence);
        Ok(KvView {
            state: sequence.state,
            tokens: sequence.length() as u64,
            resident_tokens: sequence.computed as u64,
            saved_tokens: sequence.saved_tokens() as u64,
            host_tokens,
            host_bytes,
            device_bytes: (sequence.table.all().count() * self.engine.pool_spec().page_bytes()) as u64,
            shared_pages: sequence.table.shared_pages(&self.pool) as u64,
            idle_deadline_ms: deadline,
            last_restore: sequence.last_restore.clone(),
        })
    }

    pub(super) fn device(&self) -> DeviceView {
        DeviceView {
            pages_total: self.pool.total() as u64,
            pages_free: self.pool.free() as u64,
            page_bytes: self.engine.pool_spec().page_bytes() as u64,
            sessions_resident: self.sequences.values().filter(|sequence| sequence.computed > 0).count()
                as u64,
            weight_bytes: self.engine.weight_bytes() as u64,
            tokens_computed: self.tokens_computed,
            tokens_reused: self.tokens_reused,
            busy_seconds: self.busy_seconds,
            forward_seconds: self.forward_seconds,
            tokens_guessed: self.gain.totals,
        }
    }
}
