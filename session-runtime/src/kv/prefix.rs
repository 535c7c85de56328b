//! The prefix tree: who has the KV of the beginning of a history. Sessions on the device, running or idle, and saved chunks
//! stand in one radix tree over token ids, under the contract that their KV has, so that one lookup finds the best of device,
//! host memory and disk, in the time that walking along the match takes.
//!
//! What it knows of the device is exact: a session stands in it with just the tokens whose pages it has, told by
//! [`PrefixTree::extend`] and [`PrefixTree::truncate`]. What it knows of saved chunks are their names (ids, which follow from
//! the tokens). Tiers lose chunks by themselves, and the disk has more of them than memory should hold the names of; so a lookup
//! asks for each chunk whether it is still there, goes on by computing names where the tree ends, and learns from the answers.
//! No more names are kept than told at the beginning: the last one of the history that was of use the longest ago goes
//! first, and costs no more than computing it again.

mod names;
mod nodes;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kernels::backend::PAGE_TOKENS;

use super::chunk::{CHUNK_TOKENS, Chunk, ChunkId, chunk_id};
use super::contract::Digest;
use names::Names;
pub use names::Tiers;
use nodes::{NodeId, Nodes, Step};

/// Who has KV of the beginning of a history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The session on the device that has most of it, and how many tokens that are, in whole pages. Of sessions that have as many
    /// it is the one with the smallest id.
    pub device: Option<(Arc<str>, usize)>,
    /// Sealed chunks, from the first, in host memory.
    pub host: usize,
    /// Sealed chunks, from the first, on disk.
    pub disk: usize,
    /// Sealed chunks, from the first, in either.
    pub saved: usize,
}

/// Where most of the KV of a beginning is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Best {
    /// Nobody has any.
    Nobody,
    /// In the pages of a session.
    Device {
        /// The session.
        session: Arc<str>,
        /// Tokens from the first, in whole pages.
        tokens: usize,
    },
    /// In saved chunks.
    Saved {
        /// Tokens from the first, in whole chunks.
        tokens: usize,
    },
}

impl Found {
    /// The best of them: saved chunks only where they have more than `margin` tokens more than the device has, where sharing costs
    /// nothing.
    pub fn best(&self, margin: usize) -> Best {
        let saved = self.saved * CHUNK_TOKENS;
        match &self.device {
            device if saved > margin + device.as_ref().map_or(0, |(_, tokens)| *tokens) => {
                Best::Saved { tokens: saved }
            }
            Some((session, tokens)) => Best::Device { session: Arc::clone(session), tokens: *tokens },
            None => Best::Nobody,
        }
    }
}

/// Sessions on the device and names of saved chunks, by contract and tokens.
#[derive(Debug)]
pub struct PrefixTree {
    nodes: Nodes,
    /// Where each session on the device ends.
    sessions: HashMap<Arc<str>, NodeId>,
    names: Names,
}

/// The node of a path in which the first `end` tokens end, if they all agree.
fn step_to(path: &[Step], end: usize) -> Option<&Step> {
    path.get(path.partition_point(|step| step.matched < end))
}

impl PrefixTree {
    /// An empty tree that will know the names of at most `chunks` saved chunks.
    pub fn new(chunks: usize) -> Self {
        Self { nodes: Nodes::default(), sessions: HashMap::new(), names: Names::new(chunks) }
    }

    /// Tokens, from the first, for which a session has pages.
    pub fn held(&self, session: &str) -> usize {
        self.sessions.get(session).map_or(0, |end| self.nodes.end(*end))
    }

    /// A session has pages for these tokens too, which follow those that it has them for. Its KV has this contract; who has pages
    /// already stays under the one it began with.
    pub fn extend(&mut self, session: &Arc<str>, contract: &Digest, tokens: &[u32]) {
        if tokens.is_empty() {
            return;
        }
        let from = self.sessions.get(session).copied().unwrap_or_else(|| self.nodes.root(contract));
        let end = self.nodes.descend(from, tokens, Some(session));
        self.sessions.insert(Arc::clone(session), end);
        // Where it was the only one to end, nobody does now.
        if from != end {
            self.nodes.settle(from);
        }
    }

    /// A session has pages only for the first `tokens` tokens, if it had more; with 0 it is off the device.
    pub fn truncate(&mut self, session: &str, tokens: usize) {
        let Some(end) = self.sessions.get_mut(session) else { return };
        *end = self.nodes.withdraw(session, *end, tokens);
        if tokens == 0 {
            self.sessions.remove(session);
        }
    }

    /// A settled chunk of a history is in these tiers too, as far as is known.
    pub fn keep(&mut self, contract: &Digest, history: &[u32], chunk: &Chunk, tiers: Tiers) {
        let end = chunk.start + chunk.tokens;
        let Some(tokens) = history.get(..end).filter(|_| chunk.is_settled() && tiers != Tiers::NEITHER)
        else {
            return;
        };
        let path = self.nodes.path(contract, &tokens[..chunk.start]);
        let before = self.known_chunk(&path, chunk.start);
        if before.is_some() || chunk.start == 0 {
            self.name(contract, tokens, before, &[(end, chunk.id, tiers)]);
        }
    }

