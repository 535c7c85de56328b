//! The commit thread: takes groups from the queue, makes them durable, indexes them, and only then says so.
//!
//! Any failure on the way poisons the store: the group and everything behind it is refused.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::index::{Change, Indexer};
use super::metalog::Metalog;
use super::queue::{Queue, Request, Work};
use super::{JournalError, record};
use crate::failpoint::{Failpoints, point};
use crate::framed::{FRAME_HEADER, LogDir, LogTail};
use crate::meta::watermark::Watermark;
use crate::meta::{CasOutcome, MetaStore, Op};
use crate::poison::Poison;
use crate::sync::lock;

/// What the commit thread tells the checkpointer.
#[derive(Default)]
pub(crate) struct Progress {
    /// What the index covers now.
    pub(crate) applied: Mutex<Watermark>,
    /// Bytes made durable since the store was opened.
    pub(crate) bytes: AtomicU64,
}

/// The state of the commit thread.
pub(crate) struct Committer {
    pub(crate) queue: Arc<Queue>,
    pub(crate) journal: LogTail,
    pub(crate) journal_dir: Arc<LogDir>,
    pub(crate) metalog: Metalog,
    pub(crate) indexer: Arc<Indexer>,
    pub(crate) raw: Arc<dyn MetaStore>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) poison: Poison,
    pub(crate) failpoints: Failpoints,
    pub(crate) commit: u64,
    pub(crate) group_records: usize,
    pub(crate) group_window: Duration,
    /// Called after each group, with the bytes since open.
    pub(crate) nudge: Box<dyn Fn(u64) + Send>,
}

/// The values that requests of the same group have set.
type Overlay = HashMap<Vec<u8>, Option<Vec<u8>>>;

impl Committer {
    /// Runs until the queue is closed and empty.
    pub(crate) fn run(mut self) {
        while let Some(group) = self.queue.take_group(self.group_records, self.group_window) {
            let result = match self.poison.get() {
                Some(reason) => Err(JournalError::Poisoned(reason.to_owned())),
                None => self
                    .commit_group(&group)
                    .map_err(|reason| JournalError::Poisoned(self.poison.set(reason))),
            };
            if result.is_err() {
                self.queue.wake();
            }
            for request in &group {
                request.ticket.complete(&result);
            }
            if result.is_ok() {
                (self.nudge)(self.progress.bytes.load(Ordering::Relaxed));
            }
        }
    }

    /// Makes a group durable and indexes it; the error is the reason to poison the store.
    fn commit_group(&mut self, group: &[Request]) -> Result<(), String> {
        let before = (self.journal.end(), self.metalog.end());
        let mut changes = Vec::with_capacity(group.len());
        let mut overlay = Overlay::new();
        let mut bytes = 0;
        for request in group {
            if let Work::Compact { file, from, outcome } = &request.work {
                let (moved, compacted) = self.compact(*file, *from)?;
                changes.extend(moved);
                // Only this thread sets it, once.
                let _ = outcome.set(compacted);
            } else if let Some(change) = self.write(&request.work, &mut overlay, &mut bytes)? {
                changes.push(change);
            }
        }
        if changes.is_empty() {
            return Ok(());
        }
        self.journal.commit().map_err(|e| format!("writing the journal failed: {e}"))?;
        self.metalog.commit().map_err(|e| format!("writing the metadata log failed: {e}"))?;
        self.commit += 1;
        let covered =
            Watermark { commit: self.commit, journal: self.journal.end(), metalog: self.metalog.end() };
        let point = |name| self.failpoints.hit(name).map_err(|e| e.to_string());
        point(point::JOURNAL_BEFORE_INDEX)?;
        self.indexer.apply(changes, &covered).map_err(|e| format!("indexing the journal failed: {e}"))?;
        point(point::JOURNAL_AFTER_INDEX)?;
        *lock(&self.progress.applied) = covered;
        self.progress.bytes.fetch_add(bytes, Ordering::Relaxed);
        if before.1 != covered.metalog {
            self.metalog
                .export_if_due(&*self.raw)
                .map_err(|e| format!("exporting the metadata failed: {e}"))?;
            lock(&self.progress.applied).metalog = self.metalog.end();
        }
        Ok(())
    }

    fn write(
        &mut self,
        work: &Work,
        overlay: &mut Overlay,
        bytes: &mut u64,
    ) -> Result<Option<Change>, String> {
        let journal = |e| format!("writing the journal failed: {e}");
        match work {
            Work::Event { session, seq, time_ms, kind, payload } => {
                let body = record::event(session, *seq, *time_ms, kind, payload);
                let size = (FRAME_HEADER + body.len()) as u64;
                *bytes += size;
                let pos = self.journal.push(&body).map_err(journal)?;
                Ok(Some(Change::Event { session: Arc::clone(session), seq: *seq, pos, bytes: size }))
            }
            Work::Remove { session, time_ms } => {
                let pos = self.journal.push(&record::tombstone(session, *time_ms)).map_err(journal)?;
                Ok(Some(Change::Removed { session: Arc::clone(session), pos }))
            }
            Work::Meta { ops } => self.write_ops(ops.clone(), overlay, bytes).map(Some),
            Work::Cas { key, expected, new, outcome } => {
                let current = match overlay.get(key) {
                    Some(value) => value.clone(),
                    None => self.raw.get(key).map_err(|e| e.to_string())?,
                };
                if current != *expected {
                    // Only this thread sets it, once.
                    let _ = outcome.set(CasOutcome::Conflict { current });
                    return Ok(None);
                }
                let _ = outcome.set(CasOutcome::Done);
                let op = match new {
                    Some(value) => Op::put(key.clone(), value.clone()),
                    None => Op::delete(key.clone()),
                };
                self.write_ops(vec![op], overlay, bytes).map(Some)
            }
            Work::Barrier | Work::Compact { .. } => Ok(None),
        }
    }

    fn write_ops(&mut self, ops: Vec<Op>, overlay: &mut Overlay, bytes: &mut u64) -> Result<Change, String> {
        self.metalog.push(&ops).map_err(|e| format!("writing the metadata log failed: {e}"))?;
        for op in &ops {
            let (key, value) = match op {
                Op::Put { key, value } => (key, Some(value.clone())),
                Op::Delete { key } => (key, None),
            };
            *bytes += (key.len() + value.as_ref().map_or(0, Vec::len)) as u64;
            overlay.insert(key.clone(), value);
        }
        Ok(Change::Ops(ops))
    }
}
