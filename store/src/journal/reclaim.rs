//! Deleting journal files in which no session is left, and choosing those that are worth writing anew.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, OnceLock};

use super::queue::Compacted;
use super::{Journal, JournalError, Work};
use crate::failpoint::point;
use crate::framed::FILE_HEADER;
use crate::meta::MetaError;
use crate::sync::read;

/// Why dead files could not be deleted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReclaimError {
    #[error("deleting a dead journal file: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Meta(#[from] MetaError),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

impl Journal {
    /// Deletes the dead files before file `before`, which the durable index covers; returns how many.
    ///
    /// A tombstone must outlive the records it ends, so a file that holds one goes only while it is the oldest.
    pub(crate) fn delete_dead_files(&self, before: u64) -> Result<u64, ReclaimError> {
        let mut deleted = 0;
        let mut oldest = true;
        for (number, _) in self.dir.list()?.into_iter().filter(|(n, _)| *n < before) {
            let dead = {
                let state = read(&self.state);
                state.files.get(&number).is_none_or(|f| f.live.is_empty() && (f.tombs.is_empty() || oldest))
            };
            if !dead {
                oldest = false;
                continue;
            }
            self.failpoints.hit(point::JOURNAL_BEFORE_DELETE)?;
            // The index forgets the file last: an entry without a file is harmless, and removed at the next open.
            self.dir.remove(number)?;
            self.indexer.forget_file(number)?;
            deleted += 1;
        }
        Ok(deleted)
    }

    /// Writes the live records of one mostly dead file before file `before` anew, if there is one: less than half of
    /// it is live. The file is deleted after the next checkpoint, which makes the new places durable.
    pub(crate) fn compact_one(&self, before: u64, stuck: &mut Stuck) -> Result<Option<u64>, ReclaimError> {
        let Some(file) = self.mostly_dead(before, stuck)? else { return Ok(None) };
        // What cannot be moved now is not tried again: damaged records, and tombstones of living sessions.
        stuck.0.insert(file);
        let mut from = FILE_HEADER;
        loop {
            let outcome = Arc::new(OnceLock::new());
            let work = Work::Compact { file, from, outcome: Arc::clone(&outcome) };
            self.queue.push(work, 0)?.wait()?;
            match outcome.get() {
                Some(Compacted::Until(offset)) => from = *offset,
                _ => return Ok(Some(file)),
            }
        }
    }

    fn mostly_dead(&self, before: u64, stuck: &Stuck) -> Result<Option<u64>, ReclaimError> {
        let files = self.dir.list()?;
        let state = read(&self.state);
        Ok(files.into_iter().filter(|(n, _)| *n < before && !stuck.0.contains(n)).find_map(
            |(number, len)| {
                let file = state.files.get(&number)?;
                let live: u64 = file.live.values().map(|l| l.bytes).sum();
                (live < len / 2).then_some(number)
            },
        ))
    }
}

/// Files that a compaction has gone through since the store was opened.
#[derive(Debug, Default)]
pub(crate) struct Stuck(HashSet<u64>);
