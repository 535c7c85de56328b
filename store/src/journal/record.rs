//! What frames of the journal and of the metadata log hold, and how it is written.

use std::sync::Arc;

use crate::framed::{Reader, Writer};
use crate::meta::Op;

/// One record of a session's journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalRecord {
    /// The session.
    pub session: String,
    /// Its number within the session, from 1.
    pub seq: u64,
    /// The caller's word for what it is.
    pub kind: String,
    /// Wall time of the append, in milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// The caller's bytes.
    pub payload: Vec<u8>,
}

const EVENT: u8 = 1;
const TOMBSTONE: u8 = 2;
const OPS: u8 = 3;
const EXPORT_END: u8 = 4;
const EXPORT: u8 = 5;

/// The body of an event's frame.
pub(crate) fn event(session: &str, seq: u64, time_ms: u64, kind: &str, payload: &[u8]) -> Vec<u8> {
    let mut body = Writer(Vec::with_capacity(40 + session.len() + kind.len() + payload.len()));
    body.u8(EVENT).u64(seq).u64(time_ms).bytes(session.as_bytes()).bytes(kind.as_bytes()).bytes(payload);
    body.0
}

/// The body of the frame that ends a session.
pub(crate) fn tombstone(session: &str, time_ms: u64) -> Vec<u8> {
    let mut body = Writer::default();
    body.u8(TOMBSTONE).u64(time_ms).bytes(session.as_bytes());
    body.0
}

/// The body of a frame of metadata changes.
pub(crate) fn ops(ops: &[Op]) -> Vec<u8> {
    write_ops(OPS, ops)
}

/// The body of a frame of exported metadata.
pub(crate) fn export(ops: &[Op]) -> Vec<u8> {
    write_ops(EXPORT, ops)
}

/// The body of the frame that ends an export of `entries` entries.
pub(crate) fn export_end(entries: u64) -> Vec<u8> {
    let mut body = Writer::default();
    body.u8(EXPORT_END).u64(entries);
    body.0
}

fn write_ops(tag: u8, ops: &[Op]) -> Vec<u8> {
    let mut body = Writer::default();
    body.u8(tag).u32(ops.len() as u32);
    for op in ops {
        match op {
            Op::Put { key, value } => body.u8(1).bytes(key).bytes(value),
            Op::Delete { key } => body.u8(0).bytes(key),
        };
    }
    body.0
}

/// A frame of the journal, without its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JournalFrame {
    Event { session: Arc<str>, seq: u64 },
    Tombstone { session: Arc<str> },
}

/// A frame of the metadata log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MetaFrame {
    Ops(Vec<Op>),
    Export(Vec<Op>),
    ExportEnd(u64),
}

pub(crate) fn read_record(body: &[u8]) -> Option<JournalRecord> {
    let mut fields = Reader::new(body);
    if fields.u8()? != EVENT {
        return None;
    }
    let (seq, time_ms) = (fields.u64()?, fields.u64()?);
    let (session, kind) = (fields.text()?.to_owned(), fields.text()?.to_owned());
    let payload = fields.bytes()?.to_vec();
    fields.is_done().then_some(JournalRecord { session, seq, kind, time_ms, payload })
}

pub(crate) fn read_journal_frame(body: &[u8]) -> Option<JournalFrame> {
    let mut fields = Reader::new(body);
    match fields.u8()? {
        EVENT => {
            let (seq, _time) = (fields.u64()?, fields.u64()?);
            let session = fields.text()?.into();
            let (_kind, _payload) = (fields.text()?, fields.bytes()?);
            fields.is_done().then_some(JournalFrame::Event { session, seq })
        }
        TOMBSTONE => {
            let _time = fields.u64()?;
            let session = fields.text()?.into();
            fields.is_done().then_some(JournalFrame::Tombstone { session })
        }
        _ => None,
    }
}

pub(crate) fn read_meta_frame(body: &[u8]) -> Option<MetaFrame> {
    let mut fields = Reader::new(body);
    let tag = fields.u8()?;
    if tag == EXPORT_END {
        let entries = fields.u64()?;
        return fields.is_done().then_some(MetaFrame::ExportEnd(entries));
    }
    let count = fields.u32()?;
    let mut ops = Vec::new();
    for _ in 0..count {
        ops.push(match fields.u8()? {
            1 => Op::put(fields.bytes()?, fields.bytes()?),
            0 => Op::delete(fields.bytes()?),
            _ => return None,
        });
    }
    match (fields.is_done(), tag) {
        (true, OPS) => Some(MetaFrame::Ops(ops)),
        (true, EXPORT) => Some(MetaFrame::Export(ops)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_come_back_and_cut_ones_are_refused() {
        let body = event("sess_1", 7, 99, "turn", b"payload");
        let record = read_record(&body).unwrap();
        assert_eq!(
            (record.seq, record.kind.as_str(), record.payload.as_slice()),
            (7, "turn", &b"payload"[..])
        );
        assert_eq!(read_journal_frame(&body), Some(JournalFrame::Event { session: "sess_1".into(), seq: 7 }));
        let changes = vec![Op::put(*b"uk", *b"v"), Op::delete(*b"ud")];
        let meta = ops(&changes);
        assert_eq!(read_meta_frame(&meta), Some(MetaFrame::Ops(changes.clone())));
        assert_eq!(read_meta_frame(&export(&changes)), Some(MetaFrame::Export(changes)));
        assert_eq!(read_meta_frame(&export_end(3)), Some(MetaFrame::ExportEnd(3)));
        assert_eq!(
            read_journal_frame(&tombstone("s", 1)),
            Some(JournalFrame::Tombstone { session: "s".into() })
        );
        for body in [body, meta] {
            for cut in 0..body.len() {
                assert!(read_record(&body[..cut]).is_none());
                assert!(read_journal_frame(&body[..cut]).is_none());
                assert!(read_meta_frame(&body[..cut]).is_none());
            }
        }
    }
}
