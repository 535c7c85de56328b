//! The disk tier's own thread: writes and reads cells in the order asked, so that the engine never
//! waits for a disk. The number of requests under way is bounded by the scheduler.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use store::Store;
use store::{CancelFlag, CellWrite, Miss};

use super::port::TierPort;
use crate::error::Error;
use crate::kv::chunk::{Chunk, ChunkId, cell_id};
use crate::kv::contract::Digest;

/// Key of the measured costs in the metadata.
const COSTS_KEY: &[u8] = b"measured-costs";

/// A request to the tier.
pub(super) enum TierRequest {
    /// Save cells of a chunk, by layer.
    Save { session: Arc<str>, chunk: Chunk, cells: Vec<(u32, Vec<u8>)> },
    /// Keep measured costs for the next start.
    Remember { costs: Vec<u8> },
    /// Load the cells of a chunk in these layers.
    Load { restore: u64, index: usize, chunk: ChunkId, layers: Vec<u32>, cancel: CancelFlag },
}

/// The tier's answer.
pub(super) enum TierAnswer {
    /// A chunk was saved, or was not, with the reason.
    Saved { session: Arc<str>, chunk: Chunk, bytes: u64, outcome: Result<(), String> },
    /// Cells of a chunk, by layer.
    Loaded { restore: u64, index: usize, cells: Vec<(u32, Result<Vec<u8>, String>)>, seconds: f64 },
}

/// Handle of the tier's thread.
pub(super) struct Tier {
    store: Store,
    requests: Option<Sender<TierRequest>>,
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl Tier {
    /// Starts the thread; it answers through `answer`.
    pub(super) fn start(
        store: Store,
        contract: Digest,
        answer: impl Fn(TierAnswer) + Send + 'static,
    ) -> Result<Self, Error> {
        let (requests, inbox) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let serving = store.clone();
        let thread = std::thread::Builder::new()
            .name("tier-disk".into())
            .spawn(move || serve(&serving, &contract, &inbox, &stopped, &answer))
            .map_err(Error::internal)?;
        Ok(Self { store, requests: Some(requests), thread: Some(thread), stop })
    }
}

impl TierPort for Tier {
    fn costs(&self) -> Option<Vec<u8>> {
        self.store.meta().get(COSTS_KEY).ok().flatten()
    }

    fn contains(&self, chunk: &ChunkId, layer: u32) -> bool {
        self.store.cells().contains(&cell_id(chunk, layer))
    }

    fn limit(&self) -> Option<u64> {
        self.store.cells().throttle().bytes_per_s
    }

    fn ask(&self, request: TierRequest) {
        if let Some(requests) = &self.requests
            && requests.send(request).is_err()
        {
            tracing::error!("the disk tier's thread is gone");
        }
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(
    store: &Store,
    contract: &Digest,
    inbox: &Receiver<TierRequest>,
    stop: &AtomicBool,
    answer: &dyn Fn(TierAnswer),
) {
    while let Ok(request) = inbox.recv() {
        match request {
            TierRequest::Save { session, chunk, cells } => {
                let bytes = cells.iter().map(|(_, cell)| cell.len() as u64).sum();
                let outcome = save(store, contract, &chunk, &cells);
                answer(TierAnswer::Saved { session, chunk, bytes, outcome });
            }
            TierRequest::Remember { costs } => {
                if let Err(error) = store.meta().put(COSTS_KEY, &costs) {
                    tracing::warn!(%error, "costs not kept");
                }
            }
            TierRequest::Load { restore, index, chunk, layers, cancel } => {
                let begun = Instant::now();
                let load = |layer| {
                    if stop.load(Ordering::Relaxed) {
                        return Err("stopped".to_owned());
                    }
                    let cell = store.cells().get_cancellable(&cell_id(&chunk, layer), contract, &cancel);
                    cell.map_err(|miss| reason(&miss).to_owned())
                };
                let cells = layers.into_iter().map(|layer| (layer, load(layer))).collect();
                let seconds = begun.elapsed().as_secs_f64();
                answer(TierAnswer::Loaded { restore, index, cells, seconds });
            }
        }
    }
}

fn save(store: &Store, contract: &Digest, chunk: &Chunk, cells: &[(u32, Vec<u8>)]) -> Result<(), String> {
    let writes: Vec<CellWrite<'_>> = cells
        .iter()
        .map(|(layer, payload)| CellWrite {
            id: cell_id(&chunk.id, *layer),
            contract: *contract,
            chunk: chunk.id,
            layer: *layer,
            tokens: chunk.tokens as u32,
            codec: 0,
            payload,
        })
        .collect();
    let report = store.cells().put(&writes).map_err(|error| error.to_string())?;
    match report.refused.first() {
        Some((_, refusal)) => Err(refusal.to_string()),
        None => Ok(()),
    }
}

/// The word a report uses for a miss.
fn reason(miss: &Miss) -> &'static str {
    match miss {
        Miss::Absent => "absent",
        Miss::Corrupt { .. } => "corrupt",
        Miss::Truncated { .. } => "truncated",
        Miss::PackMissing { .. } => "pack_missing",
        Miss::ContractMismatch { .. } => "contract",
        Miss::Cancelled => "cancelled",
        _ => "io",
    }
}
