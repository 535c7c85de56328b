//! The growing end of a log: frames are collected, written in one piece and made durable together.

use std::io;
use std::sync::Arc;

use super::{FILE_HEADER, FRAME_HEADER, LogDir, LogPos, push_frame};
use crate::clock::Clock;
use crate::disk::DiskFile;
use crate::failpoint::Failpoints;

/// The fail points of one log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TailPoints {
    pub(crate) before_write: &'static str,
    pub(crate) before_fsync: &'static str,
    pub(crate) after_fsync: &'static str,
    pub(crate) before_rotate: &'static str,
    pub(crate) after_rotate: &'static str,
}

/// The end of a log. One thread owns it.
pub(crate) struct LogTail {
    dir: Arc<LogDir>,
    clock: Arc<dyn Clock>,
    failpoints: Failpoints,
    points: TailPoints,
    number: u64,
    file: Arc<dyn DiskFile>,
    /// Bytes written; everything up to here is durable between calls.
    written: u64,
    buffer: Vec<u8>,
    limit: u64,
}

impl LogTail {
    /// Goes on at `end` of the log, or starts file 1 if `end.file` is zero.
    pub(crate) fn open(
        dir: Arc<LogDir>,
        clock: Arc<dyn Clock>,
        failpoints: Failpoints,
        points: TailPoints,
        end: LogPos,
        limit: u64,
    ) -> io::Result<Self> {
        let (number, file, written) = if end.file == 0 {
            (1, dir.create(1, clock.now_ms())?, FILE_HEADER)
        } else {
            (end.file, dir.open(end.file)?, end.offset.max(FILE_HEADER))
        };
        let buffer = Vec::new();
        Ok(Self { dir, clock, failpoints, points, number, file, written, buffer, limit })
    }

    /// Where the next frame will stand.
    pub(crate) fn end(&self) -> LogPos {
        LogPos { file: self.number, offset: self.written + self.buffer.len() as u64 }
    }

    /// Adds a frame, in a new file if this one is full. It is not durable before [`LogTail::commit`].
    pub(crate) fn push(&mut self, body: &[u8]) -> io::Result<LogPos> {
        let size = (FRAME_HEADER + body.len()) as u64;
        if self.end().offset + size > self.limit && self.end().offset > FILE_HEADER {
            self.rotate()?;
        }
        let pos = self.end();
        push_frame(&mut self.buffer, &self.dir.salt(self.number), pos.offset, self.written, body);
        Ok(pos)
    }

    /// Writes and syncs what was pushed.
    pub(crate) fn commit(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.failpoints.hit(self.points.before_write)?;
        self.file.write_at(self.written, &self.buffer)?;
        self.failpoints.hit(self.points.before_fsync)?;
        self.file.sync_data()?;
        self.failpoints.hit(self.points.after_fsync)?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        // One giant record must not keep its memory for ever.
        self.buffer.shrink_to(1 << 20);
        Ok(())
    }

    /// Commits and goes on in a new file.
    pub(crate) fn rotate(&mut self) -> io::Result<()> {
        self.commit()?;
        self.failpoints.hit(self.points.before_rotate)?;
        let number = self.number + 1;
        self.file = self.dir.create(number, self.clock.now_ms())?;
        self.number = number;
        self.written = FILE_HEADER;
        self.failpoints.hit(self.points.after_rotate)
    }
}
