//! The index of the journal: which record stands where, which sessions live in which file.
//!
//! Used in two ways with the same result: by the commit thread as groups become durable, and by recovery for what
//! the index on disk may have missed. Applying a change twice changes nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, RwLock};

use crate::framed::LogPos;
use crate::limits::MAX_META_BATCH;
use crate::meta::keys::{self, be64, le64};
use crate::meta::watermark::Watermark;
use crate::meta::{MetaError, MetaStore, Op};
use crate::sync::write;

/// A session as the index knows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SessionState {
    pub(crate) last_seq: u64,
    pub(crate) count: u64,
}

/// A session's live records in one file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    /// Records before this offset are counted.
    upto: u64,
}

impl Live {
    fn value(&self) -> Vec<u8> {
        let mut value = pair(self.count, self.bytes);
        value.extend_from_slice(&self.upto.to_le_bytes());
        value
    }
}

/// One journal file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FileState {
    pub(crate) live: HashMap<Arc<str>, Live>,
    /// Offsets of tombstones.
    pub(crate) tombs: Vec<u64>,
}

/// All of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) sessions: HashMap<Arc<str>, SessionState>,
    pub(crate) files: BTreeMap<u64, FileState>,
}

impl State {
    /// Takes a record of `bytes` bytes out of a file's count; returns the change to the index.
    fn uncount(&mut self, session: &Arc<str>, file: u64, bytes: u64) -> Option<Op> {
        let live = &mut self.files.get_mut(&file)?.live;
        let entry = live.get_mut(session)?;
        entry.count = entry.count.saturating_sub(1);
        entry.bytes = entry.bytes.saturating_sub(bytes);
        if entry.count > 0 {
            return Some(Op::put(keys::file(file, session), entry.value()));
        }
        live.remove(session);
        Some(Op::delete(keys::file(file, session)))
    }
}

/// A journal frame that became durable.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Event {
        session: Arc<str>,
        seq: u64,
        pos: LogPos,
        bytes: u64,
    },
    Removed {
        session: Arc<str>,
        pos: LogPos,
    },
    /// A compaction wrote a tombstone anew.
    TombMoved {
        from: LogPos,
        pos: LogPos,
    },
    /// Metadata changes of the store's users, already in the metadata log.
    Ops(Vec<Op>),
}

/// Applies changes to the metadata and to the state in memory.
pub(crate) struct Indexer {
    raw: Arc<dyn MetaStore>,
    state: Arc<RwLock<State>>,
}

/// The count of a session whose records are being removed, in several batches.
const REMOVING: u64 = u64::MAX;

/// Changes collected into batches at request boundaries.
struct Batches<'a> {
    raw: &'a dyn MetaStore,
    ops: Vec<Op>,
}

impl Batches<'_> {
    fn add(&mut self, ops: Vec<Op>) -> Result<(), MetaError> {
        if self.ops.len() + ops.len() > MAX_META_BATCH {
            self.flush()?;
        }
        self.ops.extend(ops);
        Ok(())
    }

    /// Where a record stands, changes not yet flushed included.
    fn position(&self, key: &[u8]) -> Result<Option<LogPos>, MetaError> {
        // A batch has few changes, and only a record met twice is looked for.
        match self.ops.iter().rev().find(|op| op.key() == key) {
            Some(Op::Put { value, .. }) => Ok(read_position(value)),
            Some(Op::Delete { .. }) => Ok(None),
            None => Ok(self.raw.get(key)?.and_then(|value| read_position(&value))),
        }
    }

    fn flush(&mut self) -> Result<(), MetaError> {
        if self.ops.is_empty() { Ok(()) } else { self.raw.batch(std::mem::take(&mut self.ops)) }
    }
}

impl Indexer {
    pub(crate) fn new(raw: Arc<dyn MetaStore>, state: Arc<RwLock<State>>) -> Self {
        Self { raw, state }
    }

    /// Applies `changes`, then records that the index covers everything up to `covered`.
    pub(crate) fn apply(&self, changes: Vec<Change>, covered: &Watermark) -> Result<(), MetaError> {
        let mut batches = Batches { raw: &*self.raw, ops: Vec::new() };
        for change in changes {
            match change {
                Change::Event { session, seq, pos, bytes } => {
                    self.event(&mut batches, &session, seq, pos, bytes)?;
                }
                Change::Removed { session, pos } => {
                    batches.flush()?;
                    self.removed(&mut batches, &session, pos)?;
                }
                Change::TombMoved { from, pos } => batches.add(self.tomb_moved(from, pos))?,
                Change::Ops(ops) => batches.add(ops)?,
            }
        }
        batches.add(vec![Op::put(keys::COMMIT, commit_value(covered))])?;
        batches.flush()
    }

