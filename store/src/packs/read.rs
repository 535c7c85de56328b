//! Reading cells, verified on the way; what does not verify is dropped and counted.

use std::io;
use std::sync::Arc;

use super::header::{CELL_HEADER, CellHeader, Place, record_len};
use super::{CancelFlag, CellId, CellLocation, Miss, PackStore, TierFault};
use crate::disk::DiskFile;
use crate::failpoint::point;
use crate::meta::{Op, keys};
use crate::sync::lock;

/// Read handles kept open at once.
const OPEN_PACKS: usize = 64;

impl PackStore {
    pub(super) fn read_cell(
        &self,
        id: &CellId,
        expected: &[u8; 32],
        cancel: &CancelFlag,
    ) -> Result<Vec<u8>, Miss> {
        let result = self.try_read(id, expected, cancel);
        let counters = &mut lock(&self.cells).counters;
        match &result {
            Ok(_) => counters.hits += 1,
            Err(_) => counters.misses += 1,
        }
        result
    }

    fn try_read(&self, id: &CellId, expected: &[u8; 32], cancel: &CancelFlag) -> Result<Vec<u8>, Miss> {
        let fault = self.tier.fault();
        match fault {
            TierFault::DropReads => return Err(Miss::Injected("the tier drops reads")),
            TierFault::DelayReads(time) if self.tier.delay(time, cancel) => return Err(Miss::Cancelled),
            _ => {}
        }
        loop {
            let place = lock(&self.cells).touch(id).ok_or(Miss::Absent)?;
            if place.contract != *expected {
                return Err(Miss::ContractMismatch { stored: place.contract, expected: *expected });
            }
            if self.tier.transfer(record_len(place.len), cancel) {
                return Err(Miss::Cancelled);
            }
            let read = self.read_at(&place, fault);
            let miss = match read.and_then(|(header, payload)| verify(id, expected, &place, &header, payload))
            {
                Ok(payload) => return Ok(payload),
                Err(miss) => miss,
            };
            // A compaction may have moved it meanwhile. Each goes through with a cell at most once, so that this ends.
            if self.contains(id) && self.locate(&[*id]) != [Some(place)] {
                continue;
            }
            return Err(self.dropped(id, &place, miss));
        }
    }

