//! The host tier: cells in host memory, between the device and the disk, by the content they are of.
//!
//! A chunk is kept or dropped as a whole: where one of its layers is gone, the layers below it are recomputed. When room is
//! needed, chunks that the disk has too go before those that it has not (a full or failing disk), and among them the least
//! recently used. What belongs to tenants above their share goes before all of these, and a tenant at its quota drops its own.
//! Chunks that a restore has claimed stay. A claim makes nobody wait: what finds no room is not kept here, and is where it
//! would be without this tier.
//!
//! No clock, no thread, no lock: the scheduler owns it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use store::TierFault;

use super::tenants::{Leaving, Shares, Tenant, TenantQuotas};
use super::view::HostView;
use crate::kv::chunk::ChunkId;

/// A cell's bytes, shared with whoever writes them to disk.
pub(super) type CellBytes = Arc<Vec<u8>>;

/// Why a cell was not given. The words are those of reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostMiss {
    /// It is not here.
    Absent,
    /// Its bytes are not those that were put in. It has been dropped.
    Corrupt,
    /// Bytes are missing. It has been dropped.
    Truncated,
    /// It is of another contract, which only an injected fault can bring about: ids cover the contract.
    Contract,
}

impl HostMiss {
    /// The word a report uses.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Corrupt => "corrupt",
            Self::Truncated => "truncated",
            Self::Contract => "contract",
        }
    }
}

/// Keeps a chunk here until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    /// Counted by being held.
    _counted: Arc<()>,
}

struct Cell {
    bytes: CellBytes,
    /// Memory is trusted less the longer a cell stays; this costs a small part of the copy to the device.
    checksum: u32,
    on_disk: bool,
}

struct Held {
    /// Whose it is: a chunk's id covers its contract, and that the tenant.
    tenant: Tenant,
    cells: BTreeMap<u32, Cell>,
    used: u64,
    /// Held once here, and once by each claim.
    claims: Arc<()>,
}

impl Held {
    fn bytes(&self) -> u64 {
        self.cells.values().map(|cell| cell.bytes.len() as u64).sum()
    }

    fn is_claimed(&self) -> bool {
        Arc::strong_count(&self.claims) > 1
    }

    fn rank(&self) -> Rank {
        (self.cells.values().any(|cell| !cell.on_disk), self.used)
    }
}

/// Order of eviction, lowest first: whether the disk lacks some of it, then the last use.
type Rank = (bool, u64);

/// Cells in host memory.
pub(super) struct HostTier {
    budget: u64,
    bytes: u64,
    cells: u64,
    chunks: HashMap<ChunkId, Held>,
    order: BTreeMap<Rank, ChunkId>,
    quotas: TenantQuotas,
    /// Bytes of each tenant's cells.
    held: HashMap<Tenant, u64>,
    /// Counts uses.
    now: u64,
    /// Chunks that left and were not told of yet.
    forgotten: Vec<ChunkId>,
}

impl HostTier {
    /// A tier that holds at most `budget` bytes of cells; none with 0.
    pub(super) fn new(budget: u64, quotas: TenantQuotas) -> Self {
        Self {
            budget,
            bytes: 0,
            cells: 0,
            chunks: HashMap::new(),
            order: BTreeMap::new(),
            quotas,
            held: HashMap::new(),
            now: 0,
            forgotten: Vec::new(),
        }
    }

    /// Chunks that left since this was last asked.
    pub(super) fn take_forgotten(&mut self) -> Vec<ChunkId> {
        std::mem::take(&mut self.forgotten)
    }

    /// Whether it holds nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Whether a cell is here.
    pub(super) fn has(&self, chunk: &ChunkId, layer: u32) -> bool {
        self.chunks.get(chunk).is_some_and(|held| held.cells.contains_key(&layer))
    }

    /// Bytes of a chunk's cells.
    pub(super) fn chunk_bytes(&self, chunk: &ChunkId) -> u64 {
        self.chunks.get(chunk).map_or(0, Held::bytes)
    }

