//! A session in memory: its record, its journal, its one writer.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use tokio::sync::{Semaphore, oneshot, watch};

use super::event::SessionEvent;
use super::host::SessionHost;
use super::record::{SegmentRecord, SessionRecord};
use super::spec::Retention;
use crate::error::{Error, ErrorKind};
use crate::restore::report::RestoreReport;
use crate::scheduler::KvObserver;
use crate::session::view::{KvTransition, Relocation};

/// Sessions by id.
#[derive(Default)]
pub struct SessionMap {
    sessions: RwLock<HashMap<Arc<str>, Arc<Session>>>,
}

impl SessionMap {
    /// A session by its id.
    pub fn get(&self, id: &str) -> Option<Arc<Session>> {
        self.sessions.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// Every session, by creation.
    pub fn all(&self) -> Vec<Arc<Session>> {
        let mut list: Vec<Arc<Session>> =
            self.sessions.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        list.sort_by_key(|session| (session.record().created_ms, Arc::clone(&session.id)));
        list
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.sessions.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(super) fn insert(&self, session: Arc<Session>) {
        let id = Arc::clone(&session.id);
        self.sessions.write().unwrap_or_else(PoisonError::into_inner).insert(id, session);
    }

    pub(super) fn remove(&self, id: &str) {
        self.sessions.write().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    /// Forgets every session; used when the runtime closes.
    pub fn clear(&self) {
        self.sessions.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Writes what the scheduler tells into the sessions' journals.
pub struct JournalObserver {
    /// The sessions.
    pub sessions: Arc<SessionMap>,
}

impl KvObserver for JournalObserver {
    fn transition(&self, session: &str, transition: &KvTransition) {
        self.post(session, SessionEvent::KvTransition(transition.clone()));
    }

    fn restored(&self, session: &str, report: &RestoreReport) {
        tracing::info!(session, report = %report.summary(), "restored");
        let Some(live) = self.sessions.get(session) else { return };
        if live.record().contract != live.host.contract {
            let contract = Box::new(live.host.contract.clone());
            let model = Some(live.host.model.clone());
            self.post(session, SessionEvent::ContractChanged { contract, model });
        }
        self.post(session, SessionEvent::KvRestore(Box::new(report.clone())));
    }

    fn relocated(&self, session: &str, relocation: &Relocation) {
        self.post(session, SessionEvent::KvRelocated(relocation.clone()));
    }
}

impl JournalObserver {
    fn post(&self, session: &str, event: SessionEvent) {
        if let Some(live) = self.sessions.get(session)
            && let Err(error) = live.post(event)
        {
            tracing::error!(session, %error, "event not journaled");
        }
    }
}

/// The running turn and the means to stop it.
pub(super) struct RunningTurn {
    pub id: String,
    pub cancel: watch::Sender<bool>,
}

/// A session in memory.
pub struct Session {
    /// Its id.
    pub id: Arc<str>,
    pub(super) host: Arc<SessionHost>,
    record: Mutex<SessionRecord>,
    durable: watch::Sender<u64>,
    /// Held from the number that an event gets to where it will take effect once it is durable: several threads write events of
    /// a session, and they take effect in the order of their numbers.
    posting: Mutex<()>,
    /// One permit: the right to write (I5).
    pub(super) gate: Arc<Semaphore>,
    pub(super) queued: AtomicUsize,
    pub(super) running: Mutex<Option<RunningTurn>>,
    /// Held while a turn is begun, so that one turn id never begins twice.
    pub(super) starting: tokio::sync::Mutex<()>,
}

impl Session {
    pub(super) fn new(id: Arc<str>, host: Arc<SessionHost>, record: SessionRecord) -> Arc<Self> {
        let durable = watch::Sender::new(record.last_event);
        Arc::new(Self {
            id,
            host,
            record: Mutex::new(record),
            durable,
            posting: Mutex::new(()),
            gate: Arc::new(Semaphore::new(1)),
            queued: AtomicUsize::new(0),
            running: Mutex::new(None),
            starting: tokio::sync::Mutex::new(()),
        })
    }

    /// The session as its durable events make it.
    pub fn record(&self) -> MutexGuard<'_, SessionRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn running(&self) -> MutexGuard<'_, Option<RunningTurn>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an event to the journal; it takes effect once it is durable, after those before it.
    pub(super) fn post(
        self: &Arc<Self>,
        event: SessionEvent,
    ) -> Result<oneshot::Receiver<Result<u64, Error>>, Error> {
        let (kind, payload) = event.encode()?;
        let _posting = self.posting.lock().unwrap_or_else(PoisonError::into_inner);
        let appended = self.host.store.journal().append(&self.id, &kind, payload).map_err(store_failed)?;
        let (reply, answer) = oneshot::channel();
        let (session, seq) = (Arc::clone(self), appended.seq);
        let time_ms = appended.time_ms;
        appended.ticket.on_durable(Box::new(move |outcome| {
            let outcome = outcome.map_err(store_failed).map(|()| {
                session.record().apply(seq, time_ms, event);
                session.durable.send_replace(seq);
                seq
            });
            // The writer may have stopped waiting; the event counts all the same.
            let _ = reply.send(outcome);
        }));
        Ok(answer)
    }

    /// Appends an event and waits until it is durable (I6); its sequence number.
    pub(super) async fn write(self: &Arc<Self>, event: SessionEvent) -> Result<u64, Error> {
        self.post(event)?.await.map_err(|_| Error::internal("the journal stopped"))?
    }

    /// Sequence number of the last event that is durable and has taken effect.
    pub(super) fn last_applied(&self) -> u64 {
        *self.durable.borrow()
    }

    /// Resolves when an event after `after` is durable.
    ///
    /// # Errors
    /// The session was deleted.
    pub async fn wait_events(&self, after: u64) -> Result<(), Error> {
        let mut durable = self.durable.subscribe();
        loop {
            if self.gate.is_closed() {
                return Err(Error::no_session(&self.id));
            }
            if *durable.borrow_and_update() > after {
                return Ok(());
            }
            durable.changed().await.map_err(|_| Error::no_session(&self.id))?;
        }
    }

    /// Wakes everyone who waits for events, because the session is gone.
    pub(super) fn wake_waiters(&self) {
        self.durable.send_modify(|_| {});
    }

    /// Puts every segment that expires into the store's index.
    pub(super) fn index_deadlines(&self) {
        let segments = self.record().segments.clone();
        for segment in segments.iter().filter(|segment| expires_ms(segment).is_some()) {
            self.index_segment(segment, None);
        }
    }

    /// Keeps the store's index of segments with their deadlines in step with a segment.
    pub(super) fn index_segment(&self, segment: &SegmentRecord, pinned_by: Option<&str>) {
        let retention = match segment.retention {
            Retention::Keep => store::Retention::Keep,
            Retention::DropAfterTurn => store::Retention::DropAfterTurn,
            Retention::Expire { ttl_seconds } => {
                store::Retention::Expire { ttl_ms: ttl_seconds.saturating_mul(1000) }
            }
        };
        let deadline_ms = expires_ms(segment);
        let entry = store::Segment {
            // Forks have the segments of their parents, by the same ids.
            id: format!("{}/{}", self.id, segment.id),
            session: self.id.to_string(),
            kind: segment.kind.as_str().to_owned(),
            start: segment.start,
            end: segment.end,
            retention,
            deadline_ms,
            supersedes: None,
            created_ms: segment.created_ms,
            pinned_by: pinned_by.map(str::to_owned),
        };
        if let Err(error) = self.host.store.segments().put(entry) {
            tracing::warn!(session = %self.id, %error, "segment not indexed");
        }
    }
}

/// When a segment expires, milliseconds since the Unix epoch.
pub(super) fn expires_ms(segment: &SegmentRecord) -> Option<u64> {
    match segment.retention {
        Retention::Expire { ttl_seconds } => {
            Some(segment.created_ms.saturating_add(ttl_seconds.saturating_mul(1000)))
        }
        _ => None,
    }
}

/// A failure of the store: nothing more is acknowledged.
pub(super) fn store_failed(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Unavailable, "store_unavailable", error.to_string())
}
