//! The journal: host-wide append-only files that hold every session's records, and the point of acknowledgement.
//!
//! Owns the numbering of records, group commit, reading back, and the removal of dead files. A record is durable,
//! indexed and readable before its ticket says so. Knows nothing of what a record means.

mod commit;
mod compact;
mod index;
mod metalog;
mod queue;
mod read;
mod reclaim;
mod record;
mod replay;
mod ticket;

pub use record::JournalRecord;
pub use ticket::Ticket;

pub(crate) use commit::{Committer, Progress};
pub(crate) use index::{Indexer, Loaded, State};
pub(crate) use metalog::{KIND as METALOG_KIND, Metalog};
pub(crate) use queue::{Queue, Work};
pub(crate) use reclaim::{ReclaimError, Stuck};
pub(crate) use replay::{Replay, ReplayError};

use std::ops::ControlFlow;
use std::sync::{Arc, RwLock};

use crate::clock::Clock;
use crate::failpoint::{Failpoints, point};
use crate::framed::{LogDir, TailPoints};
use crate::limits::{MAX_KIND, MAX_PAYLOAD, MAX_SESSION_NAME};
use crate::meta::{MetaError, MetaStore};
use crate::sync::read as read_lock;

/// The letter of the journal's files.
pub(crate) const JOURNAL_KIND: u8 = b'j';

pub(crate) const JOURNAL_POINTS: TailPoints = TailPoints {
    before_write: point::JOURNAL_BEFORE_WRITE,
    before_fsync: point::JOURNAL_BEFORE_FSYNC,
    after_fsync: point::JOURNAL_AFTER_FSYNC,
    before_rotate: point::JOURNAL_BEFORE_ROTATE,
    after_rotate: point::JOURNAL_AFTER_ROTATE,
};

/// Why a journal operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// A write or fsync failed before; nothing more is acknowledged.
    #[error(
        "the store is poisoned and acknowledges nothing more: {0}; stop the process and open the store again"
    )]
    Poisoned(String),
    /// The store is closed.
    #[error("the store is closed")]
    Closed,
    /// The queue stayed full for ten seconds.
    #[error(
        "the journal's queue stayed full ({queued_bytes} of {limit} bytes): the disk is too slow, retry later"
    )]
    QueueFull {
        /// Bytes waiting.
        queued_bytes: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// A payload is over the limit.
    #[error("a record's payload of {len} bytes is over the limit of {limit}: split it or store it elsewhere")]
    PayloadTooLarge {
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// A session's name or a kind cannot be used.
    #[error("{what} {name:?} cannot be used: it must have 1 to {limit} bytes and no zero byte")]
    BadName {
        /// Which name.
        what: &'static str,
        /// The start of the name given.
        name: String,
        /// Bytes allowed.
        limit: usize,
    },
    /// A durable record does not read back.
    #[error("record {seq} of session {session:?} is damaged: {detail}")]
    Damaged {
        /// The session.
        session: String,
        /// The record's number.
        seq: u64,
        /// What was found.
        detail: String,
    },
    /// The operating system refused something.
    #[error("{what}: {detail}")]
    Io {
        /// What was tried.
        what: String,
        /// Its error.
        detail: String,
    },
    /// The index failed.
    #[error(transparent)]
    Meta(#[from] MetaError),
}

impl From<JournalError> for MetaError {
    fn from(error: JournalError) -> Self {
        match error {
            JournalError::Poisoned(reason) => Self::Poisoned(reason),
            JournalError::Closed => Self::Closed,
            JournalError::QueueFull { .. } => Self::QueueFull,
            JournalError::Meta(e) => e,
            other => Self::Engine(other.to_string()),
        }
    }
}

/// The receipt of an append.
#[derive(Clone)]
pub struct Appended {
    /// The record's number within its session.
    pub seq: u64,
    /// Wall time of the append, as the record has it.
    pub time_ms: u64,
    /// Tells when the record is durable.
    pub ticket: Ticket,
}

/// A session with records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalSession {
    /// The session.
    pub session: String,
    /// The number of its last durable record.
    pub last_seq: u64,
    /// How many records it has.
    pub records: u64,
}

/// The journal of one store.
pub struct Journal {
    pub(crate) queue: Arc<Queue>,
    pub(crate) state: Arc<RwLock<State>>,
    pub(crate) raw: Arc<dyn MetaStore>,
    pub(crate) dir: Arc<LogDir>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) indexer: Arc<Indexer>,
    pub(crate) failpoints: Failpoints,
}

