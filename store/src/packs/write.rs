//! Saving cells. The order is payload, fsync, index: an index entry never points at bytes that a crash could take.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard};

use super::header::{ALIGN, CELL_HEADER, CellHeader, Place, pack_header, record_len};
use super::state::place_value;
use super::{CancelFlag, CellError, CellId, CellLocation, CellWrite, PackStore, PutReport, Refusal};
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
        let mut failed = None;
        for cell in cells {
            if !seen.insert(cell.id) || lock(&self.cells).touch(&cell.id).is_some() {
                report.present.push(cell.id);
                continue;
            }
            let own = written.iter().filter(|(_, place)| place.owner == cell.owner);
            let unindexed = own.map(|(_, place)| record_len(place.len)).sum();
            match self.write_cell(&mut tail, cell, unindexed, &mut report) {
                Ok(Ok(place)) => written.push((cell.id, place)),
                Ok(Err(refusal)) => report.refused.push((cell.id, refusal)),
                Err(error) => {
                    // Those written before are saved all the same.
                    failed = Some(error);
                    break;
                }
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
        failed.map_or(Ok(report), Err)
    }

    /// Writes one cell, without syncing it. `unindexed` are bytes of its owner that were written before it in the same put.
    fn write_cell(
        &self,
        tail: &mut MutexGuard<'_, Option<Tail>>,
        cell: &CellWrite<'_>,
        unindexed: u64,
        report: &mut PutReport,
    ) -> Result<Result<CellLocation, Refusal>, CellError> {
        let len = cell.payload.len() as u64;
        if cell.payload.len() > MAX_CELL_PAYLOAD {
            return Ok(Err(Refusal::TooLarge { len, limit: MAX_CELL_PAYLOAD as u64 }));
        }
        let size = record_len(len);
        if let Some(quota) = cell.owner_quota {
            let most = quota.saturating_sub(unindexed + size);
            if unindexed + size > quota || !self.shrink_owner(tail, &cell.owner, most, &mut report.evicted)? {
                return Ok(Err(Refusal::OwnerQuota { quota }));
            }
        }
        if !self.make_room(tail, &cell.owner, size, &mut report.evicted)? {
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

    pub(super) fn append(
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
        {
            let mut index = lock(&self.cells);
            let pack = index.packs.entry(number).or_default();
            (pack.disk_bytes, pack.end) = (ALIGN, ALIGN);
        }
        Ok(Tail { number, file, end: ALIGN, broken: false })
    }

    pub(super) fn sync_written(
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

    pub(super) fn index_written(&self, written: &[(CellId, CellLocation)]) -> Result<(), CellError> {
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
}
