//! Loads from host memory: done by the scheduler itself, a bounded number of bytes a round, so that sessions that decode
//! are not kept waiting.

use std::time::Duration;

use kernels::backend::Backend;

use super::restoring::RestoreRun;
use super::sequence::Sequence;
use super::view::HostView;
use super::worker::Worker;
use crate::engine::Engine;
use crate::error::Error;
use crate::kv::chunk::CHUNK_TOKENS;
use crate::kv::codec::KvCodec;
use crate::restore::source::Source;

/// Bytes that all restores together bring from host memory in one round: some 5 ms of copying, which is little beside a
/// step. The cells of a chunk are not divided.
pub(super) const ROUND_BYTES: usize = 16 << 20;
/// How often a byte counts that a compressor unpacks: it takes about so many times as long as one that is copied.
const UNPACKING_WEIGHT: usize = 4;

/// Cells of a chunk that host memory was asked for.
pub(super) struct HostLoad {
    chunk: usize,
    layers: Vec<u32>,
    /// When it is there, on the monotonic clock.
    ready: Duration,
}

/// Refuses a budget that is not 0 and could hold no chunk.
///
/// # Errors
/// `host_budget_too_small`.
pub(super) fn check_budget<B: Backend>(engine: &Engine<B>, budget: u64) -> Result<(), Error> {
    let least = (engine.cell_bytes(CHUNK_TOKENS) * engine.config().layers) as u64;
    if budget == 0 || budget >= least {
        return Ok(());
    }
    Err(Error::invalid(
        "host_budget_too_small",
        format!(
            "a host budget of {budget} bytes holds no chunk of this model's KV: give at least {least} bytes, or 0 for no \
             host tier"
        ),
    ))
}

impl<B: Backend> Worker<B> {
    /// Asks host memory for cells of a chunk.
    pub(super) fn ask_host(&mut self, run: &mut RestoreRun, chunk: usize, layers: Vec<u32>) {
        let bytes = self.host.cells_bytes(&run.chunks[chunk].id, &layers);
        let ready = self.host_pipe.ready(&self.options.host_control, bytes, self.clock.monotonic());
        run.from_host.push_back(HostLoad { chunk, layers, ready });
    }

    /// Brings what is ready, as far as `left` bytes of this round go. Whether more is ready.
    pub(super) fn bring_from_host(
        &mut self,
        session: &str,
        run: &mut RestoreRun,
        left: &mut usize,
    ) -> Result<bool, Error> {
        let fault = self.options.host_control.fault();
        loop {
            let begun = self.clock.monotonic();
            let Some(next) = run.from_host.iter().position(|load| load.ready <= begun) else {
                return Ok(false);
            };
            if *left == 0 {
                return Ok(true);
            }
            let Some(HostLoad { chunk, layers, .. }) = run.from_host.remove(next) else { return Ok(false) };
            let id = run.chunks[chunk].id;
            let mut bytes = 0;
            // Compute may have overtaken it.
            let lowest = run.progress.wants(chunk, Source::Host).unwrap_or(u32::MAX);
            let cells: Vec<_> = layers
                .into_iter()
                .filter(|layer| *layer >= lowest)
                .map(|layer| {
                    let cell = self.host.read(&id, layer, fault);
                    bytes += cell.as_ref().map_or(0, |cell| cell.len());
                    (layer, cell.map_err(|miss| miss.as_str().to_owned()))
                })
                .collect();
            let unpacking = self.take_cells(session, run, chunk, Source::Host, cells);
            // The device may still copy.
            self.engine.finish()?;
            // What was claimed for this is on the device now, or will be recomputed.
            run.claims[chunk] = None;
            let seconds = self.since(begun) - unpacking;
            self.costs.host.observe(bytes, seconds);
            let weight = if run.codec == KvCodec::Lossless { UNPACKING_WEIGHT } else { 1 };
            *left = left.saturating_sub(bytes * weight);
        }
    }

    /// Tokens of a session whose cells, as far as a restore needs them, are in host memory, and the bytes of all its cells
    /// there.
    pub(super) fn in_host(&self, sequence: &Sequence) -> (u64, u64) {
        if self.host.is_empty() {
            return (0, 0);
        }
        let known = sequence.known;
        let mut sums = (0, 0);
        for chunk in sequence.chunks(known) {
            let needed = |layer: &usize| chunk.start >= self.shape.first_kept(*layer, known);
            let layers = 0..self.engine.config().layers;
            if layers.filter(needed).all(|layer| self.host.has(&chunk.id, layer as u32)) {
                sums.0 += chunk.tokens as u64;
            }
            sums.1 += self.host.chunk_bytes(&chunk.id);
        }
        sums
    }

    /// What host memory holds.
    pub(super) fn host_view(&self) -> HostView {
        self.host.view()
    }
}
