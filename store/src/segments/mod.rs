//! Segments: labelled token ranges of sessions, with retention and a time to live.
//!
//! Owns the records, their order within a session and the index of deadlines. Every change is durable when its call
//! returns. Knows nothing of tokens: a range is two numbers, a kind is a word of the caller's.

mod sweep;

pub use sweep::{ClockState, SweepReport};

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use crate::clock::Clock;
use crate::limits::{MAX_KIND, MAX_META_BATCH, MAX_META_VALUE, MAX_SESSION_NAME};
use crate::meta::{DurableMeta, MetaError, Op, keys};
use crate::sync::lock;
use sweep::SweepClock;

/// Locks that serialise changes; segments of one session share one.
const STRIPES: usize = 64;
/// Bytes of a name inside a segment.
const MAX_NAME: usize = 128;

/// How long a segment stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retention {
    /// Until it is removed.
    Keep,
    /// Until the turn that made it ends; the session removes it then.
    DropAfterTurn,
    /// Until its deadline passes, counted from the last put, touch or change of retention.
    Expire {
        /// Milliseconds it lives.
        ttl_ms: u64,
    },
}

/// A labelled range of a session's tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// `seg_` and a version 7 UUID; see [`Segment::new_id`].
    pub id: String,
    /// The session it belongs to.
    pub session: String,
    /// The caller's word for what it is.
    pub kind: String,
    /// Index of its first token.
    pub start: u64,
    /// Index behind its last token.
    pub end: u64,
    /// How long it stays.
    pub retention: Retention,
    /// When it expires, in wall milliseconds. Set by the store from the retention.
    pub deadline_ms: Option<u64>,
    /// The segment it replaces, if any.
    pub supersedes: Option<String>,
    /// When it was made, in wall milliseconds.
    pub created_ms: u64,
    /// The outstanding tool call that depends on it: it does not expire while this is set.
    pub pinned_by: Option<String>,
}

impl Segment {
    /// A new id.
    pub fn new_id() -> String {
        format!("seg_{}", uuid::Uuid::now_v7().simple())
    }
}

