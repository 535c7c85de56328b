//! Packs: append-only files of cells, the disk tier of saved KV.
//!
//! Owns the pack files, the cell index, the quota and the tier's throttle and faults. A cell is bytes plus an
//! identity and is never interpreted. What it holds can always be recomputed: damage, a full disk and a slow disk
//! are misses with a reason, not failures of the store.

mod compact;
mod fault;
mod header;
mod read;
mod rebuild;
mod reclaim;
mod state;
mod write;

pub use fault::{CancelFlag, Throttle, TierFault};
pub(crate) use state::LoadedCells;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::clock::Clock;
use crate::disk::Disk;
use crate::failpoint::Failpoints;
use crate::leases::LeaseStore;
use crate::meta::{MetaError, MetaStore};
use crate::quarantine::Quarantine;
use crate::sync::lock;
use fault::Tier;
use state::Cells;
use write::Tail;

/// The identity of a cell.
pub type CellId = [u8; 32];

/// Whose a cell is, as its caller numbers owners. All zero: nobody's in particular.
pub type OwnerId = [u8; 16];

/// The [`CellStore`] of this crate.
pub type CellStoreImpl = PackStore;

/// A cell to be saved.
#[derive(Debug, Clone, Copy)]
pub struct CellWrite<'a> {
    /// Its identity. Equal ids mean equal bytes: an id that is present is not written again.
    pub id: CellId,
    /// Digest of the contract under which its bytes may be used.
    pub contract: [u8; 32],
    /// The chunk it belongs to.
    pub chunk: [u8; 32],
    /// The layer it belongs to.
    pub layer: u32,
    /// Tokens it covers.
    pub tokens: u32,
    /// How the payload is packed, in the caller's numbering.
    pub codec: u8,
    /// Whose it is.
    pub owner: OwnerId,
    /// The most bytes, headers and padding included, that cells of its owner may take; unset: as many as the tier has.
    pub owner_quota: Option<u64>,
    /// Its bytes, at most [`crate::limits::MAX_CELL_PAYLOAD`].
    pub payload: &'a [u8],
}

/// Why a cell was not saved. It stays where it was; nothing is lost but the copy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Its payload is over the limit.
    #[error("a cell of {len} bytes is over the limit of {limit}")]
    TooLarge {
        /// Bytes given.
        len: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// The quota has no room, and everything that could go is leased.
    #[error("the disk tier's quota of {quota} bytes has no room: raise it or release leases")]
    Quota {
        /// The quota in bytes.
        quota: u64,
    },
    /// The quota of the cell's owner has no room, and everything of the owner that could go is leased.
    #[error("the owner's quota of {quota} bytes on the disk tier has no room: raise it or release leases")]
    OwnerQuota {
        /// The quota in bytes.
        quota: u64,
    },
    /// The file system has no room.
    #[error("the file system is full: {0}")]
    DiskFull(String),
    /// The disk failed.
    #[error("the disk failed: {0}")]
    Io(String),
}

/// What a put did. Every cell given is in exactly one of the first three.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PutReport {
    /// Cells now durable and indexed.
    pub stored: Vec<CellId>,
    /// Cells that were there already.
    pub present: Vec<CellId>,
    /// Cells not saved, with the reason.
    pub refused: Vec<(CellId, Refusal)>,
    /// Cells dropped to make room: those of the owner above its quota, then those of owners above their share, then the rest;
    /// of each the least recently used first.
    pub evicted: Vec<CellId>,
    /// Bytes written, headers and padding included.
    pub bytes: u64,
}

/// Why a put failed as a whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CellError {
    /// The index failed.
    #[error(transparent)]
    Meta(#[from] MetaError),
    /// A file could not be changed.
    #[error("{what}: {detail}")]
    Io {
        /// What was tried.
        what: String,
        /// Its error.
        detail: String,
    },
}