    /// A chunk is no longer in these tiers.
    pub fn drop(&mut self, chunk: &ChunkId, tiers: Tiers) {
        if !self.names.drop(chunk, tiers) {
            return;
        }
        for forgotten in self.nodes.chunk_and_behind(chunk) {
            self.names.forget(&forgotten);
            self.nodes.take_chunk(&forgotten);
        }
    }

    /// Who has KV of the beginning of `tokens` under a contract. A session on the device counts if `usable` for so many tokens:
    /// who cannot give those cannot give fewer either. `whereabouts` says for a chunk which tiers have it whole now, and `None` where not
    /// even all of them together do.
    pub fn lookup(
        &mut self,
        contract: &Digest,
        tokens: &[u32],
        usable: impl Fn(&str, usize) -> bool,
        whereabouts: impl Fn(&ChunkId) -> Option<Tiers>,
    ) -> Found {
        let path = self.nodes.path(contract, tokens);
        let device = self.best_holder(&path, usable);
        let mut found = Found { device, ..Found::default() };
        let (mut kept, mut gone) = (Vec::new(), Vec::new());
        for (index, piece) in tokens.chunks_exact(CHUNK_TOKENS).enumerate() {
            let (start, end) = (index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS);
            let known = self.known_chunk(&path, end);
            let parent = kept.last().map(|(_, id, _)| id);
            let id = known.unwrap_or_else(|| chunk_id(contract, parent, piece, start as u32));
            let Some(tiers) = whereabouts(&id) else {
                gone.push((id, Tiers::BOTH));
                break;
            };
            gone.push((id, tiers.others()));
            found.host += usize::from(tiers.host && found.host == index);
            found.disk += usize::from(tiers.disk && found.disk == index);
            found.saved += 1;
            kept.push((end, id, tiers));
        }
        // The path is of no use any more: what is forgotten may change the nodes.
        gone.iter().for_each(|(id, tiers)| self.drop(id, *tiers));
        self.name(contract, tokens, None, &kept);
        found
    }

    /// The known chunk that ends before token `end` of a history, if its path goes so far.
    fn known_chunk(&self, path: &[Step], end: usize) -> Option<ChunkId> {
        self.nodes.chunk(step_to(path, end)?.node, end)
    }

    /// The first of the sessions that have most of what a path agrees with, in whole pages.
    fn best_holder(&self, path: &[Step], usable: impl Fn(&str, usize) -> bool) -> Option<(Arc<str>, usize)> {
        let mut left = path;
        let mut deeper: Option<&BTreeSet<Arc<str>>> = None;
        while let Some(last) = left.last() {
            let tokens = last.matched / PAGE_TOKENS * PAGE_TOKENS;
            if tokens == 0 {
                return None;
            }
            // All that have so many hold the first place on the way that is as deep.
            let place = left.partition_point(|step| step.matched < tokens);
            let holders = self.nodes.holders(left[place].node);
            let asked = |session: &&Arc<str>| deeper.is_some_and(|deeper| deeper.contains(*session));
            if let Some(session) = holders.iter().find(|session| !asked(session) && usable(session, tokens)) {
                return Some((Arc::clone(session), tokens));
            }
            deeper = Some(holders);
            left = &left[..place];
        }
        None
    }

    /// Knows successive chunks of a history, by the token that each ends before, behind one that is known or the beginning.
    fn name(
        &mut self,
        contract: &Digest,
        tokens: &[u32],
        mut before: Option<ChunkId>,
        chunks: &[(usize, ChunkId, Tiers)],
    ) {
        let new = |(_, id, _): &&(usize, ChunkId, Tiers)| !self.nodes.has_chunk(id);
        let new: Vec<_> = chunks.iter().filter(new).collect();
        if let Some((end, ..)) = new.last() {
            let tokens = &tokens[..*end];
            let root = self.nodes.root(contract);
            self.nodes.descend(root, tokens, None);
            let path = self.nodes.path(contract, tokens);
            for (end, id, _) in new {
                let step = step_to(&path, *end);
                step.into_iter().for_each(|step| self.nodes.put_chunk(step.node, *end, *id));
            }
        }
        for (_, id, tiers) in chunks {
            self.names.add(*id, before.replace(*id), *tiers);
        }
        while let Some(forgotten) = self.names.forget_surplus() {
            self.nodes.take_chunk(&forgotten);
        }
    }

    /// Checks that there is what sessions and known chunks need, and no more.
    ///
    /// # Errors
    /// A sentence that names what is wrong.
    pub fn check(&self) -> Result<(), String> {
        self.nodes.check(&self.sessions)?;
        let placed = self.nodes.chunk_ids().filter(|id| self.names.has(id)).count();
        if placed != self.names.len() || placed != self.nodes.chunk_ids().count() || !self.names.is_whole() {
            return Err("names and places of chunks differ".to_owned());
        }
        Ok(())
    }

    /// Nodes, tokens on their edges, and names of chunks.
    pub fn size(&self) -> (usize, usize, usize) {
        let (nodes, tokens) = self.nodes.size();
        (nodes, tokens, self.names.len())
    }
}

#[cfg(test)]
mod tests;
