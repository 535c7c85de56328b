//! What the scheduler knows of one session: tokens, pages, KV state.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::idle::RestReason;
use super::tenants::Tenant;
use crate::engine::Tables;
use crate::kv::chunk::{CHUNK_TOKENS, Chunk, chunks, settled_chunks};
use crate::kv::codec::KvCodec;
use crate::kv::contract::Digest;
use crate::kv::reuse::KvReuse;
use crate::kv::state::{KvEvent, KvState, transition};
use crate::kv::table::BlockTable;
use crate::restore::report::RestoreReport;
use kernels::backend::{KvType, PageId};

impl Tables for BlockTable {
    fn pages(&self, layer: usize, kv_head: usize) -> &[PageId] {
        BlockTable::pages(self, layer, kv_head)
    }
}

/// A rest under way.
pub(super) struct Rest {
    /// Why.
    pub reason: RestReason,
    /// When it began, on the monotonic clock.
    pub since: Duration,
    /// Whether the KV was brought back ahead of a return once: a guess that did not come true is not made again.
    pub prefetched: bool,
}

/// Where a session's saved cells are, as long as they are not its own.
#[derive(Clone, Copy)]
pub(super) struct Origin {
    /// Digest of their contract.
    pub contract: Digest,
    /// The type of their elements.
    pub elements: KvType,
}

/// One session's tokens and KV.
pub(super) struct Sequence {
    /// Session id.
    pub id: Arc<str>,
    /// Whose it is.
    pub tenant: Tenant,
    /// The history, and what is cut out of it once its KV comes back.
    pub tokens: Vec<u32>,
    /// Ranges that are cut out then, one after the other.
    pub cuts: Vec<Range<usize>>,
    /// Its pages.
    pub table: BlockTable,
    /// Tokens, from the first, whose KV is on the device.
    pub computed: usize,
    /// Tokens, from the first, whose KV has been computed at some time: what a restore brings back.
    pub known: usize,
    /// Where the KV is.
    pub state: KvState,
    /// How its cells are packed when they leave the device.
    pub codec: KvCodec,
    /// Whether it takes KV near what would be computed.
    pub reuse: KvReuse,
    /// Digest of the contract of its cells.
    pub contract: Digest,
    /// Digest of the contract of its pages, which others may take.
    pub pages: Digest,
    /// Fields in which the contract of the saved cells differs; empty when they may be used.
    pub foreign: Vec<String>,
    /// Where its next restore finds cells, where not under its own contract.
    pub origin: Option<Origin>,
    /// Settled chunks, from the first, that the tier was asked to save.
    pub save_asked: usize,
    /// Settled chunks, from the first, known to be saved whole.
    pub saved_chunks: usize,
    /// End of the chunks behind those that an eviction saved, in order; of use while `known` is that end.
    pub saved_end: usize,
    /// Last use, milliseconds of the monotonic clock.
    pub last_used_ms: u64,
    /// Idle time after which the KV leaves the device unasked, milliseconds.
    pub idle_ttl_ms: u64,
    /// Since when and why it has rested.
    pub rest: Option<Rest>,
    /// The session it was forked from, until it goes on by itself.
    pub forked_from: Option<Arc<str>>,
    /// Whether a fork of it has gone on since it did.
    pub superseded: bool,
    /// What the last restore did.
    pub last_restore: Option<RestoreReport>,
}

impl Sequence {
    /// Moves the KV to its next state and says what it was; an event that cannot happen changes nothing.
    pub(super) fn apply(&mut self, event: KvEvent) -> KvState {
        let from = self.state;
        match transition(from, event) {
            Some(next) => self.state = next,
            None => tracing::error!(session = %self.id, ?from, ?event, "impossible KV transition"),
        }
        from
    }

    /// Tokens of the history.
    pub(super) fn length(&self) -> usize {
        self.tokens.len() - self.cut_tokens()
    }

    /// Tokens that are yet to be cut out.
    pub(super) fn cut_tokens(&self) -> usize {
        self.cuts.iter().map(ExactSizeIterator::len).sum()
    }

    /// Digest of the contract under which its cells are found.
    pub(super) fn cells_contract(&self) -> Digest {
        self.origin.map_or(self.contract, |origin| origin.contract)
    }

    /// The chunks of the first `count` tokens.
    pub(super) fn chunks(&self, count: usize) -> Vec<Chunk> {
        let mut list = chunks(&self.cells_contract(), &self.tokens[..count]);
        for chunk in list.iter_mut().skip(self.settled_chunks(count)).filter(|chunk| chunk.is_sealed()) {
            *chunk = chunk.as_recent();
        }
        list
    }

    /// How many of the first chunks of `count` tokens are settled.
    pub(super) fn settled_chunks(&self, count: usize) -> usize {
        if self.codec.lossy().is_some() { settled_chunks(count) } else { count / CHUNK_TOKENS }
    }

    /// Tokens, from the first, whose cells are saved in every layer.
    pub(super) fn saved_tokens(&self) -> usize {
        if self.saved_end == self.known && self.saved_chunks == self.settled_chunks(self.known) {
            return self.known;
        }
        (self.saved_chunks * CHUNK_TOKENS).min(self.known)
    }

    /// Whether the KV is on the device, unused.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.state, KvState::Idle | KvState::Restored)
    }

    /// When the soft TTL ends.
    pub(super) fn deadline_ms(&self) -> Option<u64> {
        self.is_idle().then(|| self.last_used_ms.saturating_add(self.idle_ttl_ms))
    }

    /// Pages of a chunk in one layer, per KV head; `None` when the layer dropped them.
    pub(super) fn chunk_pages(&self, chunk: &Chunk, layer: usize) -> Option<Vec<&[PageId]>> {
        self.table.range(layer, chunk.start, chunk.start + chunk.tokens)
    }
}
