//! The scheduler's surroundings as a trace listens to them: clock, disk tier, and who is told of KV.

use std::sync::Arc;
use std::time::Duration;

use store::{CellId, Clock, Lease, OwnerId};

use super::record::{Effect, Loads, Restored};
use super::recorder::Recorder;
use crate::kv::chunk::ChunkId;
use crate::restore::report::{RestoreReport, TierLoads};
use crate::scheduler::port::TierPort;
use crate::scheduler::tier::TierRequest;
use crate::scheduler::{KvObserver, KvTransition, Relocation};

/// A clock whose monotonic times are recorded.
pub(super) struct RecordedClock {
    pub clock: Arc<dyn Clock>,
    pub recorder: Recorder,
}

impl Clock for RecordedClock {
    fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    fn monotonic(&self) -> Duration {
        let now = self.clock.monotonic();
        self.recorder.recording().map_or(now, |mut recording| recording.time(now))
    }
}

/// A tier whose answers are recorded.
pub(super) struct RecordedTier {
    pub tier: Box<dyn TierPort>,
    pub recorder: Recorder,
}

impl TierPort for RecordedTier {
    fn costs(&self) -> Option<Vec<u8>> {
        self.tier.costs()
    }

    fn contains(&self, chunk: &ChunkId, layer: u32) -> bool {
        let has = self.tier.contains(chunk, layer);
        if let Some(mut recording) = self.recorder.recording() {
            recording.has(has);
        }
        has
    }

    fn lease(&self, cells: &[CellId]) -> Option<Lease> {
        self.tier.lease(cells)
    }

    fn limit(&self) -> Option<u64> {
        let limit = self.tier.limit();
        self.recorder.recording().map_or(limit, |mut recording| recording.limit(limit))
    }

    fn held_by(&self, owner: &OwnerId) -> u64 {
        self.tier.held_by(owner)
    }

    fn ask(&self, request: TierRequest) {
        self.tier.ask(request);
    }
}

/// An observer whose news are recorded.
pub(super) struct RecordedObserver {
    pub observer: Box<dyn KvObserver>,
    pub recorder: Recorder,
}

impl KvObserver for RecordedObserver {
    fn transition(&self, session: &str, transition: &KvTransition) {
        if let Some(mut recording) = self.recorder.recording()
            && let Some(session) = recording.number(session)
        {
            recording.effect(Effect::Moved {
                session,
                from: transition.from.as_str().to_owned(),
                to: transition.to.as_str().to_owned(),
                reason: transition.reason.clone(),
                tokens: transition.tokens,
                bytes: transition.bytes,
            });
        }
        self.observer.transition(session, transition);
    }

    fn restored(&self, session: &str, report: &RestoreReport) {
        if let Some(mut recording) = self.recorder.recording()
            && let Some(session) = recording.number(session)
        {
            recording.effect(Effect::Restored { session, restored: Restored::of(report) });
        }
        self.observer.restored(session, report);
    }

    fn relocated(&self, session: &str, relocation: &Relocation) {
        if let Some(mut recording) = self.recorder.recording()
            && let Some(session) = recording.number(session)
        {
            let Relocation { start, cut, tokens, .. } = *relocation;
            recording.effect(Effect::Relocated { session, start, cut, tokens });
        }
        self.observer.relocated(session, relocation);
    }
}

impl Restored {
    /// As a trace has it.
    pub(in crate::scheduler) fn of(report: &RestoreReport) -> Self {
        let loads = |tier: TierLoads| Loads { tokens: tier.tokens, cells: tier.cells, bytes: tier.bytes };
        Self {
            resident: report.tokens_resident,
            mixed: report.tokens_mixed,
            recomputed: report.tokens_recomputed,
            host: loads(report.from_host),
            disk: loads(report.from_disk),
            cells_recomputed: report.cells_recomputed,
            // Reports have whole microseconds.
            us: (report.ms * 1e3).round() as u64,
        }
    }
}
