//! Dropping cells: eviction for the quota, and removal on request. The order is index, then bytes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::MutexGuard;

use super::header::{ALIGN, CELL_HEADER, record_len};
use super::state::Cells;
use super::write::{Tail, io_error};
use super::{CellError, CellId, CellLocation, OwnerId, PackStore, RemoveReport};
use crate::failpoint::point;
use crate::limits::MAX_META_BATCH;
use crate::meta::{Op, keys};
use crate::sync::lock;

/// Whether an owner has more than its share: the quota divided by the owners that have something.
struct Shares {
    held: HashMap<OwnerId, u64>,
    share: u64,
}

impl Shares {
    /// With `size` more bytes of an owner.
    fn new(index: &Cells, quota: u64, owner: &OwnerId, size: u64) -> Self {
        let mut held = index.held();
        *held.entry(*owner).or_default() += size;
        let share = quota / held.len() as u64;
        Self { held, share }
    }

    fn is_above(&self, owner: &OwnerId) -> bool {
        self.held.get(owner).is_some_and(|held| *held > self.share)
    }

    fn left(&mut self, owner: &OwnerId, size: u64) {
        if let Some(held) = self.held.get_mut(owner) {
            *held = held.saturating_sub(size);
        }
    }
}

impl PackStore {
    /// Evicts cells of an owner until they take at most `most` bytes; whether they do.
    pub(super) fn shrink_owner(
        &self,
        tail: &mut MutexGuard<'_, Option<Tail>>,
        owner: &OwnerId,
        most: u64,
        evicted: &mut Vec<CellId>,
    ) -> Result<bool, CellError> {
        loop {
            let victims = {
                let index = lock(&self.cells);
                let over = index.held_by(owner).saturating_sub(most);
                if over == 0 {
                    return Ok(true);
                }
                let mut freed = 0;
                let mut victims = Vec::new();
                for id in index.by_use(|other| other == owner) {
                    if freed >= over || victims.len() >= MAX_META_BATCH {
                        break;
                    }
                    if let Some(place) = self.droppable(&index, id) {
                        freed += record_len(place.len);
                        victims.push(*id);
                    }
                }
                victims
            };
            if victims.is_empty() {
                return Ok(false);
            }
            self.drop_cells(tail, &victims)?;
            evicted.extend(victims);
        }
    }

    /// Where a cell stands that nobody has leased.
    fn droppable(&self, index: &Cells, id: &CellId) -> Option<CellLocation> {
        index.get(id).filter(|_| !self.parts.leases.is_leased(id))
    }

    /// The cells to drop for `over` bytes where `size` more of an owner are wanted: those of owners above their share, the
    /// least recently used first, then the others.
    fn leaving(&self, index: &Cells, over: u64, owner: &OwnerId, size: u64) -> Vec<CellId> {
        let mut shares = Shares::new(index, self.parts.quota, owner, size);
        let (mut freed, mut victims, mut chosen) = (0, Vec::new(), HashSet::new());
        let above: HashSet<OwnerId> =
            shares.held.keys().filter(|owner| shares.is_above(owner)).copied().collect();
        for only_above in [true, false] {
            for id in index.by_use(|owner| !only_above || above.contains(owner)) {
                if freed >= over || victims.len() >= MAX_META_BATCH {
                    return victims;
                }
                let wanted = |place: &CellLocation| !only_above || shares.is_above(&place.owner);
                if let Some(place) = self.droppable(index, id).filter(wanted)
                    && chosen.insert(*id)
                {
                    freed += record_len(place.len);
                    shares.left(&place.owner, record_len(place.len));
                    victims.push(*id);
                }
            }
        }
        victims
    }

    /// Evicts until `size` more bytes of an owner fit the quota; whether they do.
    pub(super) fn make_room(
        &self,
        tail: &mut MutexGuard<'_, Option<Tail>>,
        owner: &OwnerId,
        size: u64,
        evicted: &mut Vec<CellId>,
    ) -> Result<bool, CellError> {
        // A new pack's own header may be needed too.
        let needed = size + ALIGN;
        if needed > self.parts.quota {
            return Ok(false);
        }
        loop {
            let victims = {
                let index = lock(&self.cells);
                let over = (index.disk_bytes() + needed).saturating_sub(self.parts.quota);
                if over == 0 {
                    return Ok(true);
                }
                self.leaving(&index, over, owner, size)
            };
            if victims.is_empty() {
                // What is left may be dead bytes that could not be punched out.
                return self.drop_empty_packs(tail, needed);
            }
            self.drop_cells(tail, &victims)?;
            evicted.extend(victims);
        }
    }

