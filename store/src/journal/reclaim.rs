//! Deleting journal files in which no session is left.

use std::io;

use super::Journal;
use crate::failpoint::point;
use crate::meta::MetaError;
use crate::sync::read;

/// Why dead files could not be deleted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReclaimError {
    #[error("deleting a dead journal file: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Meta(#[from] MetaError),
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
}
