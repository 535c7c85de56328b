//! The bounded queue in front of the commit thread. Numbers are given out here, so their order is the queue's.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::{JournalError, Ticket};
use crate::limits::{MAX_QUEUED_BYTES, MAX_QUEUED_REQUESTS};
use crate::meta::{CasOutcome, Op};
use crate::poison::Poison;
use crate::sync::{lock, wait, wait_for};

/// How long a caller waits for room before it is refused.
const ROOM_WAIT: Duration = Duration::from_secs(10);
/// Bytes after which a group is not made larger.
const GROUP_BYTES: usize = 8 << 20;
/// Room that each request takes besides its own bytes.
const REQUEST_COST: usize = 256;

/// What the commit thread is asked to do.
pub(crate) enum Work {
    Event {
        session: Arc<str>,
        seq: u64,
        time_ms: u64,
        kind: String,
        payload: Vec<u8>,
    },
    Remove {
        session: Arc<str>,
        time_ms: u64,
    },
    Meta {
        ops: Vec<Op>,
    },
    Cas {
        key: Vec<u8>,
        expected: Option<Vec<u8>>,
        new: Option<Vec<u8>>,
        outcome: Arc<OnceLock<CasOutcome>>,
    },
    /// Writes the live records of a file anew, from an offset on; a group of its own.
    Compact {
        file: u64,
        from: u64,
        outcome: Arc<OnceLock<Compacted>>,
    },
    Barrier,
}

/// How far a compaction got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compacted {
    /// Go on at this offset.
    Until(u64),
    /// All of the file was gone through.
    Done,
}

/// A piece of work and its receipt.
pub(crate) struct Request {
    pub(crate) work: Work,
    pub(crate) ticket: Ticket,
    bytes: usize,
}

#[derive(Default)]
struct Inner {
    requests: VecDeque<Request>,
    bytes: usize,
    /// The last number given out, of every session with records.
    last: HashMap<Arc<str>, u64>,
    /// Requests of the last group.
    last_group: usize,
    closed: bool,
}

/// The queue.
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    work: Condvar,
    room: Condvar,
    poison: Poison,
    room_wait: Duration,
}

impl Queue {
    pub(crate) fn new(poison: Poison, last: HashMap<Arc<str>, u64>) -> Self {
        let inner = Mutex::new(Inner { last, ..Inner::default() });
        Self { inner, work: Condvar::new(), room: Condvar::new(), poison, room_wait: ROOM_WAIT }
    }

    /// Queues an event under the session's next number.
    pub(crate) fn push_event(
        &self,
        session: &str,
        time_ms: u64,
        kind: String,
        payload: Vec<u8>,
    ) -> Result<(u64, Ticket), JournalError> {
        let bytes = REQUEST_COST + session.len() + kind.len() + payload.len();
        let mut inner = self.with_room(bytes)?;
        let (session, seq) = match inner.last.get_key_value(session) {
            Some((name, last)) => (Arc::clone(name), last + 1),
            None => (Arc::from(session), 1),
        };
        inner.last.insert(Arc::clone(&session), seq);
        let ticket = self.push_locked(inner, Work::Event { session, seq, time_ms, kind, payload }, bytes);
        Ok((seq, ticket))
    }

    /// Queues the end of a session; its numbers start again at 1.
    pub(crate) fn push_remove(&self, session: &str, time_ms: u64) -> Result<Ticket, JournalError> {
        let mut inner = self.with_room(REQUEST_COST)?;
        inner.last.remove(session);
        Ok(self.push_locked(inner, Work::Remove { session: session.into(), time_ms }, REQUEST_COST))
    }

    /// Queues other work of about `bytes` bytes.
    pub(crate) fn push(&self, work: Work, bytes: usize) -> Result<Ticket, JournalError> {
        let bytes = bytes + REQUEST_COST;
        let inner = self.with_room(bytes)?;
        Ok(self.push_locked(inner, work, bytes))
    }

    fn push_locked(&self, mut inner: std::sync::MutexGuard<'_, Inner>, work: Work, bytes: usize) -> Ticket {
        let ticket = Ticket::new();
        inner.requests.push_back(Request { work, ticket: ticket.clone(), bytes });
        inner.bytes += bytes;
        drop(inner);
        self.work.notify_one();
        ticket
    }

