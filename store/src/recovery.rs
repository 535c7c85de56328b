//! What an open found and did.

use serde::Serialize;

/// A range of a file that could not be read back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DamagedRange {
    /// The file's name.
    pub file: String,
    /// First damaged byte.
    pub start: u64,
    /// First byte behind the damage.
    pub end: u64,
}

/// What [`crate::Store::open`] found and did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RecoveryReport {
    /// The directory was new.
    pub created: bool,
    /// Why the metadata index was thrown away and rebuilt, if it was.
    pub rebuilt: Option<String>,
    /// Copies of damaged files and renamed directories, kept for inspection.
    pub quarantined: Vec<String>,
    /// Journal records read to bring the index up to date.
    pub journal_records_replayed: u64,
    /// Metadata changes read to bring the index up to date.
    pub meta_changes_replayed: u64,
    /// Bytes of unfinished writes cut from the ends of the logs. They were never acknowledged.
    pub torn_tail_bytes: u64,
    /// Damaged ranges of the logs. What they held is lost unless the index says otherwise.
    pub damaged: Vec<DamagedRange>,
    /// Good frames of an unknown kind.
    pub unreadable_frames: u64,
    /// Record numbers that were given out and are not there, over all sessions.
    pub missing_records: u64,
    /// Cells in the index after the open.
    pub cells: u64,
    /// Cells found in packs that the index had missed.
    pub cells_recovered: u64,
    /// Index entries of cells whose pack is gone, or ends before they do.
    pub cells_dropped: u64,
    /// Milliseconds the open took.
    pub ms: u64,
}

impl RecoveryReport {
    /// Whether something acknowledged may be lost: damage, or numbers that are missing.
    pub fn has_loss(&self) -> bool {
        !self.damaged.is_empty() || self.missing_records > 0
    }
}
