//! Saving, dropping and evicting cells. Order of a put: payload, fsync, index. Order of a drop: index, then bytes.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard};

use super::header::{ALIGN, CELL_HEADER, CellHeader, Place, pack_header, record_len};
use super::state::{Pack, place_value};
use super::{
    CancelFlag, CellError, CellId, CellLocation, CellWrite, PackStore, PutReport, Refusal, RemoveReport,
};
use crate::disk::DiskFile;
use crate::failpoint::point;
use crate::limits::{MAX_CELL_PAYLOAD, MAX_META_BATCH};
use crate::meta::{Op, keys};
use crate::sync::lock;

/// The pack being written.
pub(crate) struct Tail {
    pub(crate) number: u64,
    pub(crate) file: Arc<dyn DiskFile>,
    pub(crate) end: u64,
    /// An fsync failed: what was written since the last good one is unknown.
    pub(crate) broken: bool,
}

fn refusal(error: &io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Refusal::DiskFull(error.to_string()),
        _ => Refusal::Io(error.to_string()),
    }
}

pub(crate) fn io_error(what: &str, error: &io::Error) -> CellError {
    CellError::Io { what: what.to_owned(), detail: error.to_string() }
}

impl PackStore {
    pub(crate) fn path(&self, pack: u64) -> PathBuf {
        self.parts.dir.join(format!("pack-{pack:010}.pack"))
    }

