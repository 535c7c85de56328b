//! What the prefix tree knows of saved chunks besides where they stand: in which tiers they were last said to be, and when they
//! were last of use.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::kv::chunk::ChunkId;

/// The tiers below the device that have a sealed chunk whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tiers {
    /// Host memory.
    pub host: bool,
    /// Disk.
    pub disk: bool,
}

impl Tiers {
    /// Neither.
    pub const NEITHER: Self = Self { host: false, disk: false };
    /// Host memory alone.
    pub const HOST: Self = Self { host: true, disk: false };
    /// Disk alone.
    pub const DISK: Self = Self { host: false, disk: true };
    /// Both.
    pub const BOTH: Self = Self { host: true, disk: true };

    /// These and others.
    fn and(self, other: Self) -> Self {
        Self { host: self.host || other.host, disk: self.disk || other.disk }
    }

    /// These without others.
    fn without(self, other: Self) -> Self {
        Self { host: self.host && !other.host, disk: self.disk && !other.disk }
    }

    /// Those that these are not; neither, where a chunk is whole only in both together.
    pub(super) fn others(self) -> Self {
        if self == Self::NEITHER { Self::NEITHER } else { Self::BOTH.without(self) }
    }
}

#[derive(Debug)]
struct Name {
    tiers: Tiers,
    used: u64,
    /// The chunk before it; none before the first of a history.
    before: Option<ChunkId>,
    /// Known chunks right behind it.
    behind: BTreeSet<ChunkId>,
}

/// Chunks by their ids, at most so many. A chunk is known only while the one before it is: without that it is of no use to
/// anyone, and a tree of few names must not have long histories.
#[derive(Debug)]
pub(super) struct Names {
    most: usize,
    names: HashMap<ChunkId, Name>,
    /// Those with no known chunk behind them by their last use, the longest ago first.
    last: BTreeMap<u64, ChunkId>,
    uses: u64,
}

impl Names {
    pub(super) fn new(most: usize) -> Self {
        Self { most, names: HashMap::new(), last: BTreeMap::new(), uses: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn has(&self, chunk: &ChunkId) -> bool {
        self.names.contains_key(chunk)
    }

    /// A chunk behind one that is known, if it is not the first of a history, was of use, and is in these tiers too (neither: in
    /// parts in both).
    pub(super) fn add(&mut self, chunk: ChunkId, before: Option<ChunkId>, tiers: Tiers) {
        let tiers = if tiers == Tiers::NEITHER { Tiers::BOTH } else { tiers };
        self.uses += 1;
        let used = self.uses;
        if let Some(name) = self.names.get_mut(&chunk) {
            name.tiers = name.tiers.and(tiers);
            let earlier = std::mem::replace(&mut name.used, used);
            if self.last.remove(&earlier).is_some() {
                self.last.insert(used, chunk);
            }
            return;
        }
        if let Some(before) = before.and_then(|before| self.names.get_mut(&before)) {
            self.last.remove(&before.used);
            before.behind.insert(chunk);
        }
        self.names.insert(chunk, Name { tiers, used, before, behind: BTreeSet::new() });
        self.last.insert(used, chunk);
    }

    /// Forgets one where there are too many: of those with none behind them the one that was of use the longest ago.
    pub(super) fn forget_surplus(&mut self) -> Option<ChunkId> {
        if self.names.len() <= self.most {
            return None;
        }
        let oldest = self.last.first_key_value().map(|(_, chunk)| *chunk)?;
        self.forget(&oldest);
        Some(oldest)
    }

    /// A chunk is no longer in these tiers; those that are forgotten for it: it, where it is in none now, and all behind it.
    pub(super) fn drop(&mut self, chunk: &ChunkId, gone: Tiers) -> Vec<ChunkId> {
        let Some(name) = self.names.get_mut(chunk) else { return Vec::new() };
        name.tiers = name.tiers.without(gone);
        if name.tiers != Tiers::NEITHER {
            return Vec::new();
        }
        let mut forgotten = vec![*chunk];
        let mut next = 0;
        while let Some(name) = forgotten.get(next).and_then(|chunk| self.names.get(chunk)) {
            forgotten.extend(&name.behind);
            next += 1;
        }
        // Those behind first.
        forgotten.reverse();
        forgotten.iter().for_each(|chunk| self.forget(chunk));
        forgotten
    }

    /// Forgets one that has none behind it.
    fn forget(&mut self, chunk: &ChunkId) {
        let Some(name) = self.names.remove(chunk) else { return };
        self.last.remove(&name.used);
        if let Some(id) = name.before
            && let Some(before) = self.names.get_mut(&id)
        {
            before.behind.remove(chunk);
            if before.behind.is_empty() {
                self.last.insert(before.used, id);
            }
        }
    }

    /// Whether every chunk is in some tier, stands behind one that is known, and has its place in the order if it is a last one.
    pub(super) fn is_whole(&self) -> bool {
        let known = |(chunk, name): (&ChunkId, &Name)| {
            let follows =
                |before: &ChunkId| self.names.get(before).is_some_and(|before| before.behind.contains(chunk));
            let ends = self.last.get(&name.used) == Some(chunk);
            name.tiers != Tiers::NEITHER
                && name.before.as_ref().is_none_or(follows)
                && ends == name.behind.is_empty()
        };
        let ends = self.names.values().filter(|name| name.behind.is_empty()).count();
        self.last.len() == ends && self.len() <= self.most && self.names.iter().all(known)
    }
}
