//! The cell index in memory: places, order of use, and what each pack holds. No file is touched here.

use std::collections::{BTreeMap, HashMap};

use super::header::{ALIGN, CellHeader, record_len};
use super::{CellId, CellLocation, OwnerId, Usage};
use crate::meta::keys::{self, be64, le64};

/// Corrupt cells after which a pack is quarantined.
const STRIKES: u32 = 3;

#[derive(Debug, Clone, Copy)]
struct Entry {
    place: CellLocation,
    used: u64,
}

/// What is known of a pack file.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pack {
    /// Bytes taken on disk.
    pub(crate) disk_bytes: u64,
    pub(crate) cells: u64,
    /// Bytes of its cells, headers and padding included.
    pub(crate) live: u64,
    /// Its length.
    pub(crate) end: u64,
    /// Cells of the running put, written and not yet indexed.
    pending: u64,
    strikes: u32,
}

impl Pack {
    /// Whether nothing in it is wanted.
    pub(crate) fn is_empty(&self) -> bool {
        self.cells == 0 && self.pending == 0
    }
}

/// What an owner has.
#[derive(Default)]
struct Owned {
    /// Bytes of its cells, headers and padding included.
    bytes: u64,
    /// Its cells by time of last use.
    order: BTreeMap<u64, CellId>,
}

/// The index.
#[derive(Default)]
pub(crate) struct Cells {
    entries: HashMap<CellId, Entry>,
    owners: HashMap<OwnerId, Owned>,
    pub(crate) packs: BTreeMap<u64, Pack>,
    now: u64,
    last_pack: u64,
    pub(crate) counters: Usage,
}

impl Cells {
    pub(crate) fn get(&self, id: &CellId) -> Option<CellLocation> {
        self.entries.get(id).map(|e| e.place)
    }

    /// The cell's place, counted as a use.
    pub(crate) fn touch(&mut self, id: &CellId) -> Option<CellLocation> {
        self.now += 1;
        let entry = self.entries.get_mut(id)?;
        let owned = self.owners.entry(entry.place.owner).or_default();
        owned.order.remove(&entry.used);
        entry.used = self.now;
        owned.order.insert(self.now, *id);
        Some(entry.place)
    }

    /// Indexes a cell, in place of an older copy if there is one, whose last use is then its own.
    pub(crate) fn insert(&mut self, id: CellId, place: CellLocation) {
        self.now += 1;
        let used = self.entries.get(&id).map_or(self.now, |older| older.used);
        self.forget(&id);
        self.entries.insert(id, Entry { place, used });
        let owned = self.owners.entry(place.owner).or_default();
        owned.order.insert(used, id);
        owned.bytes += record_len(place.len);
        let pack = self.packs.entry(place.pack).or_default();
        pack.cells += 1;
        pack.live += record_len(place.len);
        self.counters.payload_bytes += place.len;
    }

    /// Takes a cell out of the index; its bytes stay counted with the pack.
    pub(crate) fn forget(&mut self, id: &CellId) -> Option<CellLocation> {
        let entry = self.entries.remove(id)?;
        let owner = entry.place.owner;
        if let Some(owned) = self.owners.get_mut(&owner) {
            owned.order.remove(&entry.used);
            owned.bytes -= record_len(entry.place.len);
            if owned.order.is_empty() {
                self.owners.remove(&owner);
            }
        }
        if let Some(pack) = self.packs.get_mut(&entry.place.pack) {
            pack.cells -= 1;
            pack.live -= record_len(entry.place.len);
        }
        self.counters.payload_bytes -= entry.place.len;
        Some(entry.place)
    }

    /// Takes a cell out of the index if it still stands at `place`.
    pub(crate) fn forget_at(&mut self, id: &CellId, place: &CellLocation) -> bool {
        self.get(id).is_some_and(|now| now == *place) && self.forget(id).is_some()
    }

    /// Counts a damaged cell against its pack; whether the pack is to be quarantined.
    pub(crate) fn strike(&mut self, pack: u64) -> bool {
        self.packs.get_mut(&pack).is_some_and(|p| {
            p.strikes += 1;
            p.strikes == STRIKES
        })
    }

    /// Counts a cell of `size` bytes that is written at a pack's end and not yet indexed.
    pub(crate) fn pending(&mut self, pack: u64, size: u64) {
        let pack = self.packs.entry(pack).or_default();
        pack.disk_bytes += size;
        pack.end += size;
        pack.pending += 1;
    }

    /// Ends a put: nothing is pending any more.
    pub(crate) fn settle(&mut self) {
        self.packs.values_mut().for_each(|p| p.pending = 0);
    }

