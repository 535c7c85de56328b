//! Reading records back through the index.

use std::io;
use std::sync::Arc;

use super::record::{JournalRecord, read_record};
use super::{JournalError, index};
use crate::framed::{FrameReader, LogDir, LogPos};
use crate::limits::{MAX_READ_BYTES, MAX_SCAN};
use crate::meta::MetaStore;
use crate::meta::keys::{self, be64};

/// Reads up to `limit` records of a session behind number `after`, and at most [`MAX_READ_BYTES`] of payload.
pub(crate) fn read(
    raw: &Arc<dyn MetaStore>,
    dir: &LogDir,
    session: &str,
    after: u64,
    limit: usize,
) -> Result<Vec<JournalRecord>, JournalError> {
    let prefix = keys::records_of(session);
    let entries = raw.scan_prefix(&prefix, Some(&keys::record(session, after)), limit.min(MAX_SCAN))?;
    let mut places = Vec::with_capacity(entries.len());
    for (key, value) in &entries {
        let place = be64(&key[prefix.len()..]).zip(index::read_position(value));
        places.push(place.ok_or_else(|| JournalError::Damaged {
            session: session.to_owned(),
            seq: after + 1,
            detail: "its index entry cannot be read".to_owned(),
        })?);
    }
    let mut records = Vec::with_capacity(places.len());
    let mut bytes = 0;
    let mut at = 0;
    while at < places.len() {
        let number = places[at].1.file;
        let run = places[at..].iter().take_while(|(_, pos)| pos.file == number).count();
        let file = match dir.open(number) {
            Ok(file) => file,
            Err(e) => return vanished(raw, session, places[at], &e, records),
        };
        let mut frames = FrameReader::new(&*file, dir.salt(number));
        for (seq, pos) in &places[at..at + run] {
            let record =
                frames.frame(pos.offset).map_err(|e| io_error(session, *seq, &e))?.and_then(read_record);
            let record = record.filter(|r| r.session == session && r.seq == *seq);
            let record = record.ok_or_else(|| damaged(session, *seq, *pos))?;
            bytes += record.payload.len();
            if bytes > MAX_READ_BYTES && !records.is_empty() {
                return Ok(records);
            }
            records.push(record);
        }
        at += run;
    }
    Ok(records)
}

/// A file can go while it is read only because its sessions were removed; then the index says so too.
fn vanished(
    raw: &Arc<dyn MetaStore>,
    session: &str,
    (seq, pos): (u64, LogPos),
    error: &io::Error,
    records: Vec<JournalRecord>,
) -> Result<Vec<JournalRecord>, JournalError> {
    if error.kind() != io::ErrorKind::NotFound {
        return Err(io_error(session, seq, error));
    }
    match raw.get(&keys::record(session, seq))? {
        None => Ok(records),
        Some(_) => Err(damaged(session, seq, pos)),
    }
}

fn io_error(session: &str, seq: u64, error: &io::Error) -> JournalError {
    JournalError::Io {
        what: format!("reading record {seq} of session {session:?}"),
        detail: error.to_string(),
    }
}

fn damaged(session: &str, seq: u64, pos: LogPos) -> JournalError {
    JournalError::Damaged {
        session: session.to_owned(),
        seq,
        detail: format!("journal file {} does not hold it at byte {}", pos.file, pos.offset),
    }
}
