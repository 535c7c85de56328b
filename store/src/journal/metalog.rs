//! The metadata log: what the index holds that no record and no pack could rebuild.
//!
//! Segments and the keys of the store's users are written here before sled knows them. Each file starts with an
//! export of all of it, so older files can go; a file whose export did not finish is not used.

use std::io;
use std::sync::Arc;

use super::record;
use crate::failpoint::{Failpoints, point};
use crate::framed::{FILE_HEADER, LogDir, LogPos, LogTail, TailPoints};
use crate::meta::{MetaError, MetaStore, Op, keys};

/// Entries in one frame of an export.
const EXPORT_PAGE: usize = 256;
/// The letter of the metadata log's files.
pub(crate) const KIND: u8 = b'm';

const POINTS: TailPoints = TailPoints {
    before_write: point::METALOG_BEFORE_WRITE,
    before_fsync: point::METALOG_BEFORE_FSYNC,
    after_fsync: point::METALOG_AFTER_FSYNC,
    before_rotate: point::METALOG_BEFORE_EXPORT,
    after_rotate: point::METALOG_BEFORE_EXPORT,
};

/// Why the metadata log could not go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MetalogError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Meta(#[from] MetaError),
}

/// The log's end and its export.
pub(crate) struct Metalog {
    tail: LogTail,
    failpoints: Failpoints,
    /// Where the export of the current file ends.
    export_end: u64,
    limit: u64,
}

impl Metalog {
    /// Goes on at `end`, or starts the first file with an export of `raw` if `end.file` is zero.
    pub(crate) fn open(
        dir: Arc<LogDir>,
        clock: Arc<dyn crate::clock::Clock>,
        failpoints: Failpoints,
        end: LogPos,
        limit: u64,
        raw: &dyn MetaStore,
    ) -> Result<Self, MetalogError> {
        // Files are turned by exports, never by their size alone.
        let tail = LogTail::open(dir, clock, failpoints.clone(), POINTS, end, u64::MAX)?;
        let mut log = Self { tail, failpoints, export_end: FILE_HEADER, limit };
        if end.file == 0 {
            log.write_export(raw)?;
        }
        Ok(log)
    }

    pub(crate) fn end(&self) -> LogPos {
        self.tail.end()
    }

    /// Adds the changes of one request.
    pub(crate) fn push(&mut self, ops: &[Op]) -> io::Result<()> {
        self.tail.push(&record::ops(ops)).map(drop)
    }

    /// Makes what was pushed durable.
    pub(crate) fn commit(&mut self) -> io::Result<()> {
        self.tail.commit()
    }

    /// Starts a new file with an export, once the changes outweigh the last one. `raw` must hold every change pushed
    /// so far.
    pub(crate) fn export_if_due(&mut self, raw: &dyn MetaStore) -> Result<(), MetalogError> {
        let changes = self.tail.end().offset - self.export_end;
        if changes < self.limit.max(self.export_end * 2) {
            return Ok(());
        }
        self.tail.rotate()?;
        self.write_export(raw)?;
        self.failpoints.hit(point::METALOG_AFTER_EXPORT)?;
        Ok(())
    }

    fn write_export(&mut self, raw: &dyn MetaStore) -> Result<(), MetalogError> {
        let mut entries = 0;
        for prefix in keys::LOGGED {
            let mut after: Option<Vec<u8>> = None;
            loop {
                let page = raw.scan_prefix(&[*prefix], after.as_deref(), EXPORT_PAGE)?;
                let Some((last, _)) = page.last() else { break };
                after = Some(last.clone());
                entries += page.len() as u64;
                let ops: Vec<Op> = page.into_iter().map(|(key, value)| Op::Put { key, value }).collect();
                self.tail.push(&record::export(&ops))?;
                self.tail.commit()?;
            }
        }
        self.tail.push(&record::export_end(entries))?;
        self.tail.commit()?;
        self.export_end = self.tail.end().offset;
        Ok(())
    }
}
