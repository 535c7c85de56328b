//! Saving: settled chunks of idle sessions go to the tier in the background, so that an eviction finds
//! little left to write and a killed process finds its KV on disk.

use std::collections::VecDeque;
use std::sync::Arc;

use kernels::backend::Backend;

use super::tier::TierRequest;
use super::worker::Worker;
use crate::error::Error;
use crate::kv::chunk::{CHUNK_TOKENS, Chunk};
use crate::kv::codec::KvCodec;
use crate::kv::prefix::Tiers;

/// Bytes of cells that background saving may have under way.
const SAVING_BYTES: u64 = 64 << 20;

/// What is to be saved and what is under way.
#[derive(Default)]
pub(super) struct Saver {
    sessions: VecDeque<Arc<str>>,
    in_flight: usize,
    bytes: u64,
}

impl Saver {
    /// Saves a session's settled chunks when there is time.
    pub(super) fn enqueue(&mut self, session: &Arc<str>) {
        if !self.sessions.contains(session) {
            self.sessions.push_back(Arc::clone(session));
        }
    }

    /// Whether nothing is waiting and nothing under way.
    pub(super) fn is_idle(&self) -> bool {
        self.sessions.is_empty() && self.in_flight == 0
    }

    /// Chunks under way.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl<B: Backend> Worker<B> {
    /// Hands one chunk of the first waiting session to the tier; whether there was one.
    pub(super) fn save_some(&mut self) -> bool {
        while self.saver.bytes < SAVING_BYTES
            && let Some(session) = self.saver.sessions.front().cloned()
        {
            let Some(chunk) = self.next_unsaved(&session) else {
                self.saver.sessions.pop_front();
                continue;
            };
            if let Err(error) = self.save_chunk(&session, chunk) {
                self.notice_loss(&error);
                tracing::warn!(%session, %error, "chunk not saved");
                self.saver.sessions.pop_front();
            }
            return true;
        }
        false
    }

    /// The first settled chunk on the device that the tier was not asked to save.
    fn next_unsaved(&self, session: &str) -> Option<Chunk> {
        let sequence = self.sequences.get(session)?;
        if sequence.save_asked >= sequence.settled_chunks(sequence.computed) {
            return None;
        }
        sequence.chunks(sequence.computed).into_iter().nth(sequence.save_asked)
    }

    /// Copies a chunk's cells off the device, into host memory where there is room, and asks the disk to save them; their
    /// bytes. Layers with a window that dropped the chunk have nothing to save: no restore asks for it.
    pub(super) fn save_chunk(&mut self, session: &Arc<str>, chunk: Chunk) -> Result<u64, Error> {
        let Some(sequence) = self.sequences.get(session) else { return Ok(0) };
        let codec = sequence.codec.of_chunk(&chunk);
        let (contract, tenant) = (sequence.contract, sequence.tenant.clone());
        let cells = (0..self.engine.config().layers)
            .filter_map(|layer| Some((layer, sequence.chunk_pages(&chunk, layer)?)))
            .map(|(layer, pages)| Ok((layer as u32, Arc::new(self.take_cell(codec, &chunk, layer, &pages)?))))
            .collect::<Result<Vec<_>, Error>>()?;
        let Some(sequence) = self.sequences.get_mut(session) else { return Ok(0) };
        let bytes: u64 = cells.iter().map(|(_, cell)| cell.len() as u64).sum();
        if codec == KvCodec::Lossless {
            self.costs.observe_packed(self.engine.cell_bytes(chunk.tokens) * cells.len(), bytes as usize);
        }
        if chunk.is_settled() {
            sequence.save_asked = chunk.start / CHUNK_TOKENS + 1;
        }
        // The disk may yet refuse them.
        self.keep_in_host(session, &chunk, cells.clone(), false);
        self.note_saved(session, &chunk, Tiers::DISK);
        self.saver.in_flight += 1;
        self.saver.bytes += bytes;
        let (owner, owner_quota) = (tenant.owner(), self.options.tenants.of(&tenant).disk_bytes);
        let session = Arc::clone(session);
        self.tier.ask(TierRequest::Save { session, owner, owner_quota, contract, codec, chunk, cells });
        Ok(bytes)
    }

    /// Told that a chunk was saved, or why not.
    pub(super) fn saved(&mut self, session: &str, chunk: &Chunk, bytes: u64, outcome: Result<(), String>) {
        self.saver.in_flight -= 1;
        self.saver.bytes -= bytes;
        match outcome {
            Ok(()) => {
                self.host.set_on_disk(&chunk.id, true);
                if let Some(sequence) = self.sequences.get_mut(session) {
                    let settled = sequence.saved_chunks * CHUNK_TOKENS;
                    if !chunk.is_settled() {
                        if chunk.start == settled.max(sequence.saved_end) {
                            sequence.saved_end = chunk.start + chunk.tokens;
                        }
                    } else if chunk.start == settled && sequence.save_asked > sequence.saved_chunks {
                        sequence.saved_chunks += 1;
                    }
                }
            }
            Err(reason) => {
                tracing::warn!(
                    session,
                    reason,
                    "chunk not on disk: it is in host memory, as far as there is room, or will be recomputed"
                );
                self.prefixes.drop(&chunk.id, Tiers::DISK);
                // It is tried again when the session next rests or leaves the device, not at once: the disk may be full.
                self.saver.sessions.retain(|waiting| &**waiting != session);
                if let Some(sequence) = self.sequences.get_mut(session) {
                    sequence.save_asked = sequence.save_asked.min(chunk.start / CHUNK_TOKENS);
                }
            }
        }
        self.answer_evictions();
    }
}