fn check_name(what: &'static str, name: &str, limit: usize) -> Result<(), JournalError> {
    if name.is_empty() || name.len() > limit || name.contains('\0') {
        return Err(JournalError::BadName { what, name: name.chars().take(64).collect(), limit });
    }
    Ok(())
}

impl Journal {
    /// Appends a record and gives it the session's next number (the first is 1).
    ///
    /// Returns as soon as the record is queued; the ticket tells when it is durable. Records of one session become
    /// durable in the order of their numbers. Blocks while the queue is full ([`crate::limits::MAX_QUEUED_BYTES`]),
    /// for at most ten seconds.
    ///
    /// # Errors
    /// [`JournalError::BadName`], [`JournalError::PayloadTooLarge`] ([`MAX_PAYLOAD`]), [`JournalError::QueueFull`],
    /// [`JournalError::Poisoned`], [`JournalError::Closed`]. The number is then not used.
    pub fn append(
        &self,
        session: &str,
        kind: &str,
        payload: impl Into<Vec<u8>>,
    ) -> Result<Appended, JournalError> {
        check_name("session name", session, MAX_SESSION_NAME)?;
        check_name("record kind", kind, MAX_KIND)?;
        let payload = payload.into();
        if payload.len() > MAX_PAYLOAD {
            return Err(JournalError::PayloadTooLarge { len: payload.len(), limit: MAX_PAYLOAD });
        }
        let time_ms = self.clock.now_ms();
        let (seq, ticket) = self.queue.push_event(session, time_ms, kind.to_owned(), payload)?;
        // The record is on its way, whatever happens to its writer.
        let _ = self.failpoints.hit(point::JOURNAL_AFTER_APPEND);
        Ok(Appended { seq, time_ms, ticket })
    }

    /// The durable records of a session behind number `after_seq`, in order.
    ///
    /// May return fewer than `limit` (at most [`crate::limits::MAX_READ_BYTES`] of payload unless one record is
    /// larger); nothing only if there are no more. An unknown session has none.
    ///
    /// # Errors
    /// [`JournalError::Damaged`] if a record does not read back: reading on behind its number skips it.
    pub fn read(
        &self,
        session: &str,
        after_seq: u64,
        limit: usize,
    ) -> Result<Vec<JournalRecord>, JournalError> {
        check_name("session name", session, MAX_SESSION_NAME)?;
        read::read(&self.raw, &self.dir, session, after_seq, limit)
    }

    /// The sessions that have records, in order of name.
    pub fn sessions(&self) -> Vec<JournalSession> {
        let state = read_lock(&self.state);
        let mut sessions: Vec<JournalSession> = state
            .sessions
            .iter()
            .map(|(name, s)| JournalSession {
                session: name.to_string(),
                last_seq: s.last_seq,
                records: s.count,
            })
            .collect();
        sessions.sort_by(|a, b| a.session.cmp(&b.session));
        sessions
    }

    /// The number of a session's last durable record; zero if it has none.
    pub fn last_seq(&self, session: &str) -> u64 {
        read_lock(&self.state).sessions.get(session).map_or(0, |s| s.last_seq)
    }

    /// Visits every durable record, session by session in order of name and number, until `visit` breaks off.
    ///
    /// # Errors
    /// As [`Journal::read`].
    pub fn scan(&self, visit: &mut dyn FnMut(JournalRecord) -> ControlFlow<()>) -> Result<(), JournalError> {
        for session in self.sessions() {
            let mut after = 0;
            loop {
                let records = self.read(&session.session, after, 256)?;
                let Some(last) = records.last() else { break };
                after = last.seq;
                for record in records {
                    if visit(record).is_break() {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Removes a session's records: a tombstone is journaled, then the index forgets them. Returns once that is
    /// durable. The bytes go when no live session has records in the same file. The name may be used again; its
    /// numbers then start at 1.
    ///
    /// # Errors
    /// As [`Journal::append`].
    pub fn remove_session(&self, session: &str) -> Result<(), JournalError> {
        check_name("session name", session, MAX_SESSION_NAME)?;
        self.queue.push_remove(session, self.clock.now_ms())?.wait()
    }

    /// Waits until everything queued so far is durable.
    ///
    /// # Errors
    /// [`JournalError::Poisoned`], [`JournalError::Closed`], [`JournalError::QueueFull`].
    pub fn barrier(&self) -> Result<(), JournalError> {
        self.queue.push(Work::Barrier, 0)?.wait()
    }
}