/// Why a segment operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// A field cannot be stored.
    #[error("segment field {field} cannot be stored: {detail}")]
    BadField {
        /// The field.
        field: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// There is no such segment.
    #[error("there is no segment {0:?}: it expired, was removed, or never was")]
    Unknown(String),
    /// The id is taken by a segment of another session.
    #[error("segment {id:?} belongs to session {session:?}: ids are not shared")]
    OtherSession {
        /// The id.
        id: String,
        /// The session it belongs to.
        session: String,
    },
    /// The index or the log failed.
    #[error(transparent)]
    Meta(#[from] MetaError),
}

/// The segments of one store.
pub struct SegmentStore {
    meta: Arc<DurableMeta>,
    clock: Arc<dyn Clock>,
    stripes: Vec<Mutex<()>>,
    sweep: Mutex<SweepClock>,
}

fn check_text(field: &'static str, text: &str, limit: usize) -> Result<(), SegmentError> {
    if text.is_empty() || text.len() > limit || text.contains('\0') {
        let detail = format!("it must have 1 to {limit} bytes and no zero byte");
        return Err(SegmentError::BadField { field, detail });
    }
    Ok(())
}

fn check(segment: &Segment) -> Result<(), SegmentError> {
    check_text("id", &segment.id, MAX_NAME)?;
    check_text("session", &segment.session, MAX_SESSION_NAME)?;
    check_text("kind", &segment.kind, MAX_KIND)?;
    for (field, text) in [("supersedes", &segment.supersedes), ("pinned_by", &segment.pinned_by)] {
        if let Some(text) = text {
            check_text(field, text, MAX_NAME)?;
        }
    }
    if segment.start > segment.end {
        let detail = format!("the range {}..{} is backwards", segment.start, segment.end);
        return Err(SegmentError::BadField { field: "start", detail });
    }
    Ok(())
}

fn encode(segment: &Segment) -> Result<Vec<u8>, SegmentError> {
    let bytes = serde_json::to_vec(segment)
        .map_err(|e| SegmentError::BadField { field: "segment", detail: e.to_string() })?;
    if bytes.len() > MAX_META_VALUE {
        let detail = format!("the record has {} bytes of {MAX_META_VALUE}", bytes.len());
        return Err(SegmentError::BadField { field: "segment", detail });
    }
    Ok(bytes)
}

/// The changes that take a stored segment away.
fn removal(segment: &Segment) -> Vec<Op> {
    let mut ops = vec![
        Op::delete(keys::segment(&segment.id)),
        Op::delete(keys::segment_of(&segment.session, segment.start, &segment.id)),
    ];
    if let Some(deadline) = segment.deadline_ms {
        ops.push(Op::delete(keys::deadline(deadline, &segment.id)));
    }
    ops
}

impl SegmentStore {
    pub(crate) fn open(meta: Arc<DurableMeta>, clock: Arc<dyn Clock>) -> Result<Self, MetaError> {
        let sweep = SweepClock::load(meta.raw(), &*clock)?;
        let stripes = (0..STRIPES).map(|_| Mutex::new(())).collect();
        Ok(Self { meta, clock, stripes, sweep: Mutex::new(sweep) })
    }

    fn stripe(&self, session: &str) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        session.hash(&mut hasher);
        lock(&self.stripes[(hasher.finish() % STRIPES as u64) as usize])
    }

    fn all_stripes(&self) -> Vec<MutexGuard<'_, ()>> {
        self.stripes.iter().map(lock).collect()
    }

    /// Stores a segment, or replaces the one of its id. With [`Retention::Expire`] its deadline is set to now plus
    /// the time to live, unless the segment brings one; with any other retention it has none.
    ///
    /// Returns the segment as stored.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn put(&self, segment: Segment) -> Result<Segment, SegmentError> {
        let mut stored = self.put_all(vec![segment])?;
        stored.pop().ok_or(SegmentError::Unknown(String::new()))
    }

    /// Stores segments of one session together: all or none, with one wait for the disk.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn put_all(&self, segments: Vec<Segment>) -> Result<Vec<Segment>, SegmentError> {
        let Some(session) = segments.first().map(|s| s.session.clone()) else { return Ok(segments) };
        let _held = self.stripe(&session);
        let mut stored = Vec::with_capacity(segments.len());
        let mut ops = Vec::new();
        for mut segment in segments {
            check(&segment)?;
            if segment.session != session {
                let detail = "segments stored together must be of one session".to_owned();
                return Err(SegmentError::BadField { field: "session", detail });
            }
            segment.deadline_ms = match segment.retention {
                Retention::Expire { ttl_ms } => {
                    segment.deadline_ms.or_else(|| Some(self.clock.now_ms().saturating_add(ttl_ms)))
                }
                Retention::Keep | Retention::DropAfterTurn => None,
            };
            if let Some(old) = self.get(&segment.id)? {
                if old.session != segment.session {
                    return Err(SegmentError::OtherSession { id: old.id, session: old.session });
                }
                ops.extend(removal(&old));
            }
            ops.extend(insertion(&segment)?);
            stored.push(segment);
        }
        self.meta.apply(ops)?;
        Ok(stored)
    }

    /// A segment by id.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn get(&self, id: &str) -> Result<Option<Segment>, SegmentError> {
        check_text("id", id, MAX_NAME)?;
        let key = keys::segment(id);
        let Some(bytes) = self.meta.raw().get(&key)? else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|e| {
            MetaError::Corrupt { key: key.escape_ascii().to_string(), detail: e.to_string() }.into()
        })
    }

    /// The segments of a session, in order of their first token.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn list(&self, session: &str) -> Result<Vec<Segment>, SegmentError> {
        check_text("session", session, MAX_SESSION_NAME)?;
        let prefix = keys::segments_of(session);
        let mut ids = Vec::new();
        crate::meta::for_each::<MetaError>(self.meta.raw(), &prefix, &mut |key, _| {
            if let Some(id) = key.get(prefix.len() + 8..).and_then(|id| std::str::from_utf8(id).ok()) {
                ids.push(id.to_owned());
            }
            Ok(())
        })?;
        // One removed between the two reads is left out.
        ids.iter().filter_map(|id| self.get(id).transpose()).collect()
    }

    /// Removes a segment; whether it was there.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn remove(&self, id: &str) -> Result<bool, SegmentError> {
        let Some(segment) = self.get(id)? else { return Ok(false) };
        let _held = self.stripe(&segment.session);
        let Some(segment) = self.get(id)? else { return Ok(false) };
        self.meta.apply(removal(&segment))?;
        Ok(true)
    }

    /// Removes all segments of a session; returns how many.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn remove_session(&self, session: &str) -> Result<usize, SegmentError> {
        let _held = self.stripe(session);
        let segments = self.list(session)?;
        for some in segments.chunks(MAX_META_BATCH / 3) {
            self.meta.apply(some.iter().flat_map(removal).collect())?;
        }
        Ok(segments.len())
    }

    /// Changes how long a segment stays, counted from now; returns it as stored.
    ///
    /// # Errors
    /// [`SegmentError::Unknown`] and others.
    pub fn set_retention(&self, id: &str, retention: Retention) -> Result<Segment, SegmentError> {
        let now = self.clock.now_ms();
        self.change(id, |segment| {
            segment.retention = retention;
            segment.deadline_ms = match retention {
                Retention::Expire { ttl_ms } => Some(now.saturating_add(ttl_ms)),
                Retention::Keep | Retention::DropAfterTurn => None,
            };
        })
    }

    /// Counts a segment's time to live again from now; returns it as stored. Without one nothing changes.
    ///
    /// # Errors
    /// [`SegmentError::Unknown`] and others.
    pub fn touch(&self, id: &str) -> Result<Segment, SegmentError> {
        let now = self.clock.now_ms();
        self.change(id, |segment| {
            if let Retention::Expire { ttl_ms } = segment.retention {
                segment.deadline_ms = Some(now.saturating_add(ttl_ms));
            }
        })
    }

    /// Sets or clears the tool call that a segment must outlive; returns it as stored.
    ///
    /// # Errors
    /// [`SegmentError::Unknown`] and others.
    pub fn set_pin(&self, id: &str, call: Option<String>) -> Result<Segment, SegmentError> {
        self.change(id, |segment| segment.pinned_by = call)
    }

    fn change(&self, id: &str, change: impl FnOnce(&mut Segment)) -> Result<Segment, SegmentError> {
        let unknown = || SegmentError::Unknown(id.to_owned());
        let session = self.get(id)?.ok_or_else(unknown)?.session;
        let _held = self.stripe(&session);
        let old = self.get(id)?.ok_or_else(unknown)?;
        let mut new = old.clone();
        change(&mut new);
        if new == old {
            return Ok(old);
        }
        check(&new)?;
        let mut ops = removal(&old);
        ops.extend(insertion(&new)?);
        self.meta.apply(ops)?;
        Ok(new)
    }
}

/// The changes that store a segment.
fn insertion(segment: &Segment) -> Result<Vec<Op>, SegmentError> {
    let mut ops = vec![
        Op::put(keys::segment(&segment.id), encode(segment)?),
        Op::put(keys::segment_of(&segment.session, segment.start, &segment.id), Vec::new()),
    ];
    if let Some(deadline) = segment.deadline_ms {
        ops.push(Op::put(keys::deadline(deadline, &segment.id), Vec::new()));
    }
    Ok(ops)
}
