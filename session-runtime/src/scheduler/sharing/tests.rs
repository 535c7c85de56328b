//! The slow twin of a lookup: a history is compared with that of every session, token by token. In tests every session that begins
//! is looked up both ways. The disk is not asked twice: a trace has each of its answers.

use std::sync::Arc;

use kernels::backend::{Backend, PAGE_TOKENS};

use crate::kv::chunk::{Chunk, ChunkId, chunks};
use crate::kv::contract::Digest;
use crate::kv::prefix::Found;
use crate::scheduler::worker::Worker;

impl<B: Backend> Worker<B> {
    /// Asserts that a lookup found what comparing finds, and that the tree knows of each session what it has on the device.
    pub(super) fn compare(&self, contract: &Digest, tokens: &[u32], found: &Found) {
        self.prefixes.check().unwrap();
        for sequence in self.sequences.values() {
            let resident = if sequence.state.is_resident() { sequence.computed } else { 0 };
            assert_eq!(self.prefixes.held(&sequence.id), resident, "{}", sequence.id);
        }
        assert_eq!(found.device, self.longest_resident(contract, tokens));
        let layers = 0..self.engine.config().layers as u32;
        let here = |id: &ChunkId| layers.clone().all(|layer| self.host.has(id, layer));
        let sealed = chunks(contract, tokens).into_iter().filter(Chunk::is_sealed);
        assert_eq!(found.host, sealed.take_while(|chunk| here(&chunk.id)).count());
    }

    /// The session on the device that begins with most of `tokens`, and how many, in whole pages.
    fn longest_resident(&self, contract: &Digest, tokens: &[u32]) -> Option<(Arc<str>, usize)> {
        self.sequences
            .values()
            .filter(|other| other.pages == *contract && other.state.is_resident())
            .map(|other| {
                let there = &other.tokens[..other.computed];
                let common = there.iter().zip(tokens).take_while(|(a, b)| a == b).count();
                (other, common / PAGE_TOKENS * PAGE_TOKENS)
            })
            .filter(|(other, count)| *count > 0 && other.table.covers(*count))
            .max_by(|(a, first), (b, second)| first.cmp(second).then_with(|| b.id.cmp(&a.id)))
            .map(|(other, count)| (Arc::clone(&other.id), count))
    }
}