    /// Bytes of a chunk's cells in some layers, as far as they are here.
    pub(super) fn cells_bytes(&self, chunk: &ChunkId, layers: &[u32]) -> usize {
        let Some(held) = self.chunks.get(chunk) else { return 0 };
        layers.iter().filter_map(|layer| held.cells.get(layer)).map(|cell| cell.bytes.len()).sum()
    }

    /// Bytes of a tenant's cells.
    pub(super) fn held_by(&self, tenant: &Tenant) -> u64 {
        self.held.get(tenant).copied().unwrap_or_default()
    }

    /// What it holds.
    pub(super) fn view(&self) -> HostView {
        HostView { bytes: self.bytes, budget: self.budget, cells: self.cells }
    }

    /// Changes a chunk and keeps the order true.
    fn change<T>(&mut self, chunk: &ChunkId, change: impl FnOnce(&mut Held) -> T) -> Option<T> {
        let held = self.chunks.get_mut(chunk)?;
        self.order.remove(&held.rank());
        let changed = change(held);
        self.order.insert(held.rank(), *chunk);
        Some(changed)
    }

    /// Counts a use of a chunk.
    pub(super) fn touch(&mut self, chunk: &ChunkId) {
        self.now += 1;
        let now = self.now;
        self.change(chunk, |held| held.used = now);
    }

    /// Keeps cells of a tenant's chunk, by layer, if there is room or room can be made; whether they are here now. Those that
    /// are here already stay as they are. `on_disk`: the disk has them too. Such cells drop none that it has not.
    pub(super) fn insert(
        &mut self,
        tenant: &Tenant,
        chunk: ChunkId,
        cells: Vec<(u32, CellBytes)>,
        on_disk: bool,
    ) -> bool {
        let fresh: Vec<_> = cells.into_iter().filter(|(layer, _)| !self.has(&chunk, *layer)).collect();
        let size: u64 = fresh.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        if !self.make_room(tenant, &chunk, size, on_disk) {
            return false;
        }
        self.touch(&chunk);
        if fresh.is_empty() {
            return true;
        }
        if !self.chunks.contains_key(&chunk) {
            let (tenant, used) = (tenant.clone(), self.now);
            let held = Held { tenant, cells: BTreeMap::new(), used, claims: Arc::default() };
            self.order.insert(held.rank(), chunk);
            self.chunks.insert(chunk, held);
        }
        self.bytes += size;
        *self.held.entry(tenant.clone()).or_default() += size;
        self.cells += fresh.len() as u64;
        self.change(&chunk, |held| {
            for (layer, bytes) in fresh {
                let checksum = crc32c::crc32c(&bytes);
                held.cells.insert(layer, Cell { bytes, checksum, on_disk });
            }
        });
        true
    }

    /// Drops chunks until `size` more bytes of a tenant fit, `keep` and those claimed excepted; whether they do. Where they
    /// cannot, nothing is dropped.
    fn make_room(&mut self, tenant: &Tenant, keep: &ChunkId, size: u64, on_disk: bool) -> bool {
        let Some((mut freed, mut victims)) = self.leaving_for_quota(tenant, keep, size, on_disk) else {
            return false;
        };
        let over = (self.bytes + size).saturating_sub(self.budget);
        if freed < over {
            let held = self.held.iter().map(|(tenant, bytes)| (tenant.clone(), *bytes));
            let mut shares = Shares::new(self.budget, held, Some((tenant, size)));
            shares.left(tenant, freed);
            let rest = self.droppable(keep, on_disk).filter(|(_, id, _)| !victims.contains(*id));
            let mut leaving = Leaving::new(rest.map(|(tenant, id, bytes)| (tenant.clone(), (*id, bytes))));
            let mut chosen = Vec::new();
            while freed < over {
                let Some((tenant, (id, bytes))) = leaving.next(&shares) else { return false };
                freed += bytes;
                shares.left(&tenant, bytes);
                chosen.push(id);
            }
            victims.extend(chosen);
        }
        for id in victims {
            self.forget(&id);
        }
        true
    }

