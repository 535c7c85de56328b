//! The file of a trace: a mark, a version, then frames with the header and the records, each with its length and checksum. What
//! a killed process left unfinished at the end is not a frame, and reading ends before it.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::record::{Record, TraceHeader};
use crate::error::{Error, ErrorKind};

/// What a trace begins with.
const MAGIC: [u8; 8] = *b"SESTRACE";
/// Version of the format.
pub const TRACE_VERSION: u32 = 3;
/// Bytes before the first frame.
const HEAD_BYTES: u64 = 12;
/// Length and checksum before what a frame holds.
const FRAME_BYTES: u64 = 8;
/// Most bytes of a frame: a history of the longest context, several times.
const FRAME_MOST: u64 = 64 << 20;

/// The bytes a file begins with.
pub(super) fn head() -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(TRACE_VERSION.to_le_bytes());
    bytes
}

/// Adds a frame.
pub(super) fn frame(what: &impl Serialize, bytes: &mut Vec<u8>) -> Result<(), Error> {
    let payload = postcard::to_allocvec(what).map_err(Error::internal)?;
    if payload.len() as u64 > FRAME_MOST {
        return Err(Error::internal(format!("a record of {} bytes is too long", payload.len())));
    }
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(crc32c::crc32c(&payload).to_le_bytes());
    bytes.extend(payload);
    Ok(())
}

/// How a trace ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "end", rename_all = "snake_case")]
pub enum TraceEnd {
    /// The scheduler stopped.
    Stopped,
    /// After a whole record: the process ended without stopping, or is still running.
    Open,
    /// Within a record.
    Cut {
        /// Bytes behind the last whole record, which were not read.
        bytes: u64,
    },
}

/// Reads a trace.
pub struct TraceReader<R> {
    bytes: R,
    /// Bytes that are left.
    left: u64,
    name: String,
    header: TraceHeader,
    /// Records read.
    pub(in crate::scheduler) records: u64,
    cut: Option<u64>,
    stopped: bool,
}

impl TraceReader<BufReader<File>> {
    /// Opens a file.
    ///
    /// # Errors
    /// `trace_unreadable`, `trace_invalid`, `trace_newer`.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let unreadable = |error: io::Error| {
            let message = format!("the trace {} cannot be read: {error}", path.display());
            Error::new(ErrorKind::NotFound, "trace_unreadable", message)
        };
        let file = File::open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        Self::new(BufReader::new(file), length, &path.display().to_string())
    }
}

impl<R: Read> TraceReader<R> {
    /// Reads `length` bytes of what is called `name`.
    ///
    /// # Errors
    /// `trace_invalid`, `trace_newer`.
    pub fn new(mut bytes: R, length: u64, name: &str) -> Result<Self, Error> {
        let mut head = [0; HEAD_BYTES as usize];
        let [magic @ .., a, b, c, d] = &mut head;
        let whole = bytes.read_exact(magic).is_ok() && *magic == MAGIC;
        let mut version = [0; 4];
        if !whole || bytes.read_exact(&mut version).is_err() {
            return Err(invalid(name, "is not a trace: give a file that `--trace` wrote"));
        }
        [*a, *b, *c, *d] = version;
        let version = u32::from_le_bytes(version);
        if version != TRACE_VERSION {
            return Err(Error::invalid(
                "trace_newer",
                format!(
                    "{name} is a trace of version {version} and this program reads version {TRACE_VERSION}: replay it with \
                     the program that wrote it"
                ),
            ));
        }
        let mut left = length.saturating_sub(HEAD_BYTES);
        let header = next_frame(&mut bytes, &mut left);
        let Some(header) = header else {
            return Err(invalid(
                name,
                "holds no header: it was cut off before its first record; record it again",
            ));
        };
        Ok(Self { bytes, left, name: name.to_owned(), header, records: 0, cut: None, stopped: false })
    }

    /// What it begins with.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// The file's name.
    pub(in crate::scheduler) fn name(&self) -> &str {
        &self.name
    }

    /// The next record; `None` at the end.
    pub(in crate::scheduler) fn next_record(&mut self) -> Option<Record> {
        if self.left == 0 || self.cut.is_some() {
            return None;
        }
        let before = self.left;
        let record: Option<Record> = next_frame(&mut self.bytes, &mut self.left);
        match &record {
            None => self.cut = Some(before),
            Some(record) => {
                self.records += 1;
                self.stopped = matches!(record.cause, super::record::Cause::Stop);
            }
        }
        record
    }

    /// How it ended, once everything is read.
    pub(in crate::scheduler) fn end(&self) -> TraceEnd {
        match (self.cut, self.stopped) {
            (Some(bytes), _) => TraceEnd::Cut { bytes },
            (None, true) => TraceEnd::Stopped,
            (None, false) => TraceEnd::Open,
        }
    }
}

fn invalid(name: &str, what: &str) -> Error {
    Error::invalid("trace_invalid", format!("{name} {what}"))
}

/// What the next frame holds; `None` where there is no whole one.
fn next_frame<T: DeserializeOwned>(bytes: &mut impl Read, left: &mut u64) -> Option<T> {
    let mut word = || {
        let mut word = [0; 4];
        bytes.read_exact(&mut word).ok().map(|()| u32::from_le_bytes(word))
    };
    let (length, checksum) = (word()?, word()?);
    let after = left.checked_sub(FRAME_BYTES + u64::from(length))?;
    if u64::from(length) > FRAME_MOST {
        return None;
    }
    let mut payload = vec![0; length as usize];
    bytes.read_exact(&mut payload).ok()?;
    if crc32c::crc32c(&payload) != checksum {
        return None;
    }
    let (what, rest) = postcard::take_from_bytes(&payload).ok()?;
    *left = after;
    rest.is_empty().then_some(what)
}