    pub(super) fn write_cells(&self, cells: &[CellWrite<'_>]) -> Result<PutReport, CellError> {
        let mut tail = lock(&self.tail);
        let mut report = PutReport::default();
        let mut written: Vec<(CellId, CellLocation)> = Vec::new();
        let mut seen = HashSet::new();
        for cell in cells {
            if !seen.insert(cell.id) || lock(&self.cells).touch(&cell.id).is_some() {
                report.present.push(cell.id);
                continue;
            }
            match self.write_cell(&mut tail, cell, &mut report)? {
                Ok(place) => written.push((cell.id, place)),
                Err(refusal) => report.refused.push((cell.id, refusal)),
            }
        }
        if let Err(e) = self.sync_written(&mut tail, &written) {
            // After a failed fsync nothing is known of these bytes; nobody will look for them.
            report.refused.extend(written.drain(..).map(|(id, _)| (id, refusal(&e))));
            *tail = None;
        }
        let indexed = self.index_written(&written);
        lock(&self.cells).settle();
        indexed?;
        report.stored = written.into_iter().map(|(id, _)| id).collect();
        let mut index = lock(&self.cells);
        index.counters.refused += report.refused.len() as u64;
        index.counters.evicted += report.evicted.len() as u64;
        Ok(report)
    }

    /// Writes one cell, without syncing it.
    fn write_cell(
        &self,
        tail: &mut MutexGuard<'_, Option<Tail>>,
        cell: &CellWrite<'_>,
        report: &mut PutReport,
    ) -> Result<Result<CellLocation, Refusal>, CellError> {
        let len = cell.payload.len() as u64;
        if cell.payload.len() > MAX_CELL_PAYLOAD {
            return Ok(Err(Refusal::TooLarge { len, limit: MAX_CELL_PAYLOAD as u64 }));
        }
        let size = record_len(len);
        if !self.make_room(tail, size, &mut report.evicted)? {
            return Ok(Err(Refusal::Quota { quota: self.parts.quota }));
        }
        // The wait is the tier's, not the disk's; nobody cancels a write.
        self.tier.transfer(size, &CancelFlag::new());
        match self.append(tail, cell, size) {
            Ok(place) => {
                report.bytes += size;
                Ok(Ok(place))
            }
            Err(e) => Ok(Err(refusal(&e))),
        }
    }

    fn append(
        &self,
        tail: &mut MutexGuard<'_, Option<Tail>>,
        cell: &CellWrite<'_>,
        size: u64,
    ) -> io::Result<CellLocation> {
        if tail.as_ref().is_some_and(|t| t.end + size > self.parts.pack_bytes && t.end > ALIGN) {
            // The old pack's cells of this call are synced before it is left.
            if let Some(old) = tail.as_mut()
                && let Err(e) = old.file.sync_data()
            {
                old.broken = true;
                return Err(e);
            }
            **tail = None;
        }
        if tail.is_none() {
            **tail = Some(self.new_pack()?);
        }
        let Some(tail) = tail.as_mut() else { return Err(io::Error::other("no pack to write to")) };
        self.parts.failpoints.hit(point::PACKS_BEFORE_WRITE)?;
        let place = Place { store_id: self.parts.store_id, pack: tail.number, offset: tail.end };
        let header = CellHeader::of(cell);
        let mut bytes = Vec::with_capacity(size as usize);
        bytes.extend_from_slice(&header.encode(place));
        bytes.extend_from_slice(cell.payload);
        bytes.resize(size as usize, 0);
        debug_assert_eq!(bytes.len() as u64, record_len((bytes.len() - CELL_HEADER) as u64));
        if let Err(e) = tail.file.write_at(tail.end, &bytes) {
            // Give back what a short write left; the next cell is written over it in any case.
            let _ = tail.file.truncate(tail.end);
            return Err(e);
        }
        let location = header.place(tail.number, tail.end);
        tail.end += size;
        lock(&self.cells).pending(tail.number, size);
        Ok(location)
    }

    fn new_pack(&self) -> io::Result<Tail> {
        let number = lock(&self.cells).next_pack();
        let path = self.path(number);
        let file = self.parts.disk.create(&path)?;
        let made = file
            .write_at(0, &pack_header(self.parts.store_id, number, self.parts.clock.now_ms()))
            .and_then(|()| file.sync_data())
            .and_then(|()| self.parts.disk.sync_dir(&self.parts.dir));
        if let Err(e) = made {
            let _ = self.parts.disk.remove(&path);
            return Err(e);
        }
        lock(&self.cells).packs.entry(number).or_default().disk_bytes = ALIGN;
        Ok(Tail { number, file, end: ALIGN, broken: false })
    }

    fn sync_written(
        &self,
        tail: &mut MutexGuard<'_, Option<Tail>>,
        written: &[(CellId, CellLocation)],
    ) -> io::Result<()> {
        if written.is_empty() {
            return Ok(());
        }
        self.parts.failpoints.hit(point::PACKS_BEFORE_FSYNC)?;
        match tail.as_ref() {
            Some(tail) if tail.broken => Err(io::Error::other("an earlier fsync of the pack failed")),
            Some(tail) => tail.file.sync_data(),
            None => Ok(()),
        }
    }

    fn index_written(&self, written: &[(CellId, CellLocation)]) -> Result<(), CellError> {
        let point = |name| self.parts.failpoints.hit(name).map_err(|e| io_error("indexing cells", &e));
        point(point::PACKS_BEFORE_INDEX)?;
        for some in written.chunks(MAX_META_BATCH / 2) {
            let mut ops: Vec<Op> = Vec::with_capacity(some.len() + 1);
            for (id, place) in some {
                ops.push(Op::put(keys::cell(id), place_value(place)));
                let end = place.offset + record_len(place.len);
                ops.push(Op::put(keys::pack(place.pack), end.to_le_bytes()));
            }
            self.parts.raw.batch(ops)?;
            let mut index = lock(&self.cells);
            for (id, place) in some {
                index.insert(*id, *place);
            }
        }
        point(point::PACKS_AFTER_INDEX)
    }

    /// Evicts until `size` more bytes fit the quota; whether they do.
    fn make_room(
        &self,
        tail: &mut MutexGuard<'_, Option<Tail>>,
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
                let mut freed = 0;
                let mut victims = Vec::new();
                for id in index.by_use() {
                    if freed >= over || victims.len() >= MAX_META_BATCH {
                        break;
                    }
                    if let Some(place) = index.get(id).filter(|_| !self.parts.leases.is_leased(id)) {
                        freed += record_len(place.len);
                        victims.push(*id);
                    }
                }
                victims
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
            self.drop_cells(&mut tail, some)?;
        }
        Ok(report)
    }

    /// Drops cells from the index, then gives their bytes back.
    fn drop_cells(&self, tail: &mut MutexGuard<'_, Option<Tail>>, ids: &[CellId]) -> Result<(), CellError> {
        self.parts.raw.batch(ids.iter().map(|id| Op::delete(keys::cell(id))).collect())?;
        let places: Vec<CellLocation> = {
            let mut index = lock(&self.cells);
            ids.iter().filter_map(|id| index.forget(id)).collect()
        };
        self.parts
            .failpoints
            .hit(point::PACKS_BEFORE_RECLAIM)
            .map_err(|e| io_error("reclaiming cells", &e))?;
        for place in places {
            let empty = lock(&self.cells).packs.get(&place.pack).is_some_and(Pack::is_empty);
            if empty && tail.as_ref().is_none_or(|t| t.number != place.pack) {
                self.delete_pack(place.pack)?;
                continue;
            }
            let size = record_len(place.len);
            let punched = match self.open_pack(place.pack).and_then(|file| file.punch(place.offset, size)) {
                Ok(punched) => punched,
                // The pack went with another of its cells.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(io_error("giving a cell's bytes back", &e)),
            };
            if punched && let Some(pack) = lock(&self.cells).packs.get_mut(&place.pack) {
                pack.disk_bytes = pack.disk_bytes.saturating_sub(size);
            }
        }
        Ok(())
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
