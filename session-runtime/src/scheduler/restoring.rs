//! Carrying out restores: loads from the tier and recompute on the device, side by side.

use std::sync::Arc;
use std::time::Duration;

use kernels::backend::Backend;
use store::CancelFlag;

use super::tier::TierRequest;
use super::worker::{Job, Phase, Purpose, Worker};
use crate::engine::{LogitRows, SequenceRows};
use crate::error::Error;
use crate::kv::chunk::{CHUNK_TOKENS, Chunk};
use crate::kv::state::KvEvent;
use crate::kv::table::Need;
use crate::restore::plan::{ChunkFacts, RestoreMode, plan};
use crate::restore::progress::{Action, Outlook, Progress};

/// A restore under way.
pub(super) struct RestoreRun {
    id: u64,
    chunks: Vec<Chunk>,
    cancels: Vec<CancelFlag>,
    progress: Progress,
    /// Times of the monotonic clock.
    begun: Duration,
    last_arrival: Duration,
    resident: usize,
    /// Leading sealed chunks of the history whose every cell is saved.
    saved_chunks: usize,
}

/// Where a restore stands after a piece of work.
enum Advance {
    /// It goes on.
    Under {
        /// Whether something was computed.
        computed: bool,
    },
    /// Everything is on the device.
    Done,
    /// It must begin anew at the first chunk and the pages for that are taken.
    NoRoom,
}

impl RestoreRun {
    /// Somebody waits for it now.
    pub(super) fn hurry(&mut self, mode: RestoreMode) {
        self.progress.hurry(mode);
    }

    /// Tells the tier that nothing more is wanted.
    pub(super) fn cancel(&self) {
        for cancel in &self.cancels {
            cancel.cancel();
        }
    }
}

impl<B: Backend> Worker<B> {
    /// Plans a restore for an admitted job.
    pub(super) fn begin_restore(&mut self, index: usize) -> Result<(), Error> {
        let session = Arc::clone(&self.jobs[index].session);
        let mode = self.jobs[index].mode;
        let layers = self.engine.config().layers;
        let sequence = self.sequences.get(&session).ok_or_else(|| Error::no_session(&session))?;
        let chunks = sequence.missing_chunks(&self.contract_digest);
        let usable = sequence.foreign.is_empty();
        let facts: Vec<ChunkFacts> = chunks
            .iter()
            .map(|chunk| ChunkFacts {
                start: chunk.start,
                tokens: chunk.tokens,
                saved: (0..layers)
                    .map(|layer| usable && self.tier.contains(&chunk.id, layer as u32))
                    .collect(),
                needed: (0..layers)
                    .map(|layer| chunk.start >= self.shape.first_kept(layer, sequence.known))
                    .collect(),
            })
            .collect();
        let token_bytes = self.engine.cell_bytes(1);
        let load = self.costs.load.limited(self.tier.limit());
        let planned = plan(mode, &facts, layers as u32, token_bytes, &self.costs.compute, &load);
        let mut progress = Progress::new(&facts, &planned.cuts, layers as u32, token_bytes, mode);
        progress.report.predicted_ms = planned.seconds * 1e3;
        progress.report.predicted_recompute_ms = planned.recompute_seconds * 1e3;
        let absent = |chunk: &ChunkFacts| {
            chunk.saved.iter().zip(&chunk.needed).filter(|(saved, needed)| !**saved && **needed).count()
        };
        let missing: usize = facts.iter().map(absent).sum();
        let reason =
            if usable { "absent".to_owned() } else { format!("contract: {}", sequence.foreign.join(", ")) };
        progress.report.refuse(&reason, missing as u64);
        let whole = facts.iter().take_while(|chunk| chunk.tokens == CHUNK_TOKENS && chunk.is_saved());
        let now = self.clock.monotonic();
        self.next_restore += 1;
        let mut run = RestoreRun {
            id: self.next_restore,
            cancels: chunks.iter().map(|_| CancelFlag::default()).collect(),
            saved_chunks: sequence.computed / CHUNK_TOKENS + whole.count(),
            resident: sequence.computed,
            chunks,
            progress,
            begun: now,
            last_arrival: now,
        };
        let reason = self.jobs[index].purpose.as_str();
        self.change(&session, KvEvent::Restore, reason, 0, 0.0);
        if matches!(self.jobs[index].purpose, Purpose::Prefetch) {
            run.progress.be_patient();
        }
        self.jobs[index].phase = Phase::Restoring(Box::new(run));
        Ok(())
    }

