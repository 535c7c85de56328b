//! Writing the live records of a mostly dead file anew at the journal's end, so that the file can go.
//!
//! The commit thread does the copying, a bounded piece at a time, between groups. A record keeps its session, number
//! and time; only its place changes. Tombstones move too, unless their session lives again: behind its new records
//! they would end those.

use std::io;

use super::commit::Committer;
use super::index::{Change, read_position};
use super::queue::Compacted;
use super::record::{JournalFrame, read_journal_frame};
use crate::framed::{FRAME_HEADER, LogPos, scan};
use crate::meta::keys;

/// Bytes gone through in one group.
const PIECE: u64 = 1 << 20;

/// Why the walk through a piece stopped.
enum Stop {
    Enough(u64),
    Failed(String),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Committer {
    /// Writes the live frames of `file` between `from` and about [`PIECE`] bytes behind it anew; returns what moved
    /// and how far it got. The error is a reason to poison the store.
    pub(super) fn compact(&mut self, file: u64, from: u64) -> Result<(Vec<Change>, Compacted), String> {
        let context = |e: &dyn std::fmt::Display| format!("compacting journal file {file} failed: {e}");
        let mut live: Vec<(LogPos, JournalFrame, Vec<u8>)> = Vec::new();
        let handle = self.journal_dir.open(file).map_err(|e| context(&e))?;
        let walked = scan::<Stop>(&*handle, self.journal_dir.salt(file), from, &mut |offset, body| {
            if offset >= from + PIECE {
                return Err(Stop::Enough(offset));
            }
            let pos = LogPos { file, offset };
            match read_journal_frame(body) {
                Some(frame) if self.is_live(&frame, pos).map_err(Stop::Failed)? => {
                    live.push((pos, frame, body.to_vec()));
                }
                _ => {}
            }
            Ok(())
        });
        let compacted = match walked {
            Ok(_) => Compacted::Done,
            Err(Stop::Enough(offset)) => Compacted::Until(offset),
            Err(Stop::Failed(e)) => return Err(context(&e)),
        };
        let mut changes = Vec::with_capacity(live.len());
        for (from, frame, body) in live {
            let pos = self.journal.push(&body).map_err(|e| context(&e))?;
            changes.push(match frame {
                JournalFrame::Event { session, seq } => {
                    Change::Event { session, seq, pos, bytes: (FRAME_HEADER + body.len()) as u64 }
                }
                JournalFrame::Tombstone { .. } => Change::TombMoved { from, pos },
            });
        }
        Ok((changes, compacted))
    }

    /// Whether the frame at `pos` is still needed and may be written anew.
    fn is_live(&self, frame: &JournalFrame, pos: LogPos) -> Result<bool, String> {
        let get = |key: Vec<u8>| self.raw.get(&key).map_err(|e| e.to_string());
        match frame {
            JournalFrame::Event { session, seq } => {
                let found = get(keys::record(session, *seq))?;
                Ok(found.and_then(|value| read_position(&value)) == Some(pos))
            }
            JournalFrame::Tombstone { session } => {
                let holds = get(keys::tomb(pos.file, pos.offset))?.is_some();
                Ok(holds && get(keys::session(session))?.is_none())
            }
        }
    }
}
