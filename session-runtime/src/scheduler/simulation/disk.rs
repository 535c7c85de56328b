//! A tier without bytes and without quotas: it knows which cells it has, and answers one request after the other when their time has passed.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use store::{CellId, Clock, Lease, ManualClock, OwnerId};

use crate::kv::chunk::ChunkId;
use crate::scheduler::port::TierPort;
use crate::scheduler::tier::{TierAnswer, TierRequest};

/// How fast a tier is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskCost {
    /// Bytes read a second.
    pub read_bytes_per_s: f64,
    /// Bytes written a second.
    pub write_bytes_per_s: f64,
    /// Seconds of a request, whatever its bytes.
    pub latency: f64,
}

/// The tier's state, seen by the scheduler through [`DiskPort`] and by the simulation.
pub(super) struct Disk {
    clock: Arc<ManualClock>,
    cost: DiskCost,
    /// Bytes of each cell.
    saved: HashMap<(ChunkId, u32), usize>,
    /// Bytes that it was given.
    written: u64,
    /// Bytes that each owner saved.
    held: HashMap<OwnerId, u64>,
    waiting: VecDeque<TierRequest>,
    /// The request that is served, and when it will have been.
    serving: Option<(Duration, TierRequest)>,
}

/// A handle of the tier.
#[derive(Clone)]
pub(super) struct DiskPort(Arc<Mutex<Disk>>);

impl DiskPort {
    pub(super) fn new(clock: Arc<ManualClock>, cost: DiskCost) -> Self {
        Self(Arc::new(Mutex::new(Disk {
            clock,
            cost,
            saved: HashMap::new(),
            written: 0,
            held: HashMap::new(),
            waiting: VecDeque::new(),
            serving: None,
        })))
    }

    fn state(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a cell from the start.
    pub(super) fn hold(&self, chunk: ChunkId, layer: u32, bytes: usize) {
        self.state().saved.insert((chunk, layer), bytes);
    }

    /// Bytes of cells that it was given.
    pub(super) fn written(&self) -> u64 {
        self.state().written
    }

    /// When the request that is served will be done.
    pub(super) fn next_due(&self) -> Option<Duration> {
        self.state().serving.as_ref().map(|(due, _)| *due)
    }

    /// The next answer whose time has come.
    pub(super) fn answer(&self) -> Option<TierAnswer> {
        let mut disk = self.state();
        loop {
            let now = disk.clock.monotonic();
            let (due, request) = disk.serving.take_if(|(due, _)| *due <= now)?;
            disk.serve_next(due);
            if let Some(answer) = disk.serve(request) {
                return Some(answer);
            }
        }
    }
}

impl TierPort for DiskPort {
    fn costs(&self) -> Option<Vec<u8>> {
        None
    }

    fn contains(&self, chunk: &ChunkId, layer: u32) -> bool {
        self.state().saved.contains_key(&(*chunk, layer))
    }

    fn lease(&self, _: &[CellId]) -> Option<Lease> {
        // Nothing is ever dropped here.
        None
    }

    fn limit(&self) -> Option<u64> {
        None
    }

    fn held_by(&self, owner: &OwnerId) -> u64 {
        self.state().held.get(owner).copied().unwrap_or_default()
    }

    fn ask(&self, request: TierRequest) {
        let mut disk = self.state();
        let now = disk.clock.monotonic();
        disk.waiting.push_back(request);
        if disk.serving.is_none() {
            disk.serve_next(now);
        }
    }
}

impl Disk {
    /// Begins with the next request at a time.
    fn serve_next(&mut self, now: Duration) {
        let Some(request) = self.waiting.pop_front() else { return };
        let seconds = self.seconds(&request);
        self.serving = Some((now + Duration::try_from_secs_f64(seconds).unwrap_or_default(), request));
    }

    fn seconds(&self, request: &TierRequest) -> f64 {
        match request {
            TierRequest::Save { cells, .. } => {
                let bytes: usize = cells.iter().map(|(_, cell)| cell.len()).sum();
                self.cost.latency + bytes as f64 / self.cost.write_bytes_per_s
            }
            TierRequest::Remember { .. } => 0.0,
            TierRequest::Load { cancel, .. } if cancel.is_cancelled() => 0.0,
            TierRequest::Load { chunk, layers, .. } => {
                let bytes: usize = layers.iter().filter_map(|layer| self.saved.get(&(*chunk, *layer))).sum();
                self.cost.latency + bytes as f64 / self.cost.read_bytes_per_s
            }
        }
    }

    fn serve(&mut self, request: TierRequest) -> Option<TierAnswer> {
        let seconds = self.seconds(&request);
        match request {
            TierRequest::Save { session, owner, chunk, cells, .. } => {
                let bytes = cells.iter().map(|(_, cell)| cell.len() as u64).sum();
                self.written += bytes;
                *self.held.entry(owner).or_default() += bytes;
                self.saved.extend(cells.iter().map(|(layer, cell)| ((chunk.id, *layer), cell.len())));
                Some(TierAnswer::Saved { session, chunk, bytes, outcome: Ok(()) })
            }
            TierRequest::Remember { .. } => None,
            TierRequest::Load { restore, index, chunk, layers, cancel, .. } => {
                let load = |layer: u32| match self.saved.get(&(chunk, layer)) {
                    _ if cancel.is_cancelled() => Err("cancelled".to_owned()),
                    Some(bytes) => Ok(Arc::new(vec![0; *bytes])),
                    None => Err("absent".to_owned()),
                };
                let cells = layers.into_iter().map(|layer| (layer, load(layer))).collect();
                Some(TierAnswer::Loaded { restore, index, cells, seconds })
            }
        }
    }
}
