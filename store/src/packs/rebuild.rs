//! Opening the packs, and finding cells by their headers where the index missed them or is gone.

use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;

use super::fault::Tier;
use super::header::{ALIGN, CELL_HEADER, CellHeader, Place, record_len};
use super::state::{Cells, LoadedCells, place_value};
use super::write::{Tail, io_error};
use super::{CellError, CellId, CellLocation, PackParts, PackStore, RebuildReport};
use crate::disk::DiskFile;
use crate::limits::{MAX_CELL_PAYLOAD, MAX_META_BATCH};
use crate::meta::{Op, keys};
use crate::recovery::RecoveryReport;
use crate::sync::lock;

/// What stands in a pack.
#[derive(Default)]
struct Walked {
    found: Vec<(CellId, CellLocation)>,
    /// Offsets of headers whose payload is not all there.
    torn: Vec<u64>,
}

impl PackStore {
    /// Opens the packs in the directory with what the index on disk says of them.
    pub(crate) fn open(
        parts: PackParts,
        loaded: LoadedCells,
        report: &mut RecoveryReport,
    ) -> Result<Self, CellError> {
        let store = Self {
            parts,
            cells: Mutex::new(Cells::default()),
            tail: Mutex::new(None),
            handles: Mutex::default(),
            tier: Tier::default(),
        };
        let files = store.list().map_err(|e| io_error("listing packs", &e))?;
        let mut stale: Vec<Op> = Vec::new();
        for pack in loaded.packs.keys().filter(|pack| !files.contains_key(pack)) {
            stale.push(Op::delete(keys::pack(*pack)));
        }
        {
            let mut index = lock(&store.cells);
            // Older cells first, so that they count as used longer ago.
            let mut cells = loaded.cells;
            cells.sort_unstable_by_key(|(_, place)| (place.pack, place.offset));
            for (id, place) in cells {
                // A pack may be gone, or have been cut while nobody watched. What else may be wrong with a cell is found
                // when it is read: looking at every header here would take as long as reading them.
                let end = place.offset.saturating_add(CELL_HEADER as u64).saturating_add(place.len);
                if files.get(&place.pack).is_some_and(|len| end <= *len) {
                    index.insert(id, place);
                } else {
                    report.cells_dropped += 1;
                    stale.push(Op::delete(keys::cell(&id)));
                }
            }
        }
        for some in stale.chunks(MAX_META_BATCH) {
            store.parts.raw.batch(some.to_vec())?;
        }
        let newest = files.last_key_value().map(|(number, _)| *number);
        for pack in files.into_keys() {
            // Behind what is indexed a write may have been torn; in an older pack all cells were synced.
            let check = loaded.packs.contains_key(&pack) || Some(pack) == newest;
            let from = loaded.packs.get(&pack).copied().unwrap_or(0).max(ALIGN);
            let mut found = RebuildReport::default();
            store.adopt(pack, from, check, &mut found).map_err(|e| io_error("reading a pack", &e))??;
            report.cells_recovered += found.cells;
        }
        store.choose_tail().map_err(|e| io_error("opening a pack", &e))?;
        report.cells = store.cells_len();
        Ok(store)
    }

    fn cells_len(&self) -> u64 {
        lock(&self.cells).usage().cells
    }

    /// Numbers of the pack files, ascending, and their lengths.
    fn list(&self) -> io::Result<BTreeMap<u64, u64>> {
        let entries = self.parts.disk.list(&self.parts.dir)?;
        let number = |name: &str| name.strip_prefix("pack-")?.strip_suffix(".pack")?.parse().ok();
        Ok(entries.iter().filter_map(|e| Some((number(&e.name)?, e.len))).collect())
    }

    /// Goes on writing in the newest pack if it has room.
    fn choose_tail(&self) -> io::Result<()> {
        let Some(number) = lock(&self.cells).packs.last_key_value().map(|(n, _)| *n) else { return Ok(()) };
        let file = self.open_pack(number)?;
        let end = file.len()?.next_multiple_of(ALIGN).max(ALIGN);
        if end < self.parts.pack_bytes {
            *lock(&self.tail) = Some(Tail { number, file, end, broken: false });
        }
        Ok(())
    }

