//! Recovery of the logs: what the index may have missed is applied to it, torn ends are cut, damage is kept and
//! reported.

use std::cmp::Ordering;
use std::io;
use std::sync::Arc;

use super::JournalError;
use super::index::{Change, Indexer};
use super::record::{JournalFrame, MetaFrame, read_journal_frame, read_meta_frame};
use crate::disk::Disk;
use crate::framed::{FILE_HEADER, FRAME_HEADER, LogDir, LogPos, Scan, file_header, scan};
use crate::meta::watermark::Watermark;
use crate::meta::{MetaError, MetaStore, Op};
use crate::quarantine::Quarantine;
use crate::recovery::{DamagedRange, RecoveryReport};

/// Changes applied at once.
const BATCH: usize = 256;

/// Why a replay stopped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The index refused: it is rebuilt from scratch once.
    #[error(transparent)]
    Index(#[from] MetaError),
}

impl From<ReplayError> for JournalError {
    fn from(error: ReplayError) -> Self {
        match error {
            ReplayError::Io(e) => Self::Io { what: "recovering the logs".to_owned(), detail: e.to_string() },
            ReplayError::Index(e) => Self::Meta(e),
        }
    }
}

/// What recovery works with.
pub(crate) struct Replay<'a> {
    pub(crate) disk: &'a dyn Disk,
    pub(crate) quarantine: &'a Quarantine,
    pub(crate) report: &'a mut RecoveryReport,
    pub(crate) now_ms: u64,
}