    /// Indexes a record where it stands. One that is known moves there if that is later in the journal than where
    /// it was: a compaction wrote it anew.
    fn event(
        &self,
        batches: &mut Batches<'_>,
        session: &Arc<str>,
        seq: u64,
        pos: LogPos,
        bytes: u64,
    ) -> Result<(), MetaError> {
        let key = keys::record(session, seq);
        let mut state = write(&self.state);
        let known = state.sessions.get(session).copied().unwrap_or_default();
        // Numbers ascend, so only a replay or a compaction meets one it knows.
        let old = if seq > known.last_seq { None } else { batches.position(&key)? };
        if old.is_some_and(|old| old > pos) {
            return Ok(());
        }
        let mut ops = Vec::with_capacity(4);
        if old.is_none() {
            let now = SessionState { last_seq: known.last_seq.max(seq), count: known.count + 1 };
            state.sessions.insert(Arc::clone(session), now);
            ops.push(Op::put(keys::session(session), pair(now.last_seq, now.count)));
        }
        if let Some(old) = old.filter(|old| *old != pos) {
            ops.extend(state.uncount(session, old.file, bytes));
        }
        if old != Some(pos) {
            ops.push(Op::put(key, position_value(pos)));
        }
        let live = state.files.entry(pos.file).or_default().live.entry(Arc::clone(session)).or_default();
        if pos.offset >= live.upto {
            *live = Live { count: live.count + 1, bytes: live.bytes + bytes, upto: pos.offset + 1 };
            ops.push(Op::put(keys::file(pos.file, session), live.value()));
        }
        batches.add(ops)
    }

    fn tomb_moved(&self, from: LogPos, pos: LogPos) -> Vec<Op> {
        let mut state = write(&self.state);
        if let Some(file) = state.files.get_mut(&from.file) {
            file.tombs.retain(|offset| *offset != from.offset);
        }
        state.files.entry(pos.file).or_default().tombs.push(pos.offset);
        vec![
            Op::delete(keys::tomb(from.file, from.offset)),
            Op::put(keys::tomb(pos.file, pos.offset), Vec::new()),
        ]
    }

    fn removed(&self, batches: &mut Batches<'_>, session: &Arc<str>, pos: LogPos) -> Result<(), MetaError> {
        let prefix = keys::records_of(session);
        batches.add(vec![Op::put(keys::session(session), pair(0, REMOVING))])?;
        loop {
            let page = self.raw.scan_prefix(&prefix, None, MAX_META_BATCH / 2)?;
            if page.is_empty() {
                break;
            }
            batches.add(page.into_iter().map(|(key, _)| Op::Delete { key }).collect())?;
            batches.flush()?;
        }
        let mut state = write(&self.state);
        state.sessions.remove(session);
        batches.add(vec![Op::delete(keys::session(session))])?;
        for (number, file) in &mut state.files {
            if file.live.remove(session).is_some() {
                batches.add(vec![Op::delete(keys::file(*number, session))])?;
            }
        }
        let tombs = &mut state.files.entry(pos.file).or_default().tombs;
        if !tombs.contains(&pos.offset) {
            tombs.push(pos.offset);
            batches.add(vec![Op::put(keys::tomb(pos.file, pos.offset), Vec::new())])?;
        }
        Ok(())
    }

    /// Forgets the records at `end` and behind it, which the journal has lost. Their numbers stay used.
    pub(crate) fn forget_behind(&self, end: LogPos) -> Result<(), MetaError> {
        let mut lost: Vec<(Vec<u8>, Arc<str>)> = Vec::new();
        crate::meta::for_each::<MetaError>(&*self.raw, &[keys::RECORD], &mut |key, value| {
            let session = key.get(1..key.len().saturating_sub(9)).and_then(|s| std::str::from_utf8(s).ok());
            if let Some(session) = session.filter(|_| read_position(value).is_some_and(|pos| pos >= end)) {
                lost.push((key.to_vec(), session.into()));
            }
            Ok(())
        })?;
        let mut batches = Batches { raw: &*self.raw, ops: Vec::new() };
        let mut state = write(&self.state);
        for (key, session) in lost {
            let mut ops = vec![Op::Delete { key }];
            if let Some(known) = state.sessions.get_mut(&session) {
                known.count = known.count.saturating_sub(1);
                ops.push(Op::put(keys::session(&session), pair(known.last_seq, known.count)));
            }
            batches.add(ops)?;
        }
        // New records will stand where the lost ones did, and must be counted.
        for (number, file) in state.files.range_mut(end.file..) {
            let from = if *number == end.file { end.offset } else { 0 };
            for (session, live) in file.live.iter_mut().filter(|(_, live)| live.upto > from) {
                live.upto = from;
                batches.add(vec![Op::put(keys::file(*number, session), live.value())])?;
            }
        }
        batches.flush()
    }