    /// Indexes the cells of a pack that stand at `from` and behind it.
    fn adopt(
        &self,
        pack: u64,
        from: u64,
        check_payloads: bool,
        report: &mut RebuildReport,
    ) -> io::Result<Result<(), CellError>> {
        let file = self.open_pack(pack)?;
        let Walked { found, torn } = self.walk(&*file, pack, from, check_payloads, report)?;
        if !torn.is_empty() {
            // Later cells may stand where a torn one claims its payload: no later walk may believe its length.
            for at in torn {
                file.write_at(at, &[0; CELL_HEADER])?;
            }
            file.sync_data()?;
        }
        let end = file.len()?;
        let index_batches = || -> Result<(), CellError> {
            for some in found.chunks(MAX_META_BATCH / 2) {
                let ops =
                    some.iter().map(|(id, place)| Op::put(keys::cell(id), place_value(place))).collect();
                self.parts.raw.batch(ops)?;
            }
            if end != from {
                self.parts.raw.batch(vec![Op::put(keys::pack(pack), end.to_le_bytes())])?;
            }
            Ok(())
        };
        if let Err(e) = index_batches() {
            return Ok(Err(e));
        }
        let mut index = lock(&self.cells);
        for (id, place) in found {
            index.insert(id, place);
        }
        let length = end.next_multiple_of(ALIGN);
        let pack = index.packs.entry(pack).or_default();
        (pack.disk_bytes, pack.end) = (file.allocated()?.min(length), length);
        Ok(Ok(()))
    }

    fn walk(
        &self,
        file: &dyn DiskFile,
        pack: u64,
        from: u64,
        check_payloads: bool,
        report: &mut RebuildReport,
    ) -> io::Result<Walked> {
        let len = file.len()?;
        let mut walked = Walked::default();
        let mut at = from.next_multiple_of(ALIGN);
        while at + CELL_HEADER as u64 <= len {
            let mut bytes = [0; CELL_HEADER];
            if file.read_at(at, &mut bytes)? < CELL_HEADER {
                break;
            }
            let place = Place { store_id: self.parts.store_id, pack, offset: at };
            let header = CellHeader::decode(&bytes, place).filter(|h| h.len <= MAX_CELL_PAYLOAD as u64);
            let Some(header) = header else {
                report.damaged_blocks += u64::from(bytes != [0; CELL_HEADER]);
                at += ALIGN;
                continue;
            };
            // Of a copy that a compaction did not get to sync only the header may be there: it must not take the place of
            // the cell it was made from.
            let check = check_payloads
                || lock(&self.cells)
                    .get(&header.id)
                    .is_some_and(|other| (other.pack, other.offset) != (pack, at));
            if at + CELL_HEADER as u64 + header.len > len || (check && !payload_is_good(file, at, &header)?) {
                report.damaged_cells += 1;
                walked.torn.push(at);
                at += ALIGN;
            } else {
                walked.found.push((header.id, header.place(pack, at)));
                report.cells += 1;
                at += record_len(header.len);
            }
        }
        Ok(walked)
    }

    /// Throws the cell index away and makes it again from the headers of all packs. Only the newest pack's payloads
    /// are checked; the others are when they are read.
    ///
    /// # Errors
    /// [`CellError`].
    pub fn rebuild_index(&self) -> Result<RebuildReport, CellError> {
        let mut tail = lock(&self.tail);
        let mut old: Vec<CellId> = Vec::new();
        {
            let mut index = lock(&self.cells);
            old.extend(index.by_use(|_| true));
            index.clear();
        }
        for some in old.chunks(MAX_META_BATCH) {
            self.parts.raw.batch(some.iter().map(|id| Op::delete(keys::cell(id))).collect())?;
        }
        let files = self.list().map_err(|e| io_error("listing packs", &e))?;
        let mut report = RebuildReport { packs: files.len() as u64, ..RebuildReport::default() };
        let newest = files.last_key_value().map(|(number, _)| *number);
        for pack in files.into_keys() {
            let check = Some(pack) == newest;
            self.adopt(pack, ALIGN, check, &mut report).map_err(|e| io_error("reading a pack", &e))??;
        }
        if tail.as_ref().is_some_and(|t| !lock(&self.cells).packs.contains_key(&t.number)) {
            *tail = None;
        }
        Ok(report)
    }
}

fn payload_is_good(file: &dyn DiskFile, at: u64, header: &CellHeader) -> io::Result<bool> {
    let mut hash = blake3::Hasher::new();
    let mut buf = vec![0; 1 << 16];
    let (mut pos, mut left) = (at + CELL_HEADER as u64, header.len);
    while left > 0 {
        let want = buf.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let got = file.read_at(pos, &mut buf[..want])?;
        if got == 0 {
            return Ok(false);
        }
        hash.update(&buf[..got]);
        pos += got as u64;
        left -= got as u64;
    }
    Ok(*hash.finalize().as_bytes() == header.hash)
}
