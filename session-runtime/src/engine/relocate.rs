//! Moving KV towards the beginning of a sequence, where tokens before it were cut out.

use kernels::backend::{Backend, KvType, PageId};
use kernels::codec::CellShape;

use super::Engine;
use crate::error::Error;

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
        let config = self.config();
        let shape = CellShape {
            kv_heads: config.kv_heads,
            tokens: span.tokens,
            head_dim: config.head_dim,
            start: span.from,
            rope_base: config.rope_base,
            rope_pairing: config.rope_pairing,
        };
        self.move_tokens(pages, kv_type, &shape, span.to)
    }
}