    pub(super) fn remove_cells(&self, ids: &[CellId]) -> Result<RemoveReport, CellError> {
        let mut tail = lock(&self.tail);
        let mut report = RemoveReport::default();
        let mut seen = HashSet::new();
        for id in ids {
            if !seen.insert(*id) || lock(&self.cells).get(id).is_none() {
                continue;
            }
            if self.parts.leases.is_leased(id) { report.leased.push(*id) } else { report.removed.push(*id) }
        }
        for some in report.removed.chunks(MAX_META_BATCH) {
            let touched = self.drop_cells(&mut tail, some)?;
            // What was asked to go must not come back from the headers after a power cut.
            for pack in touched {
                self.open_pack(pack)
                    .and_then(|file| file.sync_data())
                    .map_err(|e| io_error("making a removal durable", &e))?;
            }
        }
        Ok(report)
    }

    /// Drops cells from the index, then gives their bytes back; returns the packs they were in that are left.
    fn drop_cells(
        &self,
        tail: &mut MutexGuard<'_, Option<Tail>>,
        ids: &[CellId],
    ) -> Result<BTreeSet<u64>, CellError> {
        self.parts.raw.batch(ids.iter().map(|id| Op::delete(keys::cell(id))).collect())?;
        let places: Vec<CellLocation> = {
            let mut index = lock(&self.cells);
            ids.iter().filter_map(|id| index.forget(id)).collect()
        };
        let hit = self.parts.failpoints.hit(point::PACKS_BEFORE_RECLAIM);
        hit.map_err(|e| io_error("giving cells' bytes back", &e))?;
        let mut touched = BTreeSet::new();
        for place in places {
            let Some(pack) = lock(&self.cells).packs.get(&place.pack).copied() else { continue };
            if pack.is_empty() && tail.as_ref().is_none_or(|t| t.number != place.pack) {
                self.delete_pack(place.pack)?;
                touched.remove(&place.pack);
                continue;
            }
            touched.insert(place.pack);
            self.wipe(&place);
        }
        Ok(touched)
    }

    /// Gives the bytes of a cell that the index does not have there any more back, as far as that can be done.
    pub(super) fn wipe(&self, place: &CellLocation) {
        match self.erase(place) {
            Ok(true) => {
                if let Some(pack) = lock(&self.cells).packs.get_mut(&place.pack) {
                    pack.disk_bytes = pack.disk_bytes.saturating_sub(record_len(place.len));
                }
            }
            Ok(false) => {}
            // The bytes stay counted; they go with their pack.
            Err(error) => tracing::warn!(%error, pack = place.pack, "a dropped cell's bytes stay"),
        }
    }

    /// Gives a cell's bytes back to the file system; where that cannot be done, its header is wiped so that a rebuild
    /// does not find it. Whether bytes were given back.
    fn erase(&self, place: &CellLocation) -> io::Result<bool> {
        let file = self.open_pack(place.pack)?;
        if file.punch(place.offset, record_len(place.len))? {
            return Ok(true);
        }
        file.write_at(place.offset, &[0; CELL_HEADER])?;
        Ok(false)
    }

    /// Deletes packs without cells, the one being written included; whether `needed` bytes fit now.
    fn drop_empty_packs(
        &self,
        tail: &mut MutexGuard<'_, Option<Tail>>,
        needed: u64,
    ) -> Result<bool, CellError> {
        let empty: Vec<u64> = {
            let index = lock(&self.cells);
            index.packs.iter().filter(|(_, p)| p.is_empty()).map(|(n, _)| *n).collect()
        };
        for number in empty {
            if tail.as_ref().is_some_and(|t| t.number == number) {
                **tail = None;
            }
            self.delete_pack(number)?;
        }
        Ok(lock(&self.cells).disk_bytes() + needed <= self.parts.quota)
    }

    pub(super) fn delete_pack(&self, number: u64) -> Result<(), CellError> {
        self.parts.raw.batch(vec![Op::delete(keys::pack(number))])?;
        lock(&self.handles).remove(&number);
        match self.parts.disk.remove(&self.path(number)) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(io_error("deleting a pack", &e)),
        }
        // A reader may have opened it again in between; an open handle would keep its space.
        lock(&self.handles).remove(&number);
        lock(&self.cells).packs.remove(&number);
        self.parts.disk.sync_dir(&self.parts.dir).map_err(|e| io_error("deleting a pack", &e))
    }
}