/// Why a cell was not read. Every one of them means: recompute it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Miss {
    /// It is not in the tier.
    #[error("the cell is not in the disk tier")]
    Absent,
    /// It does not verify. It has been dropped.
    #[error("the cell is damaged: {detail}")]
    Corrupt {
        /// What did not match.
        detail: String,
    },
    /// Its file ends before it does. It has been dropped.
    #[error("the cell's file ends early: {have} of {want} bytes")]
    Truncated {
        /// Bytes there.
        have: u64,
        /// Bytes expected.
        want: u64,
    },
    /// Its pack is gone. It has been dropped.
    #[error("pack {pack} of the cell is gone")]
    PackMissing {
        /// The pack's number.
        pack: u64,
    },
    /// It was saved under another contract.
    #[error("the cell was saved under contract {}, {} is needed", hex(stored), hex(expected))]
    ContractMismatch {
        /// The digest it was saved under.
        stored: [u8; 32],
        /// The digest asked for.
        expected: [u8; 32],
    },
    /// The disk failed.
    #[error("reading the cell failed: {0}")]
    Io(String),
    /// The tier was told to fail.
    #[error("injected: {0}")]
    Injected(&'static str),
    /// The caller gave up.
    #[error("the read was cancelled")]
    Cancelled,
}

fn hex(digest: &[u8; 32]) -> String {
    digest[..8].iter().map(|b| format!("{b:02x}")).collect()
}

/// Where a cell stands, and what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CellLocation {
    /// Pack number.
    pub pack: u64,
    /// Byte offset of its header.
    pub offset: u64,
    /// Bytes of its payload.
    pub len: u64,
    /// Digest of the contract it was saved under.
    pub contract: [u8; 32],
    /// The layer it belongs to.
    pub layer: u32,
    /// Tokens it covers.
    pub tokens: u32,
    /// How its payload is packed.
    pub codec: u8,
    /// Whose it is.
    pub owner: OwnerId,
}

/// What a remove did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemoveReport {
    /// Cells removed.
    pub removed: Vec<CellId>,
    /// Cells kept because a lease claims them.
    pub leased: Vec<CellId>,
}

/// What the tier holds and has done since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Usage {
    /// Cells.
    pub cells: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// Bytes taken on disk: headers, padding and dead cells not yet given back included.
    pub disk_bytes: u64,
    /// The most `disk_bytes` may be.
    pub quota_bytes: u64,
    /// Pack files.
    pub packs: u64,
    /// Reads that returned a cell.
    pub hits: u64,
    /// Reads that did not, for any reason.
    pub misses: u64,
    /// Cells found damaged, cut or without their pack.
    pub damaged: u64,
    /// Packs moved to the quarantine folder.
    pub quarantined_packs: u64,
    /// Cells dropped to make room.
    pub evicted: u64,
    /// Cells not saved, for any reason.
    pub refused: u64,
}

/// What a rebuild of the index found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct RebuildReport {
    /// Packs read.
    pub packs: u64,
    /// Cells indexed.
    pub cells: u64,
    /// Blocks that hold neither a cell nor zeros.
    pub damaged_blocks: u64,
    /// Cells whose payload was checked and did not verify.
    pub damaged_cells: u64,
}

