//! Compaction: what lives in a mostly dead pack is written anew at the end of the newest, and the pack goes.
//!
//! The order is copy, fsync, index, and only then the old place is wiped: at every moment a cell that is indexed is whole
//! where the index says. Reads go on meanwhile; puts wait for one step at most.

use super::header::{ALIGN, CellHeader, Place, record_len};
use super::write::io_error;
use super::{CellError, CellId, CellLocation, CellWrite, PackStore, TierFault};
use crate::failpoint::point;
use crate::sync::lock;

/// Bytes copied in one step.
const STEP_BYTES: u64 = 8 << 20;

/// A cell that is to move.
struct Moving {
    id: CellId,
    place: CellLocation,
    header: CellHeader,
    payload: Vec<u8>,
}

impl PackStore {
    /// Writes the cells of one mostly dead pack anew and deletes it: one of whose length less than half is live. Returns
    /// whether there was one and it is gone.
    ///
    /// # Errors
    /// [`CellError`]; every cell is then where the index says.
    pub fn compact(&self) -> Result<bool, CellError> {
        for pack in self.mostly_dead() {
            if self.compact_pack(pack)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Packs of which less than half is live, the oldest first, the one being written excepted.
    fn mostly_dead(&self) -> Vec<u64> {
        let written = lock(&self.tail).as_ref().map(|tail| tail.number);
        let index = lock(&self.cells);
        let packs = index.packs.iter().filter(|(number, _)| Some(**number) != written);
        packs.filter(|(_, pack)| pack.live < pack.end / 2).map(|(number, _)| *number).collect()
    }

    /// Moves every cell of a pack and deletes it. `false`: there is no room for the copies, or a cell cannot be read now.
    fn compact_pack(&self, pack: u64) -> Result<bool, CellError> {
        loop {
            let live = lock(&self.cells).packs.get(&pack).map_or(0, |pack| pack.live);
            if live > 0 && !self.has_room(live.min(STEP_BYTES)) {
                return Ok(false);
            }
            let moving = self.next_step(pack);
            if moving.is_empty() {
                return self.delete_dead(pack);
            }
            if !self.move_cells(pack, &moving)? {
                return Ok(false);
            }
        }
    }

    /// Whether the quota has room for `size` more bytes and the header of a new pack.
    fn has_room(&self, size: u64) -> bool {
        lock(&self.cells).disk_bytes() + size + ALIGN <= self.parts.quota
    }

    /// Reads the next cells of a pack; those that do not verify are dropped.
    fn next_step(&self, pack: u64) -> Vec<Moving> {
        let places: Vec<(CellId, CellLocation)> = {
            let index = lock(&self.cells);
            let ids = index.ids_in(pack).into_iter();
            let mut places: Vec<_> = ids.filter_map(|id| Some((id, index.get(&id)?))).collect();
            places.sort_unstable_by_key(|(_, place)| place.offset);
            places
        };
        let mut bytes = 0;
        let mut moving = Vec::new();
        for (id, place) in places {
            if bytes >= STEP_BYTES {
                break;
            }
            let read = self.read_at(&place, TierFault::None);
            let verified = read.and_then(|(header, payload)| {
                let payload = super::read::verify(&id, &place.contract, &place, &header, payload)?;
                Ok((header, payload))
            });
            match verified {
                Ok((header, payload)) => {
                    let at = Place { store_id: self.parts.store_id, pack, offset: place.offset };
                    if let Some(header) = CellHeader::decode(&header, at) {
                        bytes += record_len(place.len);
                        moving.push(Moving { id, place, header, payload });
                    }
                }
                Err(miss) => drop(self.dropped(&id, &place, miss)),
            }
        }
        moving
    }

    /// Writes cells anew, then wipes their old places. `false`: there is no room for that.
    fn move_cells(&self, pack: u64, moving: &[Moving]) -> Result<bool, CellError> {
        let io = |e: std::io::Error| io_error("compacting a pack", &e);
        let mut tail = lock(&self.tail);
        self.parts.failpoints.hit(point::PACKS_BEFORE_COMPACT).map_err(io)?;
        let size: u64 = moving.iter().map(|cell| record_len(cell.place.len)).sum();
        if !self.has_room(size) {
            return Ok(false);
        }
        let mut written = Vec::with_capacity(moving.len());
        let mut failed = None;
        for cell in moving {
            if lock(&self.cells).get(&cell.id) != Some(cell.place) {
                // It went meanwhile.
                continue;
            }
            let copy = CellWrite {
                id: cell.id,
                contract: cell.header.contract,
                chunk: cell.header.chunk,
                layer: cell.header.layer,
                tokens: cell.header.tokens,
                codec: cell.header.codec,
                owner: cell.header.owner,
                owner_quota: None,
                payload: &cell.payload,
            };
            match self.append(&mut tail, &copy, record_len(cell.place.len)) {
                Ok(place) => written.push((cell.id, place)),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        if let Err(error) = self.sync_written(&mut tail, &written) {
            // After a failed fsync nothing is known of the copies; nobody will look for them.
            *tail = None;
            lock(&self.cells).settle();
            return Err(io(error));
        }
        let indexed = self.index_written(&written);
        lock(&self.cells).settle();
        indexed?;
        self.parts.failpoints.hit(point::PACKS_BEFORE_WIPE).map_err(io)?;
        for cell in moving.iter().filter(|cell| written.iter().any(|(id, _)| *id == cell.id)) {
            self.wipe(&cell.place);
        }
        // What is removed from its new place must not come back from the old one after a power cut.
        self.open_pack(pack).and_then(|file| file.sync_data()).map_err(io)?;
        failed.map_or(Ok(true), |error| Err(io(error)))
    }

    /// Deletes a pack without cells; whether it was one.
    fn delete_dead(&self, pack: u64) -> Result<bool, CellError> {
        let _writer = lock(&self.tail);
        if !lock(&self.cells).packs.get(&pack).is_some_and(super::state::Pack::is_empty) {
            return Ok(false);
        }
        self.delete_pack(pack)?;
        Ok(true)
    }
}
