//! Small things by ordered key: the [`MetaStore`] trait and its implementations.
//!
//! Owns keys, values in a checked envelope, batches and scans. What sled holds is an *index*: everything in it can
//! be rebuilt from the journal, the metadata log and the headers of packs. Only this folder knows sled.

mod durable;
mod envelope;
pub(crate) mod keys;
mod memory;
mod sled;
pub(crate) mod watermark;

pub use durable::DurableMeta;
pub use memory::MemoryMeta;
pub(crate) use sled::SUSPECT_FILE;
pub use sled::{SledMeta, SledOptions, probe_metadata};

use crate::limits::{MAX_META_BATCH, MAX_META_KEY, MAX_META_VALUE};

/// Which implementation holds the index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MetaKind {
    /// sled on disk: opening reads what changed since the last checkpoint.
    #[default]
    Sled,
    /// Memory: opening replays the journal, the metadata log and the packs in full.
    Memory,
}

/// One change of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Sets a key.
    Put {
        /// The key, at most [`MAX_META_KEY`] bytes.
        key: Vec<u8>,
        /// The value, at most [`MAX_META_VALUE`] bytes.
        value: Vec<u8>,
    },
    /// Removes a key; fine if it is not there.
    Delete {
        /// The key.
        key: Vec<u8>,
    },
}

impl Op {
    /// A [`Op::Put`].
    pub fn put(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Self {
        Self::Put { key: key.into(), value: value.into() }
    }

    /// A [`Op::Delete`].
    pub fn delete(key: impl Into<Vec<u8>>) -> Self {
        Self::Delete { key: key.into() }
    }

    /// The key it changes.
    pub fn key(&self) -> &[u8] {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }
}

/// A key and its value.
pub type MetaEntry = (Vec<u8>, Vec<u8>);

/// What a compare-and-set did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CasOutcome {
    /// The key held what was expected and now holds the new value.
    Done,
    /// Nothing changed: the key holds this.
    Conflict {
        /// The value found, `None` if the key is absent.
        current: Option<Vec<u8>>,
    },
}

/// Why a metadata operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetaError {
    /// A value is over the limit.
    #[error(
        "a metadata value of {len} bytes is over the limit of {limit}: keep large data in cells or the journal"
    )]
    TooLarge {
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// A key is empty or over the limit.
    #[error("a metadata key of {len} bytes: it must have 1 to {limit}")]
    BadKey {
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// A batch is over the limit.
    #[error("a metadata batch of {len} operations is over the limit of {limit}: split it")]
    BatchTooLarge {
        /// Operations given.
        len: usize,
        /// Operations allowed.
        limit: usize,
    },
    /// A stored value does not verify. The index is rebuilt at the next open.
    #[error("the metadata value of key {key} is damaged ({detail}): reopen the store to rebuild the index")]
    Corrupt {
        /// The key, escaped.
        key: String,
        /// What did not match.
        detail: String,
    },
    /// The engine failed or panicked.
    #[error("the metadata engine failed: {0}")]
    Engine(String),
    /// Another handle has the engine's directory open.
    #[error("the metadata directory is in use by another handle: close that first")]
    Busy,
    /// The store stopped acknowledging writes.
    #[error("the store is poisoned and acknowledges nothing more: {0}")]
    Poisoned(String),
    /// The store is closed.
    #[error("the store is closed")]
    Closed,
    /// The queue of changes stayed full.
    #[error("the queue of metadata changes stayed full: retry later")]
    QueueFull,
}

/// Ordered bytes to bytes. Every implementation passes the same conformance suite.
///
/// Keys have 1 to [`MAX_META_KEY`] bytes and compare bytewise; values have at most [`MAX_META_VALUE`] bytes. Changes
/// by one caller are seen by that caller's later reads; a batch is seen whole or not at all.
pub trait MetaStore: Send + Sync {
    /// The value of a key.
    ///
    /// # Errors
    /// [`MetaError`].
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, MetaError>;

    /// Sets a key.
    ///
    /// # Errors
    /// [`MetaError`].
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), MetaError> {
        self.batch(vec![Op::put(key, value)])
    }

    /// Removes a key; fine if it is not there.
    ///
    /// # Errors
    /// [`MetaError`].
    fn delete(&self, key: &[u8]) -> Result<(), MetaError> {
        self.batch(vec![Op::delete(key)])
    }

    /// Sets (or with `new` = `None` removes) a key if it holds `expected` (`None`: if it is absent).
    ///
    /// # Errors
    /// [`MetaError`]; a mismatch is [`CasOutcome::Conflict`], not an error.
    fn compare_and_set(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<CasOutcome, MetaError>;

    /// Applies all operations, or none, in order.
    ///
    /// # Errors
    /// [`MetaError`]; a limit that any operation breaks refuses the whole batch.
    fn batch(&self, ops: Vec<Op>) -> Result<(), MetaError>;

    /// Up to `limit` entries whose key starts with `prefix`, ascending, behind the key `after` if given.
    /// At most [`crate::limits::MAX_SCAN`] are returned at once.
    ///
    /// # Errors
    /// [`MetaError`].
    fn scan_prefix(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<MetaEntry>, MetaError>;

    /// Makes everything applied so far as durable as the implementation can.
    ///
    /// # Errors
    /// [`MetaError`].
    fn flush(&self) -> Result<(), MetaError>;
}

/// Takes a key and its value.
pub(crate) type Visit<'a, E> = &'a mut dyn FnMut(&[u8], &[u8]) -> Result<(), E>;

/// Visits every entry behind `prefix` in pages.
pub(crate) fn for_each<E: From<MetaError>>(
    meta: &dyn MetaStore,
    prefix: &[u8],
    visit: Visit<'_, E>,
) -> Result<(), E> {
    let mut after: Option<Vec<u8>> = None;
    loop {
        let page = meta.scan_prefix(prefix, after.as_deref(), 1024)?;
        for (key, value) in &page {
            visit(key, value)?;
        }
        match page.into_iter().next_back() {
            Some((last, _)) => after = Some(last),
            None => return Ok(()),
        }
    }
}

/// Checks a batch against the limits.
pub(crate) fn check(ops: &[Op]) -> Result<(), MetaError> {
    if ops.len() > MAX_META_BATCH {
        return Err(MetaError::BatchTooLarge { len: ops.len(), limit: MAX_META_BATCH });
    }
    for op in ops {
        check_key(op.key())?;
        if let Op::Put { value, .. } = op {
            check_value(value)?;
        }
    }
    Ok(())
}

pub(crate) fn check_key(key: &[u8]) -> Result<(), MetaError> {
    if key.is_empty() || key.len() > MAX_META_KEY {
        return Err(MetaError::BadKey { len: key.len(), limit: MAX_META_KEY });
    }
    Ok(())
}

pub(crate) fn check_value(value: &[u8]) -> Result<(), MetaError> {
    if value.len() > MAX_META_VALUE {
        return Err(MetaError::TooLarge { len: value.len(), limit: MAX_META_VALUE });
    }
    Ok(())
}