/// Saved cells, by identity. Every implementation passes the same tests.
pub trait CellStore: Send + Sync {
    /// Saves cells; those present already are left alone. When it returns, stored cells are durable.
    ///
    /// # Errors
    /// [`CellError`]. A cell that finds no room, or whose write fails, is refused in the report instead.
    fn put(&self, cells: &[CellWrite<'_>]) -> Result<PutReport, CellError>;

    /// A cell's payload, verified, unless `cancel` is raised first.
    ///
    /// # Errors
    /// [`Miss`], with the reason.
    fn get_cancellable(&self, id: &CellId, contract: &[u8; 32], cancel: &CancelFlag)
    -> Result<Vec<u8>, Miss>;

    /// A cell's payload, verified.
    ///
    /// # Errors
    /// [`Miss`], with the reason.
    fn get(&self, id: &CellId, contract: &[u8; 32]) -> Result<Vec<u8>, Miss> {
        self.get_cancellable(id, contract, &CancelFlag::new())
    }

    /// Whether the cell is indexed.
    fn contains(&self, id: &CellId) -> bool;

    /// Where the cells stand; `None` for those absent. Does not count as use.
    fn locate(&self, ids: &[CellId]) -> Vec<Option<CellLocation>>;

    /// Removes cells, durably; leased ones stay.
    ///
    /// # Errors
    /// [`CellError`].
    fn remove(&self, ids: &[CellId]) -> Result<RemoveReport, CellError>;

    /// What the tier holds.
    fn usage(&self) -> Usage;
}

/// What the pack store is made of.
pub(crate) struct PackParts {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) raw: Arc<dyn MetaStore>,
    pub(crate) leases: LeaseStore,
    pub(crate) quarantine: Quarantine,
    pub(crate) failpoints: Failpoints,
    pub(crate) dir: PathBuf,
    pub(crate) store_id: u128,
    pub(crate) quota: u64,
    pub(crate) pack_bytes: u64,
}

/// Cells in pack files.
pub struct PackStore {
    parts: PackParts,
    cells: Mutex<Cells>,
    /// Held for the whole of a put, remove or rebuild: one writer.
    tail: Mutex<Option<Tail>>,
    handles: Mutex<std::collections::HashMap<u64, Arc<dyn crate::disk::DiskFile>>>,
    tier: Tier,
}

impl PackStore {
    /// As [`CellStore::put`].
    ///
    /// # Errors
    /// [`CellError`]. A cell that finds no room, or whose write fails, is refused in the report instead.
    pub fn put(&self, cells: &[CellWrite<'_>]) -> Result<PutReport, CellError> {
        self.write_cells(cells)
    }

    /// A cell's payload, verified on the way.
    ///
    /// # Errors
    /// [`Miss`], with the reason.
    pub fn get(&self, id: &CellId, expected_contract: &[u8; 32]) -> Result<Vec<u8>, Miss> {
        self.read_cell(id, expected_contract, &CancelFlag::new())
    }

    /// As [`PackStore::get`], but gives up once `cancel` is raised.
    ///
    /// # Errors
    /// [`Miss`], with the reason.
    pub fn get_cancellable(
        &self,
        id: &CellId,
        expected_contract: &[u8; 32],
        cancel: &CancelFlag,
    ) -> Result<Vec<u8>, Miss> {
        self.read_cell(id, expected_contract, cancel)
    }

    /// Whether the cell is indexed.
    pub fn contains(&self, id: &CellId) -> bool {
        lock(&self.cells).get(id).is_some()
    }

    /// Where the cells stand; `None` for those absent. Does not count as use.
    pub fn locate(&self, ids: &[CellId]) -> Vec<Option<CellLocation>> {
        let cells = lock(&self.cells);
        ids.iter().map(|id| cells.get(id)).collect()
    }

    /// As [`CellStore::remove`].
    ///
    /// # Errors
    /// [`CellError`].
    pub fn remove(&self, ids: &[CellId]) -> Result<RemoveReport, CellError> {
        self.remove_cells(ids)
    }

    /// What the tier holds and has done.
    pub fn usage(&self) -> Usage {
        Usage { quota_bytes: self.parts.quota, ..lock(&self.cells).usage() }
    }

    /// Bytes that an owner's cells take, headers and padding included.
    pub fn held_by(&self, owner: &OwnerId) -> u64 {
        lock(&self.cells).held_by(owner)
    }

    /// Makes the tier as slow as told, from the next transfer on.
    pub fn set_throttle(&self, throttle: Throttle) {
        self.tier.set_throttle(throttle);
    }

    /// How slow it was made.
    pub fn throttle(&self) -> Throttle {
        self.tier.throttle()
    }

    /// Makes reads of the tier fail as told, from the next read on.
    pub fn set_fault(&self, fault: TierFault) {
        self.tier.set_fault(fault);
    }
}

impl CellStore for PackStore {
    fn put(&self, cells: &[CellWrite<'_>]) -> Result<PutReport, CellError> {
        self.put(cells)
    }

    fn get_cancellable(
        &self,
        id: &CellId,
        contract: &[u8; 32],
        cancel: &CancelFlag,
    ) -> Result<Vec<u8>, Miss> {
        self.get_cancellable(id, contract, cancel)
    }

    fn contains(&self, id: &CellId) -> bool {
        self.contains(id)
    }

    fn locate(&self, ids: &[CellId]) -> Vec<Option<CellLocation>> {
        self.locate(ids)
    }

    fn remove(&self, ids: &[CellId]) -> Result<RemoveReport, CellError> {
        self.remove(ids)
    }

    fn usage(&self) -> Usage {
        self.usage()
    }
}
