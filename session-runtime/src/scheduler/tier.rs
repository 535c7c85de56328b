//! The disk tier's own threads: one writes cells and one reads them, each in the order asked, so that the engine never
//! waits for a disk and a read that is stuck keeps no eviction waiting. The number of requests under way is bounded by
//! the scheduler.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use store::{CancelFlag, CellId, CellWrite, Lease, Miss, OwnerId, Store};

use super::host::CellBytes;
use super::port::TierPort;
use crate::error::Error;
use crate::kv::chunk::{Chunk, ChunkId, cell_id};
use crate::kv::codec::KvCodec;
use crate::kv::contract::Digest;

/// Key of the measured costs in the metadata.
const COSTS_KEY: &[u8] = b"measured-costs";
/// How long a restore keeps its cells on disk from being dropped. One that takes longer is stuck, and pressure wins.
const LEASE: Duration = Duration::from_secs(60);

/// A request to the tier.
pub(super) enum TierRequest {
    /// Save cells of a chunk, by layer, as far as the owner's quota goes.
    Save {
        session: Arc<str>,
        owner: OwnerId,
        owner_quota: Option<u64>,
        contract: Digest,
        codec: KvCodec,
        chunk: Chunk,
        cells: Vec<(u32, CellBytes)>,
    },
    /// Keep measured costs for the next start.
    Remember { costs: Vec<u8> },
    /// Load the cells of a chunk in these layers.
    Load {
        restore: u64,
        index: usize,
        contract: Digest,
        chunk: ChunkId,
        layers: Vec<u32>,
        cancel: CancelFlag,
    },
}

/// The tier's answer.
pub(super) enum TierAnswer {
    /// A chunk was saved, or was not, with the reason.
    Saved { session: Arc<str>, chunk: Chunk, bytes: u64, outcome: Result<(), String> },
    /// Cells of a chunk, by layer.
    Loaded { restore: u64, index: usize, cells: Vec<(u32, Result<CellBytes, String>)>, seconds: f64 },
}

/// Handle of the tier's threads.
pub(super) struct Tier {
    store: Store,
    reader: Served,
    writer: Served,
    stop: Arc<AtomicBool>,
}

/// A thread with its inbox.
struct Served {
    requests: Option<Sender<TierRequest>>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn start(name: &str, serve: impl FnOnce(&Receiver<TierRequest>) + Send + 'static) -> Result<Self, Error> {
        let (requests, inbox) = channel();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || serve(&inbox));
        Ok(Self { requests: Some(requests), thread: Some(thread.map_err(Error::internal)?) })
    }

    fn join(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Tier {
    /// Starts the threads; they answer through `answer`.
    pub(super) fn start(
        store: Store,
        answer: impl Fn(TierAnswer) + Clone + Send + 'static,
    ) -> Result<Self, Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |name| {
            let (store, stop, answer) = (store.clone(), Arc::clone(&stop), answer.clone());
            Served::start(name, move |inbox| serve(&store, inbox, &stop, &answer))
        };
        Ok(Self { reader: start("tier-read")?, writer: start("tier-write")?, store, stop })
    }
}

impl TierPort for Tier {
    fn costs(&self) -> Option<Vec<u8>> {
        self.store.meta().get(COSTS_KEY).ok().flatten()
    }

    fn contains(&self, chunk: &ChunkId, layer: u32) -> bool {
        self.store.cells().contains(&cell_id(chunk, layer))
    }

    fn lease(&self, cells: &[CellId]) -> Option<Lease> {
        match self.store.leases().acquire(cells, LEASE) {
            Ok(lease) => Some(lease),
            Err(error) => {
                tracing::warn!(%error, "a restore goes on without a lease: cells that go meanwhile are recomputed");
                None
            }
        }
    }

    fn limit(&self) -> Option<u64> {
        self.store.cells().throttle().bytes_per_s
    }

    fn held_by(&self, owner: &OwnerId) -> u64 {
        self.store.cells().held_by(owner)
    }

    fn ask(&self, request: TierRequest) {
        let served = match request {
            TierRequest::Load { .. } => &self.reader,
            TierRequest::Save { .. } | TierRequest::Remember { .. } => &self.writer,
        };
        if let Some(requests) = &served.requests
            && requests.send(request).is_err()
        {
            tracing::error!("a thread of the disk tier is gone");
        }
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.reader.join();
        self.writer.join();
    }
}

fn serve(store: &Store, inbox: &Receiver<TierRequest>, stop: &AtomicBool, answer: &dyn Fn(TierAnswer)) {
    while let Ok(request) = inbox.recv() {
        match request {
            TierRequest::Save { session, owner, owner_quota, contract, codec, chunk, cells } => {
                let bytes = cells.iter().map(|(_, cell)| cell.len() as u64).sum();
                let outcome = save(store, (owner, owner_quota), contract, codec, &chunk, &cells);
                answer(TierAnswer::Saved { session, chunk, bytes, outcome });
            }
            TierRequest::Remember { costs } => {
                if let Err(error) = store.meta().put(COSTS_KEY, &costs) {
                    tracing::warn!(%error, "costs not kept");
                }
            }
            TierRequest::Load { restore, index, contract, chunk, layers, cancel } => {
                let begun = Instant::now();
                let load = |layer| {
                    if stop.load(Ordering::Relaxed) {
                        return Err("stopped".to_owned());
                    }
                    let cell = store.cells().get_cancellable(&cell_id(&chunk, layer), &contract, &cancel);
                    cell.map(Arc::new).map_err(|miss| reason(&miss).to_owned())
                };
                let cells = layers.into_iter().map(|layer| (layer, load(layer))).collect();
                let seconds = begun.elapsed().as_secs_f64();
                answer(TierAnswer::Loaded { restore, index, cells, seconds });
            }
        }
    }
}

fn save(
    store: &Store,
    (owner, owner_quota): (OwnerId, Option<u64>),
    contract: Digest,
    codec: KvCodec,
    chunk: &Chunk,
    cells: &[(u32, CellBytes)],
) -> Result<(), String> {
    let writes: Vec<CellWrite<'_>> = cells
        .iter()
        .map(|(layer, payload)| CellWrite {
            id: cell_id(&chunk.id, *layer),
            contract,
            chunk: chunk.id,
            layer: *layer,
            tokens: chunk.tokens as u32,
            codec: codec.number(),
            owner,
            owner_quota,
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