    /// Advances every restore; whether anything was computed.
    pub(super) fn restore_some(&mut self) -> bool {
        let mut worked = false;
        let mut index = 0;
        let restores = |job: &Job| matches!(job.phase, Phase::Restoring(_));
        let awaited = self.jobs.iter().any(|job| restores(job) && !matches!(job.purpose, Purpose::Prefetch));
        while index < self.jobs.len() {
            // The tier is left to those that somebody waits for.
            let yields = awaited && matches!(self.jobs[index].purpose, Purpose::Prefetch);
            if yields || !restores(&self.jobs[index]) {
                index += 1;
                continue;
            }
            let session = Arc::clone(&self.jobs[index].session);
            // The phase is put back below unless the restore ends here.
            let Phase::Restoring(mut run) = std::mem::replace(&mut self.jobs[index].phase, Phase::Waiting)
            else {
                continue;
            };
            match self.advance(&session, &mut run) {
                Ok(Advance::Under { computed }) => {
                    worked |= computed;
                    self.jobs[index].phase = Phase::Restoring(run);
                    index += 1;
                }
                Ok(Advance::Done) => {
                    if !self.end_restore(index, &session, *run) {
                        index += 1;
                    }
                }
                Ok(Advance::NoRoom) => {
                    run.cancel();
                    self.abandon_restore(&session);
                    // It waits again for all its pages, and then takes the way that was left to it.
                    self.jobs[index].mode = RestoreMode::Recompute;
                    index += 1;
                }
                Err(error) => {
                    run.cancel();
                    self.abandon_restore(&session);
                    self.fail_job(index, error);
                }
            }
        }
        worked
    }

    /// Asks for loads, or computes one piece.
    fn advance(&mut self, session: &Arc<str>, run: &mut RestoreRun) -> Result<Advance, Error> {
        let layers = self.engine.config().layers;
        let chunks_max = (self.engine.step_rows() / CHUNK_TOKENS).max(1);
        loop {
            let (compute, load) = (&self.costs.compute, self.costs.load.limited(self.tier.limit()));
            let outlook = Outlook {
                compute_chunk: &|index| {
                    let chunk = &run.chunks[index];
                    compute.seconds(chunk.tokens, layers, chunk.start as f64 + chunk.tokens as f64 / 2.0)
                },
                load: &|cells, bytes| load.seconds(cells, bytes),
                stalled: self.since(run.last_arrival),
            };
            match run.progress.next(chunks_max, &outlook) {
                Action::Load { chunk, layers } => self.tier.ask(TierRequest::Load {
                    restore: run.id,
                    index: chunk,
                    chunk: run.chunks[chunk].id,
                    layers,
                    cancel: run.cancels[chunk].clone(),
                }),
                Action::Compute { chunk, chunks, layers: cut } => {
                    if cut as usize == layers {
                        run.cancels[chunk..chunk + chunks].iter().for_each(CancelFlag::cancel);
                    }
                    let pieces = &run.chunks[chunk..chunk + chunks];
                    if !self.move_scratch(session, pieces[0].start)? {
                        return Ok(Advance::NoRoom);
                    }
                    let seconds = self.recompute(session, pieces, cut as usize)?;
                    run.progress.computed(chunk, chunks, seconds);
                    return Ok(Advance::Under { computed: true });
                }
                Action::Wait => return Ok(Advance::Under { computed: false }),
                Action::Done => return Ok(Advance::Done),
            }
        }
    }

    /// Moves the pages of window layers that a restore recomputes in to where it goes on from `start`. Going on
    /// takes no more pages than the restore began with; beginning anew may. `false`: there is no room.
    fn move_scratch(&mut self, session: &Arc<str>, start: usize) -> Result<bool, Error> {
        if !self.shape.has_windows() {
            return Ok(true);
        }
        let Some(sequence) = self.sequences.get_mut(session) else { return Err(Error::no_session(session)) };
        let known = sequence.known;
        sequence.table.trim_restore(&mut self.pool, start, known);
        self.reserve(session, Need::Recompute { start, known })
    }

