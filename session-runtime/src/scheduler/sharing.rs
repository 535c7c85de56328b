//! Sharing prefixes: a session that begins takes the KV of the tokens it has in common with others of its tenant. By I1 it is what the session
//! would compute itself. Pages of a session on the device are shared as a fork shares them; cells on the tiers are
//! brought back by a restore, which loads or recomputes them as any other.
//!
//! Who has what is looked up in the prefix tree. It is told here of everything that changes it: what sessions have on the device,
//! and which chunks come to the tiers and leave host memory. What the disk drops it is not told: a lookup asks.

use std::sync::Arc;

use kernels::backend::Backend;

use super::host::CellBytes;
use super::worker::Worker;
use crate::kv::chunk::{CHUNK_TOKENS, Chunk, ChunkId};
use crate::kv::contract::Digest;
use crate::kv::prefix::{Best, Found, Tiers};
use crate::kv::state::{KvEvent, KvState};

/// How many more tokens the tiers must have than the device, where sharing costs nothing.
const TIER_TOKENS: usize = 2 * CHUNK_TOKENS;
/// Names of saved chunks that the prefix tree knows at most: of four million tokens, in some 30 MiB.
pub(super) const NAMES: usize = 1 << 16;

impl<B: Backend> Worker<B> {
    /// Gives a session that has computed nothing what others have of its beginning.
    pub(super) fn share_prefix(&mut self, session: &Arc<str>) {
        let Some(sequence) = self.sequences.get(session) else { return };
        if !self.options.share_prefixes || sequence.state != KvState::None || sequence.computed > 0 {
            return;
        }
        // Pages that nothing was lost of are the same whatever becomes of them once they leave the device.
        let (pages, cells) = (self.tenant_contract(&sequence.tenant), sequence.contract);
        // Logits need at least the last token's row.
        let tokens = sequence.tokens[..sequence.tokens.len().saturating_sub(1)].to_vec();
        let mut found = self.lookup(&pages, &tokens);
        #[cfg(test)]
        self.compare(&pages, &tokens, &found);
        if cells != pages {
            found = Found { device: found.device, ..self.lookup(&cells, &tokens) };
        }
        match found.best(TIER_TOKENS) {
            Best::Saved { tokens } => {
                if let Some(sequence) = self.sequences.get_mut(session) {
                    sequence.known = tokens;
                    sequence.saved_chunks = found.disk;
                    sequence.save_asked = found.disk;
                }
                self.change(session, KvEvent::Find, "shared", 0, 0.0);
            }
            Best::Device { session: source, tokens } => self.share_pages(&source, session, tokens),
            Best::Nobody => {}
        }
    }

    /// Who has KV of the beginning of a history, on the device, in host memory and on disk.
    pub(super) fn lookup(&mut self, contract: &Digest, tokens: &[u32]) -> Found {
        let kinds = &self.engine.config().layer_kinds;
        // Of layers with a window a restore needs only what is at the end.
        let full = |layer: &u32| kinds.get(*layer as usize).is_some_and(|kind| kind.window().is_none());
        let layers: Vec<u32> = (0..kinds.len() as u32).filter(full).collect();
        let (host, tier, sequences) = (&self.host, &self.tier, &self.sequences);
        let usable = |session: &str, count: usize| {
            sequences.get(session).is_some_and(|sequence| sequence.table.covers(count))
        };
        let whereabouts = |chunk: &ChunkId| {
            let on_disk = |layer: &u32| tier.contains(chunk, *layer);
            let in_host = |layer: &u32| host.has(chunk, *layer);
            let tiers = Tiers { host: layers.iter().all(in_host), disk: layers.iter().all(on_disk) };
            let together = || layers.iter().all(|layer| in_host(layer) || on_disk(layer));
            (tiers != Tiers::NEITHER || together()).then_some(tiers)
        };
        self.prefixes.lookup(contract, tokens, usable, whereabouts)
    }

    fn share_pages(&mut self, source: &str, session: &str, count: usize) {
        let Some(source) = self.sequences.get(source) else { return };
        let table = source.table.fork(&mut self.pool, count);
        let (saved, contract) = (source.saved_chunks.min(count / CHUNK_TOKENS), source.contract);
        let Some(sequence) = self.sequences.get_mut(session) else { return };
        // Pages are the same under any codec; cells that were saved under another's are not.
        let saved = if sequence.contract == contract { saved } else { 0 };
        sequence.table = table;
        (sequence.computed, sequence.known) = (count, count);
        (sequence.saved_chunks, sequence.save_asked) = (saved, saved);
    }

    /// Tells the prefix tree how many tokens a session has on the device now. Those that it had there before must be the
    /// same still, as far as it has them.
    pub(super) fn note_resident(&mut self, session: &str) {
        if !self.options.share_prefixes {
            return;
        }
        let Some(sequence) = self.sequences.get(session) else {
            self.prefixes.truncate(session, 0);
            return;
        };
        let resident = if sequence.state.is_resident() { sequence.computed } else { 0 };
        self.prefixes.truncate(session, resident);
        let held = self.prefixes.held(session);
        if let Some(more) = sequence.tokens.get(held..resident) {
            self.prefixes.extend(&sequence.id, &sequence.pages, more);
        }
    }

    /// Tells the prefix tree that a chunk of a session's history is in these tiers.
    pub(super) fn note_saved(&mut self, session: &str, chunk: &Chunk, tiers: Tiers) {
        if let Some(sequence) = self.sequences.get(session).filter(|_| self.options.share_prefixes) {
            self.prefixes.keep(&sequence.cells_contract(), &sequence.tokens, chunk, tiers);
        }
    }

    /// Keeps cells of a chunk of a session in host memory, if there is room. `on_disk`: the disk has them too.
    pub(super) fn keep_in_host(
        &mut self,
        session: &str,
        chunk: &Chunk,
        cells: Vec<(u32, CellBytes)>,
        on_disk: bool,
    ) {
        let tenant = self.tenant_of(session);
        let any = !cells.is_empty();
        let kept = self.host.insert(&tenant, chunk.id, cells, on_disk);
        for gone in self.host.take_forgotten() {
            self.prefixes.drop(&gone, Tiers::HOST);
        }
        if any {
            self.note_saved(session, chunk, Tiers { host: kept, disk: on_disk });
        }
    }
}

#[cfg(test)]
mod tests;
