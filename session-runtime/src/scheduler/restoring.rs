//! Carrying out restores: loads from the tiers and recompute on the device, side by side.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kernels::backend::{Backend, KvType};
use store::{CancelFlag, Lease};

use super::host::{CellBytes, Claim};
use super::host_loads::{HostLoad, ROUND_BYTES};
use super::packing::put_cell;
use super::sequence::Sequence;
use super::tier::TierRequest;
use super::together::chunk_seconds;
use super::worker::{Job, Phase, Purpose, Worker};
use crate::engine::{LogitRows, SequenceRows};
use crate::error::{Error, ErrorKind};
use crate::kv::chunk::{CHUNK_TOKENS, CellId, Chunk, cell_id, chunks};
use crate::kv::codec::KvCodec;
use crate::kv::contract::Digest;
use crate::kv::state::KvEvent;
use crate::kv::table::Need;
use crate::restore::cost::LoadCost;
use crate::restore::plan::{ChunkFacts, RestoreMode, plan};
use crate::restore::progress::{Action, Outlook, Progress};
use crate::restore::source::{PerSource, Source};

/// A restore under way. When it goes, so does what it asked the disk for, and what it claimed of host memory.
pub(super) struct RestoreRun {
    id: u64,
    pub chunks: Vec<Chunk>,
    /// How its cells are packed, and the digest of their contract.
    pub codec: KvCodec,
    contract: Digest,
    /// The type of its cells' elements.
    elements: KvType,
    cancels: Vec<CancelFlag>,
    /// What host memory was asked for and has not brought.
    pub from_host: VecDeque<HostLoad>,
    /// Per chunk, what keeps its cells in host memory until they are on the device.
    pub claims: Vec<Option<Claim>>,
    /// What keeps its cells on disk.
    _lease: Option<Lease>,
    pub progress: Progress,
    /// Times of the monotonic clock.
    begun: Duration,
    last_arrival: Duration,
    resident: usize,
    /// Leading sealed chunks of the history whose every cell is on disk.
    saved_chunks: usize,
}