    /// Runs the lowest `layers` layers over consecutive chunks; seconds taken.
    fn recompute(&mut self, session: &Arc<str>, chunks: &[Chunk], layers: usize) -> Result<f64, Error> {
        let sequence = self.sequences.get(session).ok_or_else(|| Error::no_session(session))?;
        let start = chunks[0].start;
        let rows: usize = chunks.iter().map(|chunk| chunk.tokens).sum();
        let begun = self.clock.monotonic();
        let piece = SequenceRows {
            tokens: &sequence.tokens[start..start + rows],
            start,
            tables: &sequence.table,
            logits: LogitRows::None,
        };
        self.engine.forward(&[piece], layers, &mut self.logits)?;
        let seconds = self.since(begun);
        self.costs.compute.observe(rows, layers, start as f64 + rows as f64 / 2.0, seconds);
        self.tokens_computed += rows as u64;
        Ok(seconds)
    }

    /// Takes a chunk's cells from the tier.
    pub(super) fn loaded(
        &mut self,
        restore: u64,
        index: usize,
        cells: Vec<(u32, Result<Vec<u8>, String>)>,
        seconds: f64,
    ) {
        let now = self.clock.monotonic();
        let job = self.jobs.iter_mut().find_map(|job| match &mut job.phase {
            Phase::Restoring(run) if run.id == restore => Some((Arc::clone(&job.session), run)),
            _ => None,
        });
        let Some((session, run)) = job else { return };
        let bytes: usize = cells.iter().filter_map(|(_, cell)| cell.as_ref().ok()).map(Vec::len).sum();
        self.costs.load.observe(bytes, seconds);
        run.last_arrival = now;
        let mut refused = Vec::new();
        if run.progress.wants(index)
            && let Some(sequence) = self.sequences.get(&session)
        {
            let chunk = &run.chunks[index];
            for (layer, cell) in cells {
                let pages = sequence.chunk_pages(chunk, layer as usize);
                let outcome = cell.and_then(|cell| {
                    let pages = pages.ok_or("no pages")?;
                    self.engine.scatter_cell(&pages, chunk.tokens, &cell).map_err(|error| error.to_string())
                });
                if let Err(reason) = outcome {
                    refused.push((layer, reason));
                }
            }
        }
        run.progress.loaded(index, &refused);
    }

    /// Everything is on the device. Returns whether the job is over.
    fn end_restore(&mut self, index: usize, session: &Arc<str>, mut run: RestoreRun) -> bool {
        let ms = self.since(run.begun) * 1e3;
        let mut report = run.progress.finish(run.resident);
        report.ms = ms;
        report.round_times();
        if let Some(sequence) = self.sequences.get_mut(session) {
            sequence.computed = sequence.known;
            sequence.table.trim(&mut self.pool, sequence.known);
            sequence.saved_chunks = run.saved_chunks;
            sequence.save_asked = run.saved_chunks;
            sequence.foreign.clear();
            sequence.last_restore = Some(report.clone());
            sequence.last_used_ms = self.clock.monotonic_ms();
        }
        let reason = self.jobs[index].purpose.as_str();
        self.change(session, KvEvent::Arrive, reason, report.bytes_loaded, ms);
        self.observer.restored(session, &report);
        self.jobs[index].computed_tokens += report.tokens_recomputed + report.tokens_mixed;
        match &mut self.jobs[index].purpose {
            Purpose::Message { .. } => {}
            Purpose::Restore { reply } => {
                if let Some(reply) = reply.take() {
                    let _ = reply.send(Ok(report));
                }
                self.jobs.remove(index);
                return true;
            }
            Purpose::Prefetch => {
                self.jobs.remove(index);
                return true;
            }
        }
        self.begin_running(index);
        false
    }

    /// Drops what a given-up restore brought.
    pub(super) fn abandon_restore(&mut self, session: &str) {
        if let Some(sequence) = self.sequences.get_mut(session) {
            sequence.table.truncate(&mut self.pool, 0);
            sequence.computed = 0;
            self.change(session, KvEvent::Abandon, "cancelled", 0, 0.0);
        }
    }
}