impl Replay<'_> {
    /// Applies the journal from `covered` on; returns its end, with file zero if there is no file.
    ///
    /// `known_end` is the furthest place that was durable for certain: bytes missing before it are damage, behind it
    /// a torn write.
    pub(crate) fn journal(
        &mut self,
        dir: &LogDir,
        covered: Watermark,
        known_end: LogPos,
        indexer: &Indexer,
    ) -> Result<LogPos, ReplayError> {
        let files = dir.list()?;
        let mut end = LogPos::default();
        for (i, (number, _)) in files.iter().enumerate().filter(|(_, (n, _))| *n >= covered.journal.file) {
            let number = *number;
            let from = if number == covered.journal.file { covered.journal.offset } else { FILE_HEADER };
            let mut changes = Vec::new();
            let mut mark = Watermark { journal: LogPos { file: number, offset: from }, ..covered };
            let mut count = 0;
            let mut strange = 0;
            let file = dir.open(number)?;
            // A file shorter than what was known to be durable is read again from its start to find its true end.
            let from = if file.len()? < from { FILE_HEADER } else { from };
            let last = i + 1 == files.len();
            if last {
                self.cut_torn_group(dir, number, from, known_end)?;
            }
            let found = scan::<ReplayError>(&*file, dir.salt(number), from, &mut |offset, body| {
                let pos = LogPos { file: number, offset };
                let bytes = (FRAME_HEADER + body.len()) as u64;
                match read_journal_frame(body) {
                    Some(JournalFrame::Event { session, seq }) => {
                        changes.push(Change::Event { session, seq, pos, bytes });
                    }
                    Some(JournalFrame::Tombstone { session }) => {
                        changes.push(Change::Removed { session, pos })
                    }
                    None => strange += 1,
                }
                count += 1;
                if changes.len() >= BATCH {
                    mark.journal.offset = offset + bytes;
                    indexer.apply(std::mem::take(&mut changes), &mark)?;
                }
                Ok(())
            })?;
            mark.journal.offset = found.end;
            if !changes.is_empty() {
                indexer.apply(changes, &mark)?;
            }
            self.report.journal_records_replayed += count;
            self.report.unreadable_frames += strange;
            self.finish(dir, number, &found, last, known_end)?;
            end = LogPos { file: number, offset: found.end };
        }
        Ok(end)
    }

    /// Cuts a group that was written and never synced: the pieces of it that reached the disk may leave a hole
    /// before whole frames. None of it was acknowledged; a copy is kept all the same.
    fn cut_torn_group(
        &mut self,
        dir: &LogDir,
        number: u64,
        from: u64,
        known_end: LogPos,
    ) -> Result<(), ReplayError> {
        let file = dir.open(number)?;
        let found = scan::<ReplayError>(&*file, dir.salt(number), from, &mut |_, _| Ok(()))?;
        let known = match known_end.file.cmp(&number) {
            Ordering::Less => 0,
            Ordering::Equal => known_end.offset,
            Ordering::Greater => u64::MAX,
        };
        if let Some(cut) = found.torn_group(known) {
            let kept = self.quarantine.copy_file(&dir.path(number))?;
            self.report.quarantined.push(kept.display().to_string());
            self.report.torn_tail_bytes += found.len - cut;
            file.truncate(cut)?;
            file.sync_data()?;
        }
        Ok(())
    }

    /// Keeps and reports damage, cuts a torn end, repairs a header.
    fn finish(
        &mut self,
        dir: &LogDir,
        number: u64,
        found: &Scan,
        last: bool,
        known_end: LogPos,
    ) -> Result<(), ReplayError> {
        let path = dir.path(number);
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("log").to_owned();
        let torn = found.len.saturating_sub(found.end);
        let known = known_end > LogPos { file: number, offset: found.end };
        let tail_is_damage = if last { known } else { torn > 0 };
        let header_ok = dir.has_good_header(number)?;
        // A last file without any frame and without a header was being made when the process ended.
        let unborn = last && !header_ok && found.end <= FILE_HEADER && !known;
        if !found.gaps.is_empty() || tail_is_damage || (!header_ok && !unborn) {
            let kept = self.quarantine.copy_file(&path)?;
            self.report.quarantined.push(kept.display().to_string());
            if !header_ok {
                self.report.damaged.push(DamagedRange { file: name.clone(), start: 0, end: FILE_HEADER });
            }
            for gap in &found.gaps {
                self.report.damaged.push(DamagedRange { file: name.clone(), start: gap.start, end: gap.end });
            }
            if tail_is_damage {
                let known = if known_end.file == number { known_end.offset } else { 0 };
                self.report.damaged.push(DamagedRange {
                    file: name,
                    start: found.end,
                    end: found.len.max(known),
                });
            }
        }
        let file = dir.open(number)?;
        if !header_ok {
            file.write_at(0, &file_header(&dir.salt(number), crate::FORMAT_VERSION, number, self.now_ms))?;
            file.sync_data()?;
        }
        if last {
            if torn > 0 {
                file.truncate(found.end)?;
                if !tail_is_damage {
                    self.report.torn_tail_bytes += torn;
                }
            }
            // What was read may never have been synced: a reader must not see it vanish later.
            file.sync_data()?;
            self.disk.sync_dir(dir.dir())?;
        }
        Ok(())
    }

    /// Applies the metadata log from `covered` on, or from its newest finished export; returns its end, with file
    /// zero if there is no usable file.
    pub(crate) fn metalog(
        &mut self,
        dir: &LogDir,
        covered: Watermark,
        known_end: LogPos,
        raw: &Arc<dyn MetaStore>,
    ) -> Result<LogPos, ReplayError> {
        let mut files: Vec<u64> = dir.list()?.into_iter().map(|(number, _)| number).collect();
        // An export that did not finish is worth nothing while the file before it is there.
        while files.len() > 1 {
            let Some(newest) = files.last().copied().filter(|n| Some(*n) != Some(covered.metalog.file))
            else {
                break;
            };
            if look(dir, newest)?.in_use() {
                break;
            }
            dir.remove(newest)?;
            files.pop();
        }
        let start = if covered.metalog.file > 0 {
            covered.metalog.file
        } else {
            let mut base = files.first().copied().unwrap_or(0);
            for number in files.iter().rev() {
                if look(dir, *number)?.finished {
                    base = *number;
                    break;
                }
            }
            base
        };
        let mut end = LogPos::default();
        let last = files.last().copied();
        for number in files.into_iter().filter(|n| *n >= start) {
            let from = if number == covered.metalog.file { covered.metalog.offset } else { FILE_HEADER };
            let mut strange = 0;
            let mut applied = 0;
            let file = dir.open(number)?;
            let from = if file.len()? < from { FILE_HEADER } else { from };
            if Some(number) == last {
                self.cut_torn_group(dir, number, from, known_end)?;
            }
            let found = scan::<ReplayError>(&*file, dir.salt(number), from, &mut |_, body| {
                match read_meta_frame(body) {
                    Some(MetaFrame::Ops(ops) | MetaFrame::Export(ops)) => {
                        applied += ops.len() as u64;
                        apply_logged(raw, ops)?;
                    }
                    Some(MetaFrame::ExportEnd(_)) => {}
                    None => strange += 1,
                }
                Ok(())
            })?;
            self.report.meta_changes_replayed += applied;
            self.report.unreadable_frames += strange;
            self.finish(dir, number, &found, Some(number) == last, known_end)?;
            end = LogPos { file: number, offset: found.end };
        }
        Ok(end)
    }
}

/// Only what belongs to the log is taken from it.
fn apply_logged(raw: &Arc<dyn MetaStore>, mut ops: Vec<Op>) -> Result<(), MetaError> {
    ops.retain(|op| op.key().first().is_some_and(|prefix| crate::meta::keys::LOGGED.contains(prefix)));
    if ops.is_empty() { Ok(()) } else { raw.batch(ops) }
}

/// What a metadata log file holds.
struct Look {
    finished: bool,
    has_changes: bool,
}

impl Look {
    fn in_use(&self) -> bool {
        self.finished || self.has_changes
    }
}

fn look(dir: &LogDir, number: u64) -> Result<Look, io::Error> {
    let mut look = Look { finished: false, has_changes: false };
    scan::<io::Error>(&*dir.open(number)?, dir.salt(number), 0, &mut |_, body| {
        match read_meta_frame(body) {
            Some(MetaFrame::ExportEnd(_)) => look.finished = true,
            Some(MetaFrame::Ops(_)) => look.has_changes = true,
            _ => {}
        }
        Ok(())
    })?;
    Ok(look)
}
