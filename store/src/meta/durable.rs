//! The metadata that the store's users see: every change is in the metadata log, synced, before it is acknowledged.

use std::sync::{Arc, OnceLock};

use super::{CasOutcome, MetaEntry, MetaError, MetaStore, Op, check, check_key, check_value, keys};
use crate::journal::{Queue, Work};
use crate::lock::DirLock;

/// A [`MetaStore`] whose changes survive a crash and a loss of the index. Its keys are apart from the store's own.
///
/// Changes go through the journal's commit thread: each call returns once its change is durable and readable.
pub struct DurableMeta {
    raw: Arc<dyn MetaStore>,
    queue: Arc<Queue>,
    /// The directory stays locked for as long as anyone can reach the index.
    _lock: Arc<DirLock>,
}

fn size(ops: &[Op]) -> usize {
    ops.iter()
        .map(|op| match op {
            Op::Put { key, value } => key.len() + value.len(),
            Op::Delete { key } => key.len(),
        })
        .sum()
}

impl DurableMeta {
    pub(crate) fn new(raw: Arc<dyn MetaStore>, queue: Arc<Queue>, lock: Arc<DirLock>) -> Self {
        Self { raw, queue, _lock: lock }
    }

    /// Applies changes to keys of the store's own, durably.
    pub(crate) fn apply(&self, ops: Vec<Op>) -> Result<(), MetaError> {
        check(&ops)?;
        if ops.is_empty() {
            return Ok(());
        }
        let bytes = size(&ops);
        Ok(self.queue.push(Work::Meta { ops }, bytes)?.wait()?)
    }

    /// The index itself.
    pub(crate) fn raw(&self) -> &dyn MetaStore {
        &*self.raw
    }
}

fn user_key(key: &[u8]) -> Result<Vec<u8>, MetaError> {
    check_key(key)?;
    let key = keys::user(key);
    check_key(&key)?;
    Ok(key)
}

impl MetaStore for DurableMeta {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, MetaError> {
        self.raw.get(&user_key(key)?)
    }

    fn compare_and_set(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<CasOutcome, MetaError> {
        check_value(new.unwrap_or_default())?;
        let outcome = Arc::new(OnceLock::new());
        let bytes = key.len() + expected.map_or(0, <[u8]>::len) + new.map_or(0, <[u8]>::len);
        let work = Work::Cas {
            key: user_key(key)?,
            expected: expected.map(<[u8]>::to_vec),
            new: new.map(<[u8]>::to_vec),
            outcome: Arc::clone(&outcome),
        };
        self.queue.push(work, bytes)?.wait()?;
        outcome.get().cloned().ok_or(MetaError::Closed)
    }

    fn batch(&self, ops: Vec<Op>) -> Result<(), MetaError> {
        let ops = ops
            .into_iter()
            .map(|op| {
                Ok(match op {
                    Op::Put { key, value } => Op::Put { key: user_key(&key)?, value },
                    Op::Delete { key } => Op::Delete { key: user_key(&key)? },
                })
            })
            .collect::<Result<_, MetaError>>()?;
        self.apply(ops)
    }

    fn scan_prefix(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<MetaEntry>, MetaError> {
        let after = after.map(keys::user);
        let found = self.raw.scan_prefix(&keys::user(prefix), after.as_deref(), limit)?;
        Ok(found.into_iter().map(|(key, value)| (key[1..].to_vec(), value)).collect())
    }

    fn flush(&self) -> Result<(), MetaError> {
        Ok(self.queue.push(Work::Barrier, 0)?.wait()?)
    }
}
