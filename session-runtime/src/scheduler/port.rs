//! The tier as the scheduler's loop sees it: asked without waiting, answered later. The real one has a thread and a store;
//! the simulated one has a clock.

use store::{CellId, Lease, OwnerId};

use super::tier::TierRequest;
use crate::kv::chunk::ChunkId;

/// A tier below the device.
pub(super) trait TierPort: Send {
    /// Costs that an earlier process measured.
    fn costs(&self) -> Option<Vec<u8>>;
    /// Whether the tier has a cell.
    fn contains(&self, chunk: &ChunkId, layer: u32) -> bool;
    /// Keeps cells from being dropped for a while; `None` where so many are kept already that these are not.
    fn lease(&self, cells: &[CellId]) -> Option<Lease>;
    /// Bytes a second that it is throttled to.
    fn limit(&self) -> Option<u64>;
    /// Bytes of an owner's cells.
    fn held_by(&self, owner: &OwnerId) -> u64;
    /// Asks; the answer comes later.
    fn ask(&self, request: TierRequest);
}