    /// Reads a cell's header and payload, and breaks them as the fault says.
    pub(super) fn read_at(
        &self,
        place: &CellLocation,
        fault: TierFault,
    ) -> Result<([u8; CELL_HEADER], Vec<u8>), Miss> {
        let file = self.open_pack(place.pack).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Miss::PackMissing { pack: place.pack },
            _ => Miss::Io(e.to_string()),
        })?;
        let mut header = [0; CELL_HEADER];
        let mut payload = vec![0; usize::try_from(place.len).map_err(|e| Miss::Io(e.to_string()))?];
        let io = |e: io::Error| Miss::Io(e.to_string());
        let mut have = file.read_at(place.offset, &mut header).map_err(io)?;
        if have == CELL_HEADER {
            have += file.read_at(place.offset + CELL_HEADER as u64, &mut payload).map_err(io)?;
        }
        match fault {
            TierFault::FlipBit => match payload.last_mut() {
                Some(byte) => *byte ^= 1,
                None => header[CELL_HEADER - 1] ^= 1,
            },
            TierFault::Tear => have /= 2,
            TierFault::Stale => header[64..96].fill(0xee),
            _ => {}
        }
        let want = CELL_HEADER as u64 + place.len;
        if (have as u64) < want {
            return Err(Miss::Truncated { have: have as u64, want });
        }
        if fault == TierFault::Stale {
            let mut stored = [0; 32];
            stored.copy_from_slice(&header[64..96]);
            return Err(Miss::ContractMismatch { stored, expected: place.contract });
        }
        let at = Place { store_id: self.parts.store_id, pack: place.pack, offset: place.offset };
        if header == [0; CELL_HEADER] {
            // Its bytes were given back before the index on disk forgot it.
            return Err(Miss::Absent);
        }
        if CellHeader::decode(&header, at).is_none() {
            return Err(Miss::Corrupt { detail: "its header does not verify".to_owned() });
        }
        Ok((header, payload))
    }

    /// Drops a cell that could not be read, unless it moved or went meanwhile; returns the miss to report.
    pub(super) fn dropped(&self, id: &CellId, place: &CellLocation, miss: Miss) -> Miss {
        let damaged = match miss {
            Miss::Corrupt { .. } | Miss::Truncated { .. } | Miss::PackMissing { .. } => true,
            Miss::Absent | Miss::ContractMismatch { .. } => false,
            // The next read may succeed.
            _ => return miss,
        };
        let quarantine = {
            let mut index = lock(&self.cells);
            if !index.forget_at(id, place) {
                return Miss::Absent;
            }
            index.counters.damaged += u64::from(damaged);
            matches!(miss, Miss::Corrupt { .. } | Miss::Truncated { .. }) && index.strike(place.pack)
        };
        tracing::warn!(pack = place.pack, offset = place.offset, %miss, "cell dropped");
        if let Err(error) = self.parts.raw.batch(vec![Op::delete(keys::cell(id))]) {
            tracing::error!(%error, "a damaged cell stays in the index on disk");
        }
        if quarantine && let Err(error) = self.quarantine_pack(place.pack) {
            tracing::error!(%error, pack = place.pack, "a damaged pack could not be moved away");
        }
        miss
    }

    /// Drops every cell of a pack and moves its file to the quarantine folder.
    fn quarantine_pack(&self, pack: u64) -> Result<(), super::CellError> {
        let mut tail = lock(&self.tail);
        let io = |e: io::Error| super::write::io_error("moving a damaged pack away", &e);
        self.parts.failpoints.hit(point::PACKS_BEFORE_QUARANTINE).map_err(io)?;
        let ids = lock(&self.cells).ids_in(pack);
        for some in ids.chunks(crate::limits::MAX_META_BATCH / 2) {
            self.parts.raw.batch(some.iter().map(|id| Op::delete(keys::cell(id))).collect())?;
            let mut index = lock(&self.cells);
            for id in some {
                index.forget(id);
            }
        }
        if tail.as_ref().is_some_and(|t| t.number == pack) {
            *tail = None;
        }
        self.parts.raw.batch(vec![Op::delete(keys::pack(pack))])?;
        lock(&self.handles).remove(&pack);
        let kept = self.parts.quarantine.take(&self.path(pack)).map_err(io)?;
        tracing::warn!(pack, kept = %kept.display(), cells = ids.len(), "pack quarantined");
        let mut index = lock(&self.cells);
        index.packs.remove(&pack);
        index.counters.quarantined_packs += 1;
        Ok(())
    }

    pub(super) fn open_pack(&self, pack: u64) -> io::Result<Arc<dyn DiskFile>> {
        let mut handles = lock(&self.handles);
        if let Some(file) = handles.get(&pack) {
            return Ok(Arc::clone(file));
        }
        let file = self.parts.disk.open(&self.path(pack))?;
        if handles.len() >= OPEN_PACKS {
            handles.clear();
        }
        handles.insert(pack, Arc::clone(&file));
        Ok(file)
    }
}

/// The payload, if everything about it is as the index and the caller expect.
pub(super) fn verify(
    id: &CellId,
    expected: &[u8; 32],
    place: &CellLocation,
    header: &[u8; CELL_HEADER],
    payload: Vec<u8>,
) -> Result<Vec<u8>, Miss> {
    let digest = |at: usize| -> [u8; 32] {
        let mut digest = [0; 32];
        digest.copy_from_slice(&header[at..at + 32]);
        digest
    };
    if digest(32) != *id {
        // A whole cell of another name: the index is behind, the pack is not damaged.
        return Err(Miss::Absent);
    }
    if digest(64) != *expected {
        return Err(Miss::ContractMismatch { stored: digest(64), expected: *expected });
    }
    if header[8..16] != place.len.to_le_bytes() {
        return Err(Miss::Corrupt { detail: "its length is not the index's".to_owned() });
    }
    if *blake3::hash(&payload).as_bytes() != digest(128) {
        return Err(Miss::Corrupt { detail: "its payload does not match its hash".to_owned() });
    }
    Ok(payload)
}
