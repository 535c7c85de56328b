//! The nodes of the prefix tree: a compressed radix tree over token ids, one root a contract.
//!
//! A node stands for the tokens of its edge behind those of its parent. Sessions that have pages for all of them *hold* it; a
//! session's end is always the end of a node. Known chunks belong to the node in which they end, wherever in it.
//! Invariants (see [`Nodes::check`]): who holds a node holds its parent; a leaf ends where a session or a known chunk ends; a
//! node with one child is the end of a session. So there is no more than the sessions and the known chunks need.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::kv::chunk::ChunkId;
use crate::kv::contract::Digest;

/// Index of a node.
pub(super) type NodeId = usize;

/// What a node hangs from.
#[derive(Debug, PartialEq)]
enum Above {
    /// Nothing: it is not in use.
    Free,
    /// It is the root of a contract.
    Contract(Digest),
    /// A node.
    Node(NodeId),
}

#[derive(Debug)]
struct Node {
    above: Above,
    /// Tokens that lead here; none at a root.
    edge: Vec<u32>,
    /// Tokens from the beginning of the history to the end of the edge.
    end: usize,
    /// By the first token of their edges.
    children: BTreeMap<u32, NodeId>,
    /// Sessions on the device that hold pages for the whole edge, in order.
    holders: BTreeSet<Arc<str>>,
    /// Known chunks by the token they end before.
    chunks: BTreeMap<usize, ChunkId>,
}

impl Node {
    fn below(above: Above, edge: Vec<u32>, end: usize) -> Self {
        let (children, holders, chunks) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Self { above, edge, end, children, holders, chunks }
    }

    fn start(&self) -> usize {
        self.end - self.edge.len()
    }
}

/// A node on the way of a history, and up to which of its tokens they agree.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub node: NodeId,
    /// Tokens from the beginning of the history.
    pub matched: usize,
}

/// All nodes, and where known chunks are.
#[derive(Debug, Default)]
pub(super) struct Nodes {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    roots: HashMap<Digest, NodeId>,
    /// The node in which each known chunk ends, and before which token of the history.
    chunks: HashMap<ChunkId, (NodeId, usize)>,
}