    /// What a tenant drops of its own so that `size` more bytes are within its quota, and the bytes of that; `None`: it cannot.
    fn leaving_for_quota(
        &self,
        tenant: &Tenant,
        keep: &ChunkId,
        size: u64,
        on_disk: bool,
    ) -> Option<(u64, Vec<ChunkId>)> {
        let (mut freed, mut victims) = (0, Vec::new());
        let Some(quota) = self.quotas.of(tenant).host_bytes else { return Some((freed, victims)) };
        let over = (self.held_by(tenant) + size).saturating_sub(quota);
        let mut own = self.droppable(keep, on_disk).filter(|(owner, ..)| *owner == tenant);
        while freed < over {
            let (_, id, bytes) = own.next()?;
            freed += bytes;
            victims.push(*id);
        }
        Some((freed, victims))
    }

    /// Chunks that may be dropped with their tenants and bytes, the cheapest first.
    fn droppable(&self, keep: &ChunkId, on_disk: bool) -> impl Iterator<Item = (&Tenant, &ChunkId, u64)> {
        self.order
            .iter()
            .take_while(move |((only_copy, _), _)| !(on_disk && *only_copy))
            .filter(move |(_, id)| *id != keep)
            .filter_map(|(_, id)| {
                let held = self.chunks.get(id).filter(|held| !held.is_claimed())?;
                Some((&held.tenant, id, held.bytes()))
            })
    }

    fn forget(&mut self, chunk: &ChunkId) {
        if let Some(held) = self.chunks.remove(chunk) {
            self.order.remove(&held.rank());
            self.cells -= held.cells.len() as u64;
            self.gone(&held.tenant, held.bytes());
            self.forgotten.push(*chunk);
        }
    }

    /// Bytes of a tenant's cells are no longer here.
    fn gone(&mut self, tenant: &Tenant, bytes: u64) {
        self.bytes -= bytes;
        if let Some(held) = self.held.get_mut(tenant) {
            *held -= bytes;
            if *held == 0 {
                self.held.remove(tenant);
            }
        }
    }

    /// Claims a chunk, if it is here.
    pub(super) fn claim(&mut self, chunk: &ChunkId) -> Option<Claim> {
        self.touch(chunk);
        self.chunks.get(chunk).map(|held| Claim { _counted: Arc::clone(&held.claims) })
    }

    /// Told that the disk has every cell of a chunk, or not.
    pub(super) fn set_on_disk(&mut self, chunk: &ChunkId, on_disk: bool) {
        self.change(chunk, |held| held.cells.values_mut().for_each(|cell| cell.on_disk = on_disk));
    }

    /// A cell, checked on the way and broken before that as `fault` says. One that does not verify is dropped.
    pub(super) fn read(
        &mut self,
        chunk: &ChunkId,
        layer: u32,
        fault: TierFault,
    ) -> Result<CellBytes, HostMiss> {
        let held = self.chunks.get(chunk).and_then(|held| held.cells.get(&layer));
        let Some(cell) = held.filter(|_| fault != TierFault::DropReads) else { return Err(HostMiss::Absent) };
        let (whole, checksum) = (cell.bytes.len(), cell.checksum);
        let mut bytes = Arc::clone(&cell.bytes);
        match fault {
            TierFault::FlipBit => {
                if let Some(byte) = Arc::make_mut(&mut bytes).last_mut() {
                    *byte ^= 1;
                }
            }
            TierFault::Tear => Arc::make_mut(&mut bytes).truncate(whole / 2),
            _ => {}
        }
        let miss = match fault {
            TierFault::Stale => HostMiss::Contract,
            _ if bytes.len() < whole => HostMiss::Truncated,
            _ if crc32c::crc32c(&bytes) != checksum => HostMiss::Corrupt,
            _ => return Ok(bytes),
        };
        self.drop_cell(chunk, layer);
        Err(miss)
    }

    fn drop_cell(&mut self, chunk: &ChunkId, layer: u32) {
        let dropped = self.change(chunk, |held| Some((held.tenant.clone(), held.cells.remove(&layer)?)));
        if let Some((tenant, cell)) = dropped.flatten() {
            self.gone(&tenant, cell.bytes.len() as u64);
            self.cells -= 1;
        }
        if self.chunks.get(chunk).is_some_and(|held| held.cells.is_empty()) {
            self.forget(chunk);
        }
    }
}

#[cfg(test)]
mod tests;
