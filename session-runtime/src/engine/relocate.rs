//! Moving KV towards the beginning of a sequence, where tokens before it were cut out.

use kernels::backend::{Backend, KvType, PAGE_TOKENS, PageId};
use kernels::codec::CellShape;
use kernels::codec::elements::turn_back;

use super::Engine;
use crate::error::Error;

/// Tokens that are moved at once.
const PIECE: usize = 16 * PAGE_TOKENS;

/// Tokens that move.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// The place of the first.
    pub from: usize,
    /// Its place to be, an earlier one.
    pub to: usize,
    /// How many.
    pub tokens: usize,
}

impl<B: Backend> Engine<B> {
    /// Whether keys can be turned to other positions: elements stand alone, every layer attends to all tokens, and rotary embedding is
    /// over whole heads.
    pub fn can_relocate(&self) -> bool {
        let config = self.config();
        self.pool_spec().kv_type != KvType::Int8
            && config.rope_dims == config.head_dim
            && config.layer_kinds.iter().all(|kind| kind.window().is_none())
    }

    /// Moves tokens within a layer: values as they are, keys turned to their new positions. `pages` are all of the layer's, per
    /// KV head and in token order; from the new place on nobody else may have them.
    ///
    /// # Errors
    /// A page outside the pool, or elements that cannot be turned. Tokens before the new place are as they were.
    pub fn relocate(&mut self, pages: &[&[PageId]], span: Move) -> Result<(), Error> {
        let kv_type = self.pool_spec().kv_type;
        let mut moved = 0;
        while moved < span.tokens {
            let tokens = PIECE.min(span.tokens - moved);
            let mut cell = self.read_tokens(pages, span.from + moved, tokens)?;
            let config = self.config();
            let shape = CellShape {
                kv_heads: config.kv_heads,
                tokens,
                head_dim: config.head_dim,
                start: span.from + moved,
                rope_base: config.rope_base,
                rope_pairing: config.rope_pairing,
            };
            turn_back(kv_type, &shape, &mut cell, span.from - span.to)?;
            self.write_tokens(pages, span.to + moved, &cell)?;
            moved += tokens;
        }
        Ok(())
    }

    /// K and V of `tokens` tokens from `start` on, as a cell has them.
    fn read_tokens(&self, pages: &[&[PageId]], start: usize, tokens: usize) -> Result<Vec<u8>, Error> {
        let lead = start % PAGE_TOKENS;
        let pages = places(pages, start, start + tokens);
        let cell = self.gather_cell(&pages, lead + tokens)?;
        let row = self.row_bytes();
        let mut read = Vec::with_capacity(cell.len());
        for part in cell.chunks_exact((lead + tokens) * row) {
            read.extend_from_slice(&part[lead * row..]);
        }
        Ok(read)
    }

    /// The inverse of [`Engine::read_tokens`].
    fn write_tokens(&mut self, pages: &[&[PageId]], start: usize, cell: &[u8]) -> Result<(), Error> {
        let lead = start % PAGE_TOKENS;
        let row = self.row_bytes();
        let tokens = cell.len() / (2 * pages.len() * row).max(1);
        let pages = places(pages, start, start + tokens);
        if lead == 0 {
            return self.scatter_cell(&pages, tokens, cell);
        }
        let before = self.gather_cell(&pages, lead)?;
        let mut whole = Vec::with_capacity(before.len() + cell.len());
        for (before, moved) in before.chunks_exact(lead * row).zip(cell.chunks_exact(tokens * row)) {
            whole.extend_from_slice(before);
            whole.extend_from_slice(moved);
        }
        self.scatter_cell(&pages, lead + tokens, &whole)
    }

    /// Bytes of K, or of V, of one token and KV head.
    fn row_bytes(&self) -> usize {
        self.pool_spec().kv_type.head_bytes(self.config().head_dim)
    }
}

/// The pages of tokens `start..end`.
fn places<'a>(pages: &[&'a [PageId]], start: usize, end: usize) -> Vec<&'a [PageId]> {
    let places = start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS);
    // A table has pages for all tokens of its sequence; without them the backend refuses the shape.
    pages.iter().map(|pages| pages.get(places.clone()).unwrap_or_default()).collect()
}
