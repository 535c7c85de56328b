//! The scheduler's surroundings as a trace has them: times, and what the disk tier said. An answer that is asked for and
//! is not there, or is there and is not asked for, says that the replay went another way.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use store::{CellId, Clock, Lease, OwnerId};

use crate::kv::chunk::{Chunk, ChunkId};
use crate::scheduler::port::TierPort;
use crate::scheduler::tier::{TierAnswer, TierRequest};
use crate::scheduler::trace::Told;

/// Most bytes of a cell, as on disk: a trace that names more is none of ours.
const CELL_MOST: u64 = 64 << 20;

/// A save that the disk has not answered for.
struct Save {
    session: Arc<str>,
    chunk: Chunk,
    bytes: u64,
}

/// A load that the disk has not answered for.
struct Load {
    restore: u64,
    index: usize,
    layers: Vec<u32>,
}

struct State {
    now: Duration,
    /// Before the first record time stands still, as it did when the trace was written.
    begun: bool,
    times: VecDeque<u64>,
    has: VecDeque<bool>,
    limit: Option<u64>,
    saves: VecDeque<Save>,
    loads: VecDeque<Load>,
    /// What the scheduler asked for and the trace has not.
    missing: Option<&'static str>,
}

/// What a trace says of the surroundings. Cloning shares it.
#[derive(Clone)]
pub(super) struct Feed(Arc<Mutex<State>>);

impl Feed {
    /// Before the first record of a trace that began at a time.
    pub(super) fn new(began: Duration) -> Self {
        Self(Arc::new(Mutex::new(State {
            now: began,
            begun: false,
            times: VecDeque::new(),
            has: VecDeque::new(),
            limit: None,
            saves: VecDeque::new(),
            loads: VecDeque::new(),
            missing: None,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A record at a time, and what the scheduler is told in it.
    pub(super) fn begin(&self, at: Duration, told: &Told) {
        let mut state = self.state();
        (state.now, state.begun) = (at, true);
        state.times = told.times_ns.iter().copied().collect();
        let bit = |index: u32| told.has.get(index as usize / 8).map(|byte| byte >> (index % 8) & 1 == 1);
        state.has = (0..told.asked).map_while(bit).collect();
        if let Some(limit) = told.disk_limit {
            state.limit = limit;
        }
    }

    /// What did not fit since the record began.
    pub(super) fn amiss(&self) -> Option<&'static str> {
        let mut state = self.state();
        let left = match (state.times.is_empty(), state.has.is_empty()) {
            (true, true) => None,
            (false, _) => Some("the trace has more times than the scheduler reads"),
            (true, false) => Some("the trace has more answers of the disk than the scheduler asks for"),
        };
        state.missing.take().or(left)
    }

    /// The time.
    pub(super) fn now(&self) -> Duration {
        self.state().now
    }

    /// What the disk is throttled to.
    pub(super) fn disk_limit(&self) -> Option<u64> {
        self.state().limit
    }

    /// The disk answers for the oldest save.
    pub(super) fn saved(&self, refused: Option<String>) -> Option<TierAnswer> {
        let Save { session, chunk, bytes } = self.state().saves.pop_front()?;
        Some(TierAnswer::Saved { session, chunk, bytes, outcome: refused.map_or(Ok(()), Err) })
    }

    /// The disk answers for the oldest load.
    pub(super) fn loaded(
        &self,
        given: &[(u32, u64)],
        refused: &[(u32, String)],
        seconds: f64,
    ) -> Option<TierAnswer> {
        let Load { restore, index, layers } = self.state().loads.pop_front()?;
        let mut given = given.iter().flat_map(|(count, bytes)| (0..*count).map(|_| *bytes));
        let mut cell = |layer: u32| match refused.iter().find(|(other, _)| *other == layer) {
            Some((_, reason)) => Some(Err(reason.clone())),
            None => Some(Ok(Arc::new(vec![0; usize::try_from(given.next()?.min(CELL_MOST)).ok()?]))),
        };
        let cells = layers.into_iter().map(|layer| Some((layer, cell(layer)?))).collect::<Option<_>>()?;
        Some(TierAnswer::Loaded { restore, index, cells, seconds })
    }
}

impl Clock for Feed {
    fn now_ms(&self) -> u64 {
        self.monotonic_ms()
    }

    fn monotonic(&self) -> Duration {
        let mut state = self.state();
        if state.begun {
            match state.times.pop_front() {
                Some(since) => state.now = state.now.saturating_add(Duration::from_nanos(since)),
                None => state.missing = Some("the scheduler reads a time that the trace has not"),
            }
        }
        state.now
    }
}

impl TierPort for Feed {
    fn costs(&self) -> Option<Vec<u8>> {
        None
    }

    fn contains(&self, _: &ChunkId, _: u32) -> bool {
        let mut state = self.state();
        let has = state.has.pop_front();
        if has.is_none() {
            state.missing = Some("the scheduler asks the disk for a cell where the trace does not");
        }
        has.unwrap_or(false)
    }

    fn lease(&self, _: &[CellId]) -> Option<Lease> {
        // What was dropped meanwhile is in the disk's answers.
        None
    }

    fn limit(&self) -> Option<u64> {
        self.state().limit
    }

    fn held_by(&self, _: &OwnerId) -> u64 {
        // Only told, never decided by.
        0
    }

    fn ask(&self, request: TierRequest) {
        let mut state = self.state();
        match request {
            TierRequest::Save { session, chunk, cells, .. } => {
                let bytes = cells.iter().map(|(_, cell)| cell.len() as u64).sum();
                state.saves.push_back(Save { session, chunk, bytes });
            }
            TierRequest::Remember { .. } => {}
            TierRequest::Load { restore, index, layers, .. } => {
                state.loads.push_back(Load { restore, index, layers });
            }
        }
    }
}
