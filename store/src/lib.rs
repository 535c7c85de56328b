//! Bytes: the journal, the metadata index, segments with a time to live, packs of cells, and leases.
//!
//! A [`Store`] owns one data directory. What it acknowledges is durable: the journal is synced first, then indexed,
//! and only then does a ticket say so. The index (sled) is never the only copy of anything; on any doubt it is thrown
//! away and rebuilt. Cells are copies of what can be recomputed, so their loss is a miss and never an error.
//!
//! This crate knows no model and no meaning of tokens, and has no async runtime: plain threads and callbacks. The
//! byte layouts and the argument why a crash loses nothing acknowledged are in `FORMAT.md`.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod assemble;
mod checkpoint;
mod clock;
mod disk;
mod error;
pub mod failpoint;
mod format;
mod framed;
mod journal;
mod leases;
pub mod limits;
mod lock;
mod meta;
mod open;
mod options;
mod packs;
mod poison;
mod probe;
mod quarantine;
mod recovery;
mod segments;
mod store;
mod sync;

pub use clock::{Clock, ManualClock, SystemClock};
pub use disk::{
    Disk, DiskEntry, DiskFault, DiskFile, DiskLock, DiskOp, FaultEffect, FaultyDisk, RealDisk, SimDisk,
};
pub use error::{OpenError, StoreError};
pub use failpoint::{FAILPOINTS_ENV, FailAction, FailpointError, Failpoints};
pub use format::FORMAT_VERSION;
pub use journal::{Appended, Journal, JournalError, JournalRecord, JournalSession, Ticket};
pub use leases::{Lease, LeaseError, LeaseStore};
pub use lock::{Holder, holder};
pub use meta::{
    CasOutcome, DurableMeta, MemoryMeta, MetaEntry, MetaError, MetaKind, MetaStore, Op, SledMeta,
    SledOptions, probe_metadata,
};
pub use options::StoreOptions;
pub use packs::{
    CancelFlag, CellError, CellId, CellLocation, CellStore, CellStoreImpl, CellWrite, Miss, OwnerId,
    PackStore, PutReport, RebuildReport, Refusal, RemoveReport, Throttle, TierFault, Usage,
};
pub use recovery::{DamagedRange, RecoveryReport};
pub use segments::{ClockState, Retention, Segment, SegmentError, SegmentStore, SweepReport};
pub use store::Store;
