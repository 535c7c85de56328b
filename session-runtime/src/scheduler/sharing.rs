//! Sharing prefixes: a session that begins takes the KV of the tokens it has in common with others of its tenant. By I1 it is what the session
//! would compute itself. Pages of a session on the device are shared as a fork shares them; cells on the tiers are
//! brought back by a restore, which loads or recomputes them as any other.
//!
//! Every session on the device is compared token by token. Most differ within the first few, so that this takes less
//! than keeping a tree of all histories would.

use std::sync::Arc;

use kernels::backend::{Backend, PAGE_TOKENS};

use super::worker::Worker;
use crate::kv::chunk::CHUNK_TOKENS;
use crate::kv::state::{KvEvent, KvState};

/// How many more tokens the tiers must have than the device, where sharing costs nothing.
const TIER_TOKENS: usize = 2 * CHUNK_TOKENS;

impl<B: Backend> Worker<B> {
    /// Gives a session that has computed nothing what others have of its beginning.
    pub(super) fn share_prefix(&mut self, session: &Arc<str>) {
        let Some(sequence) = self.sequences.get(session) else { return };
        if !self.options.share_prefixes || sequence.state != KvState::None || sequence.computed > 0 {
            return;
        }
        // Logits need at least the last token's row.
        let tokens = &sequence.tokens[..sequence.tokens.len().saturating_sub(1)];
        let resident = self.longest_resident(session, tokens);
        let on_device = resident.as_ref().map_or(0, |(_, count)| *count);
        let held = self.chunks_held(&sequence.contract, tokens);
        let on_tier = held.anywhere * CHUNK_TOKENS;
        if on_tier > on_device + TIER_TOKENS {
            if let Some(sequence) = self.sequences.get_mut(session) {
                sequence.known = on_tier;
                sequence.saved_chunks = held.on_disk;
                sequence.save_asked = sequence.saved_chunks;
            }
            self.change(session, KvEvent::Find, "shared", 0, 0.0);
        } else if let Some((source, count)) = resident {
            self.share_pages(&source, session, count);
        }
    }

    /// The session on the device that begins with most of `tokens`, and how many, in whole pages.
    fn longest_resident(&self, session: &str, tokens: &[u32]) -> Option<(Arc<str>, usize)> {
        let tenant = &self.sequences.get(session)?.tenant;
        self.sequences
            .values()
            .filter(|other| other.tenant == *tenant)
            // What a codec was asked for may have lost something.
            .filter(|other| other.codec.lossy().is_none())
            .filter(|other| &*other.id != session && other.state.is_resident())
            .map(|other| {
                let there = &other.tokens[..other.computed];
                let common = there.iter().zip(tokens).take_while(|(a, b)| a == b).count();
                (other, common / PAGE_TOKENS * PAGE_TOKENS)
            })
            .filter(|(other, count)| *count > 0 && other.table.covers(*count))
            .max_by(|(a, first), (b, second)| first.cmp(second).then_with(|| b.id.cmp(&a.id)))
            .map(|(other, count)| (Arc::clone(&other.id), count))
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
}