    /// The number of the next pack.
    pub(crate) fn next_pack(&mut self) -> u64 {
        let highest = self.packs.last_key_value().map_or(0, |(n, _)| *n);
        self.last_pack = self.last_pack.max(highest) + 1;
        self.last_pack
    }

    pub(crate) fn ids_in(&self, pack: u64) -> Vec<CellId> {
        self.entries.iter().filter(|(_, e)| e.place.pack == pack).map(|(id, _)| *id).collect()
    }

    /// Cells of some owners in order of use, the least recently used first.
    pub(crate) fn by_use(&self, wanted: impl Fn(&OwnerId) -> bool) -> impl Iterator<Item = &CellId> {
        let owned = self.owners.iter().filter(|(owner, _)| wanted(owner));
        let mut heads: Vec<_> = owned.map(|(_, owned)| owned.order.iter().peekable()).collect();
        std::iter::from_fn(move || {
            let firsts =
                heads.iter_mut().filter_map(|head| head.peek().map(|(used, _)| **used).zip(Some(head)));
            let (_, head) = firsts.min_by_key(|(used, _)| *used)?;
            head.next().map(|(_, id)| id)
        })
    }

    /// Bytes that an owner's cells take, headers and padding included.
    pub(crate) fn held_by(&self, owner: &OwnerId) -> u64 {
        self.owners.get(owner).map_or(0, |owned| owned.bytes)
    }

    /// Bytes that the cells of every owner take.
    pub(crate) fn held(&self) -> HashMap<OwnerId, u64> {
        self.owners.iter().map(|(owner, owned)| (*owner, owned.bytes)).collect()
    }

    pub(crate) fn disk_bytes(&self) -> u64 {
        self.packs.values().map(|p| p.disk_bytes).sum()
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage {
            cells: self.entries.len() as u64,
            disk_bytes: self.disk_bytes(),
            packs: self.packs.len() as u64,
            ..self.counters
        }
    }

    pub(crate) fn clear(&mut self) {
        let counters = Usage { payload_bytes: 0, ..self.counters };
        *self = Self { counters, last_pack: self.last_pack, ..Self::default() };
    }
}

impl CellHeader {
    pub(crate) fn place(&self, pack: u64, offset: u64) -> CellLocation {
        CellLocation {
            pack,
            offset,
            len: self.len,
            contract: self.contract,
            layer: self.layer,
            tokens: self.tokens,
            codec: self.codec,
            owner: self.owner,
        }
    }
}

/// The index entry of a cell.
pub(crate) fn place_value(place: &CellLocation) -> Vec<u8> {
    let mut value = Vec::with_capacity(81);
    for number in [place.pack, place.offset, place.len] {
        value.extend_from_slice(&number.to_le_bytes());
    }
    value.extend_from_slice(&place.contract);
    value.extend_from_slice(&place.layer.to_le_bytes());
    value.extend_from_slice(&place.tokens.to_le_bytes());
    value.push(place.codec);
    value.extend_from_slice(&place.owner);
    value
}

fn read_place(value: &[u8]) -> Option<CellLocation> {
    Some(CellLocation {
        pack: le64(value, 0)?,
        offset: le64(value, 8)?,
        len: le64(value, 16)?,
        contract: value.get(24..56)?.try_into().ok()?,
        layer: u32::from_le_bytes(value.get(56..60)?.try_into().ok()?),
        tokens: u32::from_le_bytes(value.get(60..64)?.try_into().ok()?),
        codec: *value.get(64)?,
        // Entries that were written before cells had owners end here.
        owner: value.get(65..81).map_or(Some(OwnerId::default()), |owner| owner.try_into().ok())?,
    })
}

/// What the index on disk says of packs.
#[derive(Debug, Default)]
pub(crate) struct LoadedCells {
    pub(crate) cells: Vec<(CellId, CellLocation)>,
    /// How far each pack is indexed.
    pub(crate) packs: BTreeMap<u64, u64>,
}

impl LoadedCells {
    /// Takes in one entry of the tree; `None` if it cannot be read. Entries of other parts are passed over.
    pub(crate) fn take(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let (prefix, rest) = key.split_first()?;
        match *prefix {
            keys::CELL => {
                let place = read_place(value)?;
                let whole =
                    place.offset % ALIGN == 0 && place.offset.checked_add(record_len(place.len)).is_some();
                self.cells.push((rest.try_into().ok()?, whole.then_some(place)?));
            }
            keys::PACK => drop(self.packs.insert(be64(rest)?, le64(value, 0)?)),
            _ => {}
        }
        Some(())
    }
}