    fn with_room(&self, bytes: usize) -> Result<std::sync::MutexGuard<'_, Inner>, JournalError> {
        let give_up = Instant::now() + self.room_wait;
        let mut inner = lock(&self.inner);
        loop {
            if let Some(reason) = self.poison.get() {
                return Err(JournalError::Poisoned(reason.to_owned()));
            }
            if inner.closed {
                return Err(JournalError::Closed);
            }
            let fits = inner.requests.len() < MAX_QUEUED_REQUESTS && inner.bytes + bytes <= MAX_QUEUED_BYTES;
            if fits || inner.requests.is_empty() {
                return Ok(inner);
            }
            let left = give_up.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(JournalError::QueueFull { queued_bytes: inner.bytes, limit: MAX_QUEUED_BYTES });
            }
            inner = wait_for(&self.room, inner, left);
        }
    }

    /// Waits for work and takes a group: what is there, at most `records`. If the last group was of more than one
    /// request, others are likely to come, and up to `window` is waited for them; a lone writer is not kept waiting
    /// (the idea of PostgreSQL's `commit_siblings`). `None` once closed and empty.
    pub(crate) fn take_group(&self, records: usize, window: Duration) -> Option<Vec<Request>> {
        let mut inner = lock(&self.inner);
        while inner.requests.is_empty() {
            if inner.closed {
                return None;
            }
            inner = wait(&self.work, inner);
        }
        let full = |inner: &Inner| {
            inner.closed
                || inner.requests.len() >= records
                || inner.bytes >= GROUP_BYTES
                || inner.requests.iter().any(|r| matches!(r.work, Work::Barrier | Work::Compact { .. }))
        };
        let end = Instant::now() + if inner.last_group > 1 { window } else { Duration::ZERO };
        while !full(&inner) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            inner = wait_for(&self.work, inner, left);
        }
        let mut group = Vec::new();
        let mut bytes = 0;
        while group.len() < records.max(1) && (group.is_empty() || bytes < GROUP_BYTES) {
            // A tombstone before it in the same group would be overtaken by records that it ends.
            let is_compaction = |r: &Request| matches!(r.work, Work::Compact { .. });
            if group.last().is_some_and(is_compaction)
                || (!group.is_empty() && inner.requests.front().is_some_and(is_compaction))
            {
                break;
            }
            let Some(request) = inner.requests.pop_front() else { break };
            bytes += request.bytes;
            group.push(request);
        }
        inner.bytes -= bytes;
        inner.last_group = group.len();
        drop(inner);
        self.room.notify_all();
        Some(group)
    }

    /// Refuses new work; what is queued is still done.
    pub(crate) fn close(&self) {
        lock(&self.inner).closed = true;
        self.work.notify_all();
        self.room.notify_all();
    }

    /// Wakes those who wait for room, after the store was poisoned.
    pub(crate) fn wake(&self) {
        self.room.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i8_a_full_queue_refuses_by_name_and_gives_no_number_away() {
        let mut queue = Queue::new(Poison::default(), HashMap::new());
        queue.room_wait = Duration::ZERO;
        let large = || vec![0; MAX_QUEUED_BYTES / 4];
        for want in 1..=3 {
            assert_eq!(queue.push_event("s", 0, "k".into(), large()).unwrap().0, want);
        }
        let refused = queue.push_event("s", 0, "k".into(), large());
        assert!(matches!(refused, Err(JournalError::QueueFull { limit: MAX_QUEUED_BYTES, .. })));
        assert_eq!(queue.push_event("s", 0, "k".into(), Vec::new()).unwrap().0, 4);
        let group = queue.take_group(64, Duration::ZERO).unwrap();
        assert_eq!(group.len(), 1, "a group ends once it is large");
        queue.close();
        assert_eq!(queue.push_event("s", 0, "k".into(), Vec::new()).map(|_| ()), Err(JournalError::Closed));
        assert!(queue.take_group(64, Duration::ZERO).is_some());
    }

    #[test]
    fn i8_the_number_of_requests_is_bounded_too() {
        let mut queue = Queue::new(Poison::default(), HashMap::new());
        queue.room_wait = Duration::ZERO;
        for _ in 0..MAX_QUEUED_REQUESTS {
            queue.push(Work::Barrier, 0).unwrap();
        }
        assert!(matches!(queue.push(Work::Barrier, 0).map(|_| ()), Err(JournalError::QueueFull { .. })));
    }
}
