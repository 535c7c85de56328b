//! The one-byte prefixes of the metadata tree and the shapes of its keys.

/// The journal's commit record (one key).
pub(crate) const COMMIT: &[u8] = b"mcommit";
/// `j | session | 0 | seq`: where a journal record stands.
pub(crate) const RECORD: u8 = b'j';
/// `s | session`: last number and count of a session's records.
pub(crate) const SESSION: u8 = b's';
/// `f | file | session`: a session's live records in a journal file.
pub(crate) const FILE: u8 = b'f';
/// `t | file | offset`: a tombstone in a journal file.
pub(crate) const TOMB: u8 = b't';
/// `c | cell id`: where a cell stands.
pub(crate) const CELL: u8 = b'c';
/// `p | pack`: how far a pack is indexed.
pub(crate) const PACK: u8 = b'p';
/// `g | segment id`: a segment.
pub(crate) const SEGMENT: u8 = b'g';
/// `h | session | 0 | start | segment id`: the segments of a session in order.
pub(crate) const SEGMENT_OF: u8 = b'h';
/// `x | deadline | segment id`: the segments that expire, in order.
pub(crate) const DEADLINE: u8 = b'x';
/// The sweeper's clock record (one key).
pub(crate) const SWEEP_CLOCK: &[u8] = b"ksweep";
/// `u | ...`: keys of the store's users.
pub(crate) const USER: u8 = b'u';

/// Prefixes whose changes go through the metadata log, and which an export holds.
pub(crate) const LOGGED: &[u8] = &[SEGMENT, SEGMENT_OF, DEADLINE, SWEEP_CLOCK[0], USER];

fn key(prefix: u8, parts: &[&[u8]]) -> Vec<u8> {
    let mut key = Vec::with_capacity(1 + parts.iter().map(|p| p.len()).sum::<usize>());
    key.push(prefix);
    for part in parts {
        key.extend_from_slice(part);
    }
    key
}

pub(crate) fn records_of(session: &str) -> Vec<u8> {
    key(RECORD, &[session.as_bytes(), &[0]])
}

pub(crate) fn record(session: &str, seq: u64) -> Vec<u8> {
    key(RECORD, &[session.as_bytes(), &[0], &seq.to_be_bytes()])
}

pub(crate) fn session(session: &str) -> Vec<u8> {
    key(SESSION, &[session.as_bytes()])
}

pub(crate) fn file(number: u64, session: &str) -> Vec<u8> {
    key(FILE, &[&number.to_be_bytes(), session.as_bytes()])
}

pub(crate) fn tomb(number: u64, offset: u64) -> Vec<u8> {
    key(TOMB, &[&number.to_be_bytes(), &offset.to_be_bytes()])
}

pub(crate) fn cell(id: &[u8; 32]) -> Vec<u8> {
    key(CELL, &[id])
}

pub(crate) fn pack(number: u64) -> Vec<u8> {
    key(PACK, &[&number.to_be_bytes()])
}

pub(crate) fn segment(id: &str) -> Vec<u8> {
    key(SEGMENT, &[id.as_bytes()])
}

pub(crate) fn segments_of(session: &str) -> Vec<u8> {
    key(SEGMENT_OF, &[session.as_bytes(), &[0]])
}

pub(crate) fn segment_of(session: &str, start: u64, id: &str) -> Vec<u8> {
    key(SEGMENT_OF, &[session.as_bytes(), &[0], &start.to_be_bytes(), id.as_bytes()])
}

pub(crate) fn deadline(at_ms: u64, id: &str) -> Vec<u8> {
    key(DEADLINE, &[&at_ms.to_be_bytes(), id.as_bytes()])
}

pub(crate) fn user(name: &[u8]) -> Vec<u8> {
    key(USER, &[name])
}

/// A big-endian number at the start of `bytes`.
pub(crate) fn be64(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(..8)?.try_into().ok()?))
}

/// A little-endian number at `at` of a value.
pub(crate) fn le64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