/// How many leading tokens two lists have in common.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Nodes {
    fn add(&mut self, node: Node) -> NodeId {
        match self.free.pop() {
            Some(id) => {
                self.nodes[id] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    fn remove(&mut self, id: NodeId) -> Node {
        self.free.push(id);
        std::mem::replace(&mut self.nodes[id], Node::below(Above::Free, Vec::new(), 0))
    }

    /// The root of a contract, made where there is none.
    pub(super) fn root(&mut self, contract: &Digest) -> NodeId {
        if let Some(root) = self.roots.get(contract) {
            return *root;
        }
        let root = self.add(Node::below(Above::Contract(*contract), Vec::new(), 0));
        self.roots.insert(*contract, root);
        root
    }

    /// Tokens from the beginning of the history to the end of a node.
    pub(super) fn end(&self, node: NodeId) -> usize {
        self.nodes[node].end
    }

    /// Sessions that hold a node, in order.
    pub(super) fn holders(&self, node: NodeId) -> &BTreeSet<Arc<str>> {
        &self.nodes[node].holders
    }

    /// The known chunk that ends in a node before token `end` of the history.
    pub(super) fn chunk(&self, node: NodeId, end: usize) -> Option<ChunkId> {
        self.nodes[node].chunks.get(&end).copied()
    }

    /// Whether a chunk is known.
    pub(super) fn has_chunk(&self, chunk: &ChunkId) -> bool {
        self.chunks.contains_key(chunk)
    }

    /// The known chunks, in no order.
    pub(super) fn chunk_ids(&self) -> impl Iterator<Item = &ChunkId> {
        self.chunks.keys()
    }

    /// The nodes along a history, from the root on, as far as they agree.
    pub(super) fn path(&self, contract: &Digest, tokens: &[u32]) -> Vec<Step> {
        let mut path = Vec::new();
        let Some(mut at) = self.roots.get(contract) else { return path };
        let mut matched = 0;
        while let Some(child) = tokens.get(matched).and_then(|token| self.nodes[*at].children.get(token)) {
            let edge = &self.nodes[*child].edge;
            let more = common(edge, &tokens[matched..]);
            matched += more;
            path.push(Step { node: *child, matched });
            if more < edge.len() {
                break;
            }
            at = child;
        }
        path
    }

    /// Goes on from the end of a node along `tokens`, making what is missing, on behalf of a session that holds all of it from
    /// now on or, without one, of a chunk. The node that the tokens end in; a session's end there.
    pub(super) fn descend(&mut self, from: NodeId, tokens: &[u32], holder: Option<&Arc<str>>) -> NodeId {
        let (mut at, mut left) = (from, tokens);
        while let Some(first) = left.first() {
            let Some(child) = self.nodes[at].children.get(first).copied() else {
                at = self.grow(at, left, holder);
                break;
            };
            let edge = &self.nodes[child].edge;
            let same = common(edge, left);
            let ends_within = holder.is_none() && same == left.len();
            at = if same == edge.len() || ends_within { child } else { self.split(child, same) };
            self.nodes[at].holders.extend(holder.cloned());
            left = &left[same..];
        }
        at
    }

    /// Adds tokens that no child of a node begins with; the node that they end in.
    fn grow(&mut self, at: NodeId, tokens: &[u32], holder: Option<&Arc<str>>) -> NodeId {
        let node = &mut self.nodes[at];
        let is_root = matches!(node.above, Above::Contract(_));
        // Nobody else ends here and nobody goes on: the edge becomes longer.
        if !is_root && node.children.is_empty() && node.holders.len() == usize::from(holder.is_some()) {
            node.edge.extend(tokens);
            node.end += tokens.len();
            return at;
        }
        let end = node.end + tokens.len();
        let mut leaf = Node::below(Above::Node(at), tokens.to_vec(), end);
        leaf.holders.extend(holder.cloned());
        let leaf = self.add(leaf);
        self.nodes[at].children.extend(tokens.first().map(|first| (*first, leaf)));
        leaf
    }

    /// Divides a node after the first `tokens` of its edge, of which there are more; the new node that has these. The rest stays
    /// the node that it was, so that who ends there need not be told.
    fn split(&mut self, at: NodeId, tokens: usize) -> NodeId {
        let node = &mut self.nodes[at];
        let rest = node.edge.split_off(tokens);
        let edge = std::mem::replace(&mut node.edge, rest);
        let end = node.start();
        let later = node.chunks.split_off(&(end + 1));
        let chunks = std::mem::replace(&mut node.chunks, later);
        let above = std::mem::replace(&mut node.above, Above::Free);
        let children = node.edge.first().map(|first| (*first, at)).into_iter().collect();
        let holders = node.holders.clone();
        let (parent, first) = (above.node(), edge.first().copied());
        let moved: Vec<_> = chunks.iter().map(|(end, chunk)| (*end, *chunk)).collect();
        let upper = self.add(Node { above, edge, end, children, holders, chunks });
        self.chunks.extend(moved.into_iter().map(|(end, chunk)| (chunk, (upper, end))));
        self.nodes[at].above = Above::Node(upper);
        if let (Some(parent), Some(first)) = (parent, first) {
            self.nodes[parent].children.insert(first, upper);
        }
        upper
    }

    /// Takes a session off everything behind the first `tokens` tokens of the path that ends in `at`; the node where it ends
    /// then, which is gone with `tokens` 0 where nobody else needs the contract's root.
    pub(super) fn withdraw(&mut self, session: &str, mut at: NodeId, tokens: usize) -> NodeId {
        while self.nodes[at].end > tokens {
            let start = self.nodes[at].start();
            let keeps = (start < tokens).then(|| self.split(at, tokens - start));
            let above = keeps.or(self.nodes[at].above.node());
            self.nodes[at].holders.remove(session);
            let Some(above) = above else { break };
            self.settle(at);
            at = above;
        }
        at
    }

    /// Knows a chunk that ends in a node before token `end` of the history.
    pub(super) fn put_chunk(&mut self, node: NodeId, end: usize, chunk: ChunkId) {
        self.nodes[node].chunks.insert(end, chunk);
        self.chunks.insert(chunk, (node, end));
    }

    /// A known chunk and all known chunks behind it.
    pub(super) fn chunk_and_behind(&self, chunk: &ChunkId) -> Vec<ChunkId> {
        let Some((node, end)) = self.chunks.get(chunk) else { return Vec::new() };
        let mut list: Vec<ChunkId> = self.nodes[*node].chunks.range(end..).map(|(_, chunk)| *chunk).collect();
        let mut below: Vec<&Node> = vec![&self.nodes[*node]];
        while let Some(node) = below.pop() {
            for child in node.children.values().map(|child| &self.nodes[*child]) {
                list.extend(child.chunks.values());
                below.push(child);
            }
        }
        list
    }

    /// Forgets a chunk.
    pub(super) fn take_chunk(&mut self, chunk: &ChunkId) {
        if let Some((node, end)) = self.chunks.remove(chunk) {
            self.nodes[node].chunks.remove(&end);
            self.settle(node);
        }
    }

    /// Makes a node that fewer sessions hold, or that fewer lead to, as small as it can be.
    pub(super) fn settle(&mut self, at: NodeId) {
        let mut next = Some(at);
        while let Some(at) = next.take() {
            let node = &self.nodes[at];
            let (has_children, is_held) = (!node.children.is_empty(), !node.holders.is_empty());
            match node.above {
                Above::Contract(contract) if !has_children => {
                    self.roots.remove(&contract);
                    self.remove(at);
                }
                Above::Node(parent) if !has_children && !is_held => {
                    if !self.cut_to_chunks(at) {
                        let leaf = self.remove(at);
                        leaf.edge.first().map(|first| self.nodes[parent].children.remove(first));
                        next = Some(parent);
                    }
                }
                Above::Node(_) => {
                    if let Some(child) = self.goes_on_as(at) {
                        self.merge(at, child);
                    }
                }
                Above::Free | Above::Contract(_) => {}
            }
        }
    }

    /// Cuts a leaf to its last known chunk; whether there is one.
    fn cut_to_chunks(&mut self, at: NodeId) -> bool {
        let node = &mut self.nodes[at];
        let Some(last) = node.chunks.keys().next_back().copied() else { return false };
        node.edge.truncate(last - node.start());
        node.end = last;
        true
    }

    /// The only child of a node at whose end no session ends.
    fn goes_on_as(&self, at: NodeId) -> Option<NodeId> {
        let node = &self.nodes[at];
        let child = *node.children.values().next().filter(|_| node.children.len() == 1)?;
        // Holders of a child hold its parent: as many are the same.
        (self.nodes[child].holders.len() == node.holders.len()).then_some(child)
    }

    /// Makes a node and its only child one, which is the child: whoever ends there need not be told.
    fn merge(&mut self, at: NodeId, child: NodeId) {
        let mut upper = self.remove(at);
        self.chunks.extend(upper.chunks.iter().map(|(end, chunk)| (*chunk, (child, *end))));
        if let (Some(parent), Some(first)) = (upper.above.node(), upper.edge.first()) {
            self.nodes[parent].children.insert(*first, child);
        }
        let lower = &mut self.nodes[child];
        lower.above = upper.above;
        upper.edge.append(&mut lower.edge);
        lower.edge = upper.edge;
        lower.chunks.append(&mut upper.chunks);
    }

    /// Nodes in use and the tokens on their edges.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.nodes.len() - self.free.len(), self.nodes.iter().map(|node| node.edge.len()).sum())
    }

    /// Checks the invariants against where sessions end.
    ///
    /// # Errors
    /// A sentence that names what is wrong.
    pub(super) fn check(&self, ends: &HashMap<Arc<str>, NodeId>) -> Result<(), String> {
        let mut ending: HashMap<NodeId, usize> = HashMap::new();
        for (session, end) in ends {
            *ending.entry(*end).or_default() += 1;
            if !self.nodes[*end].holders.contains(session) {
                return Err(format!("{session} does not hold the node it ends in"));
            }
        }
        let mut chunks = 0;
        for (id, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.above != Above::Free) {
            let fail = |what: &str| Err(format!("node {id}, which ends at {}: {what}", node.end));
            chunks += node.chunks.len();
            let known = |(end, chunk): (&usize, &ChunkId)| {
                *end > node.start() && *end <= node.end && self.chunks.get(chunk) == Some(&(id, *end))
            };
            if !node.chunks.iter().all(known) {
                return fail("a chunk is elsewhere");
            }
            let ends_here = ending.get(&id).copied().unwrap_or_default();
            let below = |child: &NodeId| self.nodes[*child].holders.len();
            let parent = match node.above {
                Above::Node(parent) => &self.nodes[parent],
                _ if node.children.is_empty() || !node.edge.is_empty() => {
                    return fail("a root without a tree");
                }
                _ => continue,
            };
            if parent.end != node.start()
                || node.edge.first().and_then(|token| parent.children.get(token)) != Some(&id)
            {
                return fail("its parent does not lead to it");
            }
            if !matches!(parent.above, Above::Contract(_)) && !node.holders.is_subset(&parent.holders) {
                return fail("who holds it does not hold its parent");
            }
            if node.holders.len() != node.children.values().map(below).sum::<usize>() + ends_here {
                return fail("it is held by one who is not below it");
            }
            let last_chunk = node.chunks.keys().next_back();
            match node.children.len() {
                0 if ends_here == 0 && last_chunk != Some(&node.end) => return fail("nobody needs its end"),
                1 if ends_here == 0 => return fail("it is not the end of anything"),
                _ => {}
            }
        }
        let free = self.nodes.iter().filter(|node| node.above == Above::Free).count();
        if chunks != self.chunks.len() || free != self.free.len() {
            return Err(format!(
                "{chunks} of {} chunks, {free} of {} free",
                self.chunks.len(),
                self.free.len()
            ));
        }
        Ok(())
    }
}

impl Above {
    fn node(&self) -> Option<NodeId> {
        match self {
            Self::Node(node) => Some(*node),
            Self::Free | Self::Contract(_) => None,
        }
    }
}
