//! Chunks and cells: the units of saving and restoring, and their content-derived ids.

use super::contract::Digest;
use kernels::backend::PAGE_TOKENS;

/// Tokens of a sealed chunk.
pub const CHUNK_TOKENS: usize = 64;
/// The newest tokens of a history, which a codec with a loss leaves as they are, and with them the chunks that they are in.
pub const RECENT_TOKENS: usize = CHUNK_TOKENS;
/// Pages that hold one chunk of one (layer, KV head).
pub const CHUNK_PAGES: usize = CHUNK_TOKENS / PAGE_TOKENS;

/// Identity of a chunk: contract, everything before it, its tokens and positions.
pub type ChunkId = Digest;
/// Identity of a cell (chunk, layer). Equal ids mean equal bytes (I1).
pub type CellId = Digest;

/// Id of the chunk with `tokens` from position `first_position` on, after chunk `parent`
/// (`None` for the first chunk). A chunk of fewer than [`CHUNK_TOKENS`] tokens is a tail that is not
/// sealed yet; its id differs from that of any longer chunk.
pub fn chunk_id(contract: &Digest, parent: Option<&ChunkId>, tokens: &[u32], first_position: u32) -> ChunkId {
    let mut hasher = blake3::Hasher::new_derive_key("session-runtime chunk 1");
    hasher.update(contract);
    match parent {
        Some(parent) => hasher.update(&[1]).update(parent),
        None => hasher.update(&[0]),
    };
    hasher.update(&(tokens.len() as u32).to_le_bytes());
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    hasher.update(&first_position.to_le_bytes());
    *hasher.finalize().as_bytes()
}

/// Id of the cell of `chunk` at `layer`.
pub fn cell_id(chunk: &ChunkId, layer: u32) -> CellId {
    let mut hasher = blake3::Hasher::new_derive_key("session-runtime cell 1");
    hasher.update(chunk);
    hasher.update(&layer.to_le_bytes());
    *hasher.finalize().as_bytes()
}

/// A chunk of a token history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Identity.
    pub id: ChunkId,
    /// Index of its first token.
    pub start: usize,
    /// Its tokens; [`CHUNK_TOKENS`] when sealed.
    pub tokens: usize,
    /// Whether it holds some of the newest tokens of a history whose older ones are packed with a loss. Its cells are not those that
    /// the same chunk has later, so that its id is another.
    pub recent: bool,
}

impl Chunk {
    /// Whether the chunk is complete and immutable.
    pub fn is_sealed(&self) -> bool {
        self.tokens == CHUNK_TOKENS
    }

    /// Whether its cells are what they will be from now on: it is sealed, and none of the newest.
    pub fn is_settled(&self) -> bool {
        self.is_sealed() && !self.recent
    }

    /// The chunk while it is one of the newest.
    #[must_use]
    pub fn as_recent(&self) -> Self {
        let id = blake3::derive_key("session-runtime recent chunk 1", &self.id);
        Self { id, recent: true, ..self.clone() }
    }
}

/// Splits a history into chunks; the last one may be an unsealed tail.
pub fn chunks(contract: &Digest, tokens: &[u32]) -> Vec<Chunk> {
    let mut list: Vec<Chunk> = Vec::with_capacity(tokens.len().div_ceil(CHUNK_TOKENS));
    for (index, piece) in tokens.chunks(CHUNK_TOKENS).enumerate() {
        let start = index * CHUNK_TOKENS;
        let parent = list.last().map(|chunk| chunk.id);
        let id = chunk_id(contract, parent.as_ref(), piece, start as u32);
        list.push(Chunk { id, start, tokens: piece.len(), recent: false });
    }
    list
}

/// Sealed chunks of a history of `tokens` tokens that have none of its newest ones.
pub fn settled_chunks(tokens: usize) -> usize {
    tokens.saturating_sub(RECENT_TOKENS) / CHUNK_TOKENS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_depend_on_every_part() {
        let contract = [7; 32];
        let base = chunk_id(&contract, None, &[1, 2, 3], 0);
        assert_eq!(base, chunk_id(&contract, None, &[1, 2, 3], 0));
        let others = [
            chunk_id(&[8; 32], None, &[1, 2, 3], 0),
            chunk_id(&contract, Some(&[0; 32]), &[1, 2, 3], 0),
            chunk_id(&contract, None, &[1, 2], 0),
            chunk_id(&contract, None, &[1, 2, 3, 0], 0),
            chunk_id(&contract, None, &[1, 2, 3], 1),
        ];
        assert!(others.iter().all(|other| *other != base));
        assert_ne!(cell_id(&base, 0), cell_id(&base, 1));
    }

    #[test]
    fn the_newest_tokens_are_never_in_a_settled_chunk() {
        let tokens: Vec<u32> = (0..300).collect();
        for count in 0..tokens.len() {
            let settled = settled_chunks(count) * CHUNK_TOKENS;
            assert!(settled == 0 || settled + RECENT_TOKENS <= count);
            assert!(count < settled + RECENT_TOKENS + CHUNK_TOKENS, "no more is kept than need be");
        }
        let chunk = chunks(&[1; 32], &tokens).remove(1);
        let recent = chunk.as_recent();
        assert!(recent.id != chunk.id && recent.is_sealed() && !recent.is_settled() && chunk.is_settled());
    }

    #[test]
    fn histories_share_ids_exactly_as_far_as_they_agree() {
        let contract = [1; 32];
        let left: Vec<u32> = (0..200).collect();
        let mut right = left.clone();
        right[130] = 999;
        let (a, b) = (chunks(&contract, &left), chunks(&contract, &right));
        assert_eq!(a.len(), 4);
        assert_eq!(a[3].tokens, 8);
        assert_eq!(a[0], b[0]);
        assert_eq!(a[1], b[1]);
        assert_ne!(a[2].id, b[2].id);
        assert_ne!(a[3].id, b[3].id, "a later chunk depends on everything before it");
    }
}
