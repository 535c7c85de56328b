//! What the prefix tree knows of saved chunks besides where they stand: in which tiers they were last said to be, and when they
//! were last of use.

use std::collections::{BTreeMap, HashMap};

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
    /// How many known chunks follow right behind it.
    behind: usize,
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
            if before.behind == 0 {
                self.last.remove(&before.used);
            }
            before.behind += 1;
        }
        self.names.insert(chunk, Name { tiers, used, before, behind: 0 });
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

    /// A chunk is no longer in these tiers; whether it is in none now, so that it and all behind it are to be forgotten.
    pub(super) fn drop(&mut self, chunk: &ChunkId, gone: Tiers) -> bool {
        let Some(name) = self.names.get_mut(chunk) else { return false };
        name.tiers = name.tiers.without(gone);
        name.tiers == Tiers::NEITHER
    }

    /// Forgets a chunk.
    pub(super) fn forget(&mut self, chunk: &ChunkId) {
        let Some(name) = self.names.remove(chunk) else { return };
        if name.behind == 0 {
            self.last.remove(&name.used);
        }
        if let Some(id) = name.before
            && let Some(before) = self.names.get_mut(&id)
        {
            before.behind -= 1;
            if before.behind == 0 {
                self.last.insert(before.used, id);
            }
        }
    }

    /// Whether every chunk is in some tier, stands behind one that is known, and has its place in the order if it is a last one.
    pub(super) fn is_whole(&self) -> bool {
        let mut behind: HashMap<&ChunkId, usize> = HashMap::new();
        for before in self.names.values().filter_map(|name| name.before.as_ref()) {
            *behind.entry(before).or_default() += 1;
        }
        let known = |(chunk, name): (&ChunkId, &Name)| {
            let follows = name.before.as_ref().is_none_or(|before| self.has(before));
            let counted = behind.get(chunk).copied().unwrap_or_default() == name.behind;
            let ends = self.last.get(&name.used) == Some(chunk);
            name.tiers != Tiers::NEITHER && follows && counted && ends == (name.behind == 0)
        };
        let ends = self.names.values().filter(|name| name.behind == 0).count();
        self.last.len() == ends && self.len() <= self.most && self.names.iter().all(known)
    }
}