/// Where a restore stands after a piece of work.
enum Advance {
    /// It goes on.
    Under {
        /// Whether something was computed, or waits only for its share of the next round.
        worked: bool,
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
}

impl Drop for RestoreRun {
    fn drop(&mut self) {
        for cancel in &self.cancels {
            cancel.cancel();
        }
    }
}

/// The cells that a plan has the disk bring.
fn cells_on_disk(chunks: &[Chunk], facts: &[ChunkFacts], cuts: &[u32]) -> Vec<CellId> {
    let of_chunk = |((chunk, facts), cut): ((&Chunk, &ChunkFacts), &u32)| {
        let layers = (*cut..facts.saved.len() as u32)
            .filter(|layer| facts.source(*layer as usize) == Some(Source::Disk))
            .map(|layer| cell_id(&chunk.id, layer));
        layers.collect::<Vec<_>>()
    };
    chunks.iter().zip(facts).zip(cuts).flat_map(of_chunk).collect()
}

impl<B: Backend> Worker<B> {
    /// Plans a restore for an admitted job.
    pub(super) fn begin_restore(&mut self, index: usize) -> Result<(), Error> {
        let session = Arc::clone(&self.jobs[index].session);
        let mode = self.jobs[index].mode;
        let layers = self.engine.config().layers;
        let sequence = self.sequences.get(&session).ok_or_else(|| Error::no_session(&session))?;
        let chunks = self.missing_chunks(sequence);
        let (codec, contract) = (sequence.codec, sequence.cells_contract());
        let pool_type = self.engine.pool_spec().kv_type;
        let elements = sequence.origin.map_or(pool_type, |origin| origin.elements);
        let usable = sequence.foreign.is_empty();
        let facts = self.facts(sequence, &chunks);
        let load = self.load_costs(sequence.codec);
        let others = self.others_left();
        let planned = plan(mode, &facts, layers as u32, (&self.costs.compute, &load), &others);
        let mut progress = Progress::new(&facts, &planned.cuts, layers as u32, mode);
        progress.report.predicted_ms = planned.seconds * 1e3;
        progress.report.predicted_recompute_ms = planned.recompute_seconds * 1e3;
        let absent = |chunk: &ChunkFacts| {
            chunk
                .saved
                .iter()
                .zip(&chunk.needed)
                .filter(|(saved, needed)| saved.is_none() && **needed)
                .count()
        };
        let missing: usize = facts.iter().map(absent).sum();
        let reason =
            if usable { "absent".to_owned() } else { format!("contract: {}", sequence.foreign.join(", ")) };
        progress.report.refuse(&reason, missing as u64);
        let on_disk = chunks.iter().zip(&facts).take_while(|(chunk, facts)| {
            chunk.is_settled()
                && (0..layers).all(|layer| {
                    !facts.needed[layer]
                        || facts.saved[layer] == Some(Source::Disk)
                        || (usable && self.tier.contains(&chunk.id, layer as u32))
                })
        });
        let resident = sequence.computed;
        let saved_chunks = resident / CHUNK_TOKENS + on_disk.count();
        let claims = self.claim(mode, &chunks, &facts, &planned.cuts);
        let lease = self.tier.lease(&cells_on_disk(&chunks, &facts, &planned.cuts));
        let now = self.clock.monotonic();
        self.next_restore += 1;
        let mut run = RestoreRun {
            id: self.next_restore,
            codec,
            contract,
            elements,
            cancels: chunks.iter().map(|_| CancelFlag::default()).collect(),
            saved_chunks,
            resident,
            from_host: VecDeque::new(),
            claims,
            _lease: lease,
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

    /// The known history's chunks, from the first that is not whole on the device. Whether one of the last has newest tokens in it
    /// depends on where the history ended when it was saved: that may have changed by a few tokens since.
    fn missing_chunks(&self, sequence: &Sequence) -> Vec<Chunk> {
        let mut list = sequence.chunks(sequence.known);
        if sequence.codec.lossy().is_some() {
            let plain = chunks(&sequence.cells_contract(), &sequence.tokens[..sequence.known]);
            let there = |chunk: &Chunk| self.host.has(&chunk.id, 0) || self.tier.contains(&chunk.id, 0);
            let from = sequence.settled_chunks(sequence.known).saturating_sub(1);
            for (chunk, plain) in list.iter_mut().zip(plain).skip(from).filter(|(_, plain)| plain.is_sealed())
            {
                let other = if chunk.recent { plain } else { plain.as_recent() };
                if !there(chunk) && there(&other) {
                    *chunk = other;
                }
            }
        }
        list.retain(|chunk| chunk.start + chunk.tokens > sequence.computed);
        list
    }

    /// What the tiers have of a session's chunks: the best of host and disk, cell by cell.
    fn facts(&self, sequence: &Sequence, chunks: &[Chunk]) -> Vec<ChunkFacts> {
        let layers = self.engine.config().layers;
        let usable = sequence.foreign.is_empty();
        let (load, cell) = (self.load_costs(sequence.codec), self.engine.cell_bytes(CHUNK_TOKENS));
        let throttled = self.options.host_control.throttle().bytes_per_s.is_some();
        let order = if throttled && load.host.seconds(1, cell) > load.disk.seconds(1, cell) {
            [Source::Disk, Source::Host]
        } else {
            Source::ALL
        };
        let best = |chunk: &Chunk, layer: usize| {
            let has = |source: &Source| match source {
                Source::Host => self.host.has(&chunk.id, layer as u32),
                Source::Disk => self.tier.contains(&chunk.id, layer as u32),
            };
            order.into_iter().find(has)
        };
        chunks
            .iter()
            .map(|chunk| ChunkFacts {
                start: chunk.start,
                tokens: chunk.tokens,
                cell_bytes: self.saved_cell_bytes(sequence, chunk),
                saved: (0..layers).map(|layer| if usable { best(chunk, layer) } else { None }).collect(),
                needed: (0..layers)
                    .map(|layer| chunk.start >= self.shape.first_kept(layer, sequence.known))
                    .collect(),
            })
            .collect()
    }

    /// Claims what a restore loads from host memory, and what it may come to load: a plan is corrected on the way, while a
    /// forced one, which may wait for its disk as long as that takes, keeps nothing that it does not need.
    fn claim(
        &mut self,
        mode: RestoreMode,
        chunks: &[Chunk],
        facts: &[ChunkFacts],
        cuts: &[u32],
    ) -> Vec<Option<Claim>> {
        let lowest = |cut: &u32| if mode == RestoreMode::Planned { 0 } else { *cut };
        let wanted = facts.iter().zip(cuts).map(|(facts, cut)| facts.loads(lowest(cut)).host.cells > 0);
        let chunks = chunks.iter().zip(wanted);
        chunks.map(|(chunk, wanted)| if wanted { self.host.claim(&chunk.id) } else { None }).collect()
    }

    /// What loading cells of a codec costs, with what the tiers are throttled to. Who brings them waits for a compressor.
    pub(super) fn load_costs(&self, codec: KvCodec) -> PerSource<LoadCost> {
        let host = self.costs.host.limited(self.options.host_control.throttle().bytes_per_s);
        let disk = self.costs.load.limited(self.tier.limit());
        match codec {
            KvCodec::Lossless => {
                PerSource { host: host.then(&self.costs.unpacking), disk: disk.then(&self.costs.unpacking) }
            }
            KvCodec::Raw | KvCodec::Int8 | KvCodec::Int4 => PerSource { host, disk },
        }
    }

    /// Ends restores on command that nobody waits for any more.
    fn end_unwanted(&mut self) {
        let unwanted = |job: &Job| match &job.purpose {
            Purpose::Restore { reply: Some(reply) } => reply.is_closed(),
            _ => false,
        };
        while let Some(index) = self.jobs.iter().position(unwanted) {
            self.trace.unwanted(&self.jobs[index].session);
            let nobody = Error::new(ErrorKind::Conflict, "cancelled", "nobody waits for the restore");
            self.fail_job(index, nobody);
        }
    }

    /// Advances every restore; whether anything was done.
    pub(super) fn restore_some(&mut self) -> bool {
        self.end_unwanted();
        let mut worked = false;
        let mut host_bytes = ROUND_BYTES;
        let decoding = self.somebody_decodes();
        let mut computed_any = false;
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
            let rows_max = self.engine.step_rows();
            let chunks_max = match (decoding, computed_any) {
                (false, _) => (rows_max / CHUNK_TOKENS).max(1),
                (true, false) => (rows_max.min(self.bounded_rows(&session)) / CHUNK_TOKENS).max(1),
                // Between two tokens of others there is one piece of one restore; the rest of the round is loads.
                (true, true) => 0,
            };
            match self.advance(&session, &mut run, &mut host_bytes, chunks_max) {
                Ok(Advance::Under { worked: more, computed }) => {
                    worked |= more;
                    computed_any |= computed;
                    self.jobs[index].phase = Phase::Restoring(run);
                    index += 1;
                    // A piece takes as long as a step, and many restores may compute one each.
                    if computed {
                        self.tick(self.clock.monotonic());
                    }
                }
                Ok(Advance::Done) => {
                    if !self.end_restore(index, &session, *run) {
                        index += 1;
                    }
                }
                Ok(Advance::NoRoom) => {
                    drop(run);
                    self.abandon_restore(&session);
                    // It waits again for all its pages, and then takes the way that was left to it.
                    self.jobs[index].mode = RestoreMode::Recompute;
                    index += 1;
                }
                Err(error) => {
                    drop(run);
                    self.abandon_restore(&session);
                    self.fail_job(index, error);
                }
            }
        }
        worked
    }

    /// Asks for loads, or computes one piece of at most `chunks_max` chunks.
    fn advance(
        &mut self,
        session: &Arc<str>,
        run: &mut RestoreRun,
        host_bytes: &mut usize,
        chunks_max: usize,
    ) -> Result<Advance, Error> {
        let layers = self.engine.config().layers;
        let others = self.others_left();
        loop {
            if self.bring_from_host(session, run, host_bytes)? {
                return Ok(Advance::Under { worked: true, computed: false });
            }
            let (compute, load) = (&self.costs.compute, self.load_costs(run.codec));
            let outlook = Outlook {
                compute_chunk: &|index| chunk_seconds(compute, &run.chunks[index], layers),
                load: &|left| load.seconds(left),
                stalled: self.since(run.last_arrival.max(self.last_arrival)),
                others,
            };
            match run.progress.next(chunks_max, &outlook) {
                Action::Load { chunk, source: Source::Host, layers } => self.ask_host(run, chunk, layers),
                Action::Load { chunk, source: Source::Disk, layers } => self.tier.ask(TierRequest::Load {
                    restore: run.id,
                    index: chunk,
                    contract: run.contract,
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
                    return Ok(Advance::Under { worked: true, computed: true });
                }
                Action::Wait => return Ok(Advance::Under { worked: false, computed: false }),
                Action::Done => {
                    // What came last may still be on its way into pages.
                    self.engine.finish()?;
                    return Ok(Advance::Done);
                }
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
        // Cells that are still on their way are no time of this piece's.
        self.engine.finish()?;
        let begun = self.clock.monotonic();
        let piece = SequenceRows {
            tokens: &sequence.tokens[start..start + rows],
            start,
            tables: &sequence.table,
            logits: LogitRows::None,
        };
        self.engine.forward(&[piece], layers, &mut self.logits)?;
        self.engine.finish()?;
        let seconds = self.since(begun);
        self.costs.compute.observe(rows, layers, start as f64 + rows as f64 / 2.0, seconds);
        self.tokens_computed += rows as u64;
        Ok(seconds)
    }

    /// Takes a chunk's cells from the disk. They stay in host memory too, where there is room.
    pub(super) fn loaded(
        &mut self,
        restore: u64,
        index: usize,
        cells: Vec<(u32, Result<CellBytes, String>)>,
        seconds: f64,
    ) {
        let is_it = |job: &Job| matches!(&job.phase, Phase::Restoring(run) if run.id == restore);
        let Some(job) = self.jobs.iter().position(is_it) else { return };
        let session = Arc::clone(&self.jobs[job].session);
        let phase = std::mem::replace(&mut self.jobs[job].phase, Phase::Waiting);
        let Phase::Restoring(mut run) = phase else { return };
        let brought: Vec<(u32, CellBytes)> = cells
            .iter()
            .filter_map(|(layer, cell)| Some((*layer, Arc::clone(cell.as_ref().ok()?))))
            .collect();
        let bytes = brought.iter().map(|(_, cell)| cell.len()).sum();
        self.costs.load.observe(bytes, seconds);
        self.keep_in_host(&session, &run.chunks[index], brought, true);
        self.take_cells(&session, &mut run, index, Source::Disk, cells);
        self.jobs[job].phase = Phase::Restoring(run);
    }

    /// Takes a chunk's cells from a tier: those that are still wanted go to the device. Returns the seconds that a compressor
    /// took for them.
    pub(super) fn take_cells(
        &mut self,
        session: &str,
        run: &mut RestoreRun,
        index: usize,
        source: Source,
        cells: Vec<(u32, Result<CellBytes, String>)>,
    ) -> f64 {
        run.last_arrival = self.clock.monotonic();
        self.last_arrival = run.last_arrival;
        // The newest tokens are never packed with a loss.
        let codec = run.codec.of_chunk(&run.chunks[index]);
        let (mut refused, mut bytes) = (Vec::new(), 0);
        if let Some(lowest) = run.progress.wants(index, source)
            && let Some(sequence) = self.sequences.get(session)
        {
            let chunk = &run.chunks[index];
            for (layer, cell) in cells.into_iter().filter(|(layer, _)| *layer >= lowest) {
                let pages = sequence.chunk_pages(chunk, layer as usize);
                let shape = self.cell_shape(layer as usize, chunk);
                let outcome = cell.and_then(|cell| {
                    let pages = pages.ok_or("no pages")?;
                    let put = put_cell(&mut self.engine, (codec, run.elements), &shape, &pages, &cell);
                    put.map(|()| cell.len()).map_err(|error| error.to_string())
                });
                match outcome {
                    Ok(length) => bytes += length,
                    Err(reason) => refused.push((layer, reason)),
                }
            }
        }
        run.progress.loaded(index, source, bytes as u64, &refused);
        if codec != KvCodec::Lossless {
            return 0.0;
        }
        let seconds = self.since(run.last_arrival);
        self.costs.unpacking.observe(bytes, seconds);
        seconds
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
            // Cells that were found elsewhere are not saved as its own.
            let saved_chunks = if sequence.origin.take().is_some() { 0 } else { run.saved_chunks };
            sequence.saved_chunks = saved_chunks;
            sequence.save_asked = saved_chunks;
            sequence.foreign.clear();
            sequence.last_restore = Some(report.clone());
            sequence.last_used_ms = self.clock.monotonic_ms();
        }
        let reason = self.jobs[index].purpose.as_str();
        self.change(session, KvEvent::Arrive, reason, report.bytes_loaded, ms);
        self.observer.restored(session, &report);
        self.make_cuts(session);
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