    /// Forgets a file that was deleted.
    pub(crate) fn forget_file(&self, number: u64) -> Result<(), MetaError> {
        let Some(file) = write(&self.state).files.remove(&number) else { return Ok(()) };
        let mut batches = Batches { raw: &*self.raw, ops: Vec::new() };
        for session in file.live.keys() {
            batches.add(vec![Op::delete(keys::file(number, session))])?;
        }
        for offset in file.tombs {
            batches.add(vec![Op::delete(keys::tomb(number, offset))])?;
        }
        batches.flush()
    }
}

fn pair(a: u64, b: u64) -> Vec<u8> {
    [a.to_le_bytes(), b.to_le_bytes()].concat()
}

fn position_value(pos: LogPos) -> Vec<u8> {
    pair(pos.file, pos.offset)
}

/// Where an index entry points.
pub(crate) fn read_position(value: &[u8]) -> Option<LogPos> {
    Some(LogPos { file: le64(value, 0)?, offset: le64(value, 8)? })
}

fn commit_value(covered: &Watermark) -> Vec<u8> {
    let mut value = pair(covered.commit, covered.journal.file);
    value.extend(pair(covered.journal.offset, covered.metalog.file));
    value.extend_from_slice(&covered.metalog.offset.to_le_bytes());
    value
}

fn read_commit(value: &[u8]) -> Option<Watermark> {
    Some(Watermark {
        commit: le64(value, 0)?,
        journal: LogPos { file: le64(value, 8)?, offset: le64(value, 16)? },
        metalog: LogPos { file: le64(value, 24)?, offset: le64(value, 32)? },
    })
}

/// What the index on disk says of the journal.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) state: State,
    /// The last group it holds.
    pub(crate) commit: Option<Watermark>,
    records: HashMap<Arc<str>, u64>,
    removing: HashSet<Arc<str>>,
}

impl Loaded {
    /// Takes in one entry of the tree; `None` if it cannot be read. Entries of other parts are passed over.
    pub(crate) fn take(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let (prefix, rest) = key.split_first()?;
        match *prefix {
            keys::RECORD => {
                read_position(value)?;
                let session = std::str::from_utf8(rest.get(..rest.len().checked_sub(9)?)?).ok()?;
                match self.records.get_mut(session) {
                    Some(count) => *count += 1,
                    None => drop(self.records.insert(session.into(), 1)),
                }
            }
            keys::SESSION => {
                let session = std::str::from_utf8(rest).ok()?.into();
                let found = SessionState { last_seq: le64(value, 0)?, count: le64(value, 8)? };
                // A removal that a crash cut short is finished by the replay of its tombstone.
                if found.count == REMOVING {
                    self.removing.insert(session);
                } else {
                    self.state.sessions.insert(session, found);
                }
            }
            keys::FILE => {
                let session: Arc<str> = std::str::from_utf8(rest.get(8..)?).ok()?.into();
                let live = Live { count: le64(value, 0)?, bytes: le64(value, 8)?, upto: le64(value, 16)? };
                self.state.files.entry(be64(rest)?).or_default().live.insert(session, live);
            }
            keys::TOMB => self.state.files.entry(be64(rest)?).or_default().tombs.push(be64(rest.get(8..)?)?),
            _ if key == keys::COMMIT => self.commit = Some(read_commit(value)?),
            _ => {}
        }
        Some(())
    }

    /// Whether the entries agree with each other: a missing one would go unnoticed otherwise.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (session, found) in &self.state.sessions {
            let records = self.records.get(session).copied().unwrap_or(0);
            if records != found.count {
                return Err(format!("session {session:?} has {records} indexed records of {}", found.count));
            }
        }
        let known = |s: &Arc<str>| self.state.sessions.contains_key(s) || self.removing.contains(s);
        match self.records.keys().find(|s| !known(s)) {
            Some(stray) => Err(format!("session {stray:?} has indexed records but no entry")),
            None => Ok(()),
        }
    }
}
