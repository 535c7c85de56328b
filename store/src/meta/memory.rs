//! The index in memory: the model the others are compared with, and an implementation for tests on a simulated disk.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::RwLock;

use super::{CasOutcome, MetaEntry, MetaError, MetaStore, Op, check, check_key, check_value};
use crate::limits::MAX_SCAN;
use crate::sync::{read, write};

/// An ordered map. Nothing of it outlives the process.
#[derive(Debug, Default)]
pub struct MemoryMeta {
    map: RwLock<BTreeMap<Vec<u8>, Vec<u8>>>,
}

impl MemoryMeta {
    /// An empty map.
    pub fn new() -> Self {
        Self::default()
    }
}

impl MetaStore for MemoryMeta {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, MetaError> {
        check_key(key)?;
        Ok(read(&self.map).get(key).cloned())
    }

    fn compare_and_set(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<CasOutcome, MetaError> {
        check_key(key)?;
        check_value(new.unwrap_or_default())?;
        let mut map = write(&self.map);
        let current = map.get(key);
        if current.map(Vec::as_slice) != expected {
            return Ok(CasOutcome::Conflict { current: current.cloned() });
        }
        match new {
            Some(value) => map.insert(key.to_vec(), value.to_vec()),
            None => map.remove(key),
        };
        Ok(CasOutcome::Done)
    }

    fn batch(&self, ops: Vec<Op>) -> Result<(), MetaError> {
        check(&ops)?;
        let mut map = write(&self.map);
        for op in ops {
            match op {
                Op::Put { key, value } => map.insert(key, value),
                Op::Delete { key } => map.remove(&key),
            };
        }
        Ok(())
    }

    fn scan_prefix(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<MetaEntry>, MetaError> {
        let start = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        let map = read(&self.map);
        let found =
            map.range::<[u8], _>((start, Bound::Unbounded)).take_while(|(key, _)| key.starts_with(prefix));
        Ok(found.take(limit.min(MAX_SCAN)).map(|(k, v)| (k.clone(), v.clone())).collect())
    }

    fn flush(&self) -> Result<(), MetaError> {
        Ok(())
    }
}
