//! Which pages a table holds: everything for layers that attend to all tokens, the last tokens for layers
//! with a window.
//!
//! Window layers drop whole chunks, so that a cell is either whole on the device or gone. They keep one
//! token more than the window, because the last token's row may be computed a second time for its logits.

use std::ops::Range;

use kernels::backend::PAGE_TOKENS;

use super::chunk::CHUNK_TOKENS;

/// Shape of the tables of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableShape {
    windows: Vec<Option<usize>>,
    kv_heads: usize,
    ahead: usize,
}

/// Tokens `start..end` as places of pages.
fn pages(start: usize, end: usize) -> Range<usize> {
    start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS)
}

impl TableShape {
    /// A model whose layers have these windows (`None`: all tokens) and whose steps have at most `step_rows` rows.
    pub fn new(windows: Vec<Option<usize>>, kv_heads: usize, step_rows: usize) -> Self {
        Self { windows, kv_heads, ahead: step_rows.next_multiple_of(CHUNK_TOKENS) }
    }

    /// A model whose layers all attend to all tokens.
    pub fn full(layers: usize, kv_heads: usize) -> Self {
        Self { windows: vec![None; layers], kv_heads, ahead: 0 }
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.windows.len()
    }

    /// KV heads of a layer.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Whether some layer has a window.
    pub fn has_windows(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }

    fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }

    /// The first token that a layer keeps once `computed` tokens are there.
    pub fn first_kept(&self, layer: usize, computed: usize) -> usize {
        self.window(layer).map_or(0, |window| computed.saturating_sub(window) / CHUNK_TOKENS * CHUNK_TOKENS)
    }

    /// Pages, by place, that hold the tokens a layer keeps once `computed` tokens are there.
    pub(super) fn kept(&self, layer: usize, computed: usize) -> Range<usize> {
        pages(self.first_kept(layer, computed), computed)
    }

    /// Pages that must be there to write tokens from `written` on in a sequence that will have `tokens`. A
    /// layer with a window gets them step by step.
    pub(super) fn written(&self, layer: usize, written: usize, tokens: usize) -> Range<usize> {
        match self.window(layer) {
            None => pages(written, tokens),
            Some(_) => pages(written, tokens.min(written + self.ahead)),
        }
    }

    /// Pages in which a restore of `known` tokens recomputes from token `start` on: what a step from there may read,
    /// and room for the steps until then.
    pub(super) fn scratch(&self, layer: usize, start: usize, known: usize) -> Range<usize> {
        match self.window(layer) {
            None => pages(0, known),
            Some(window) => {
                let first = self.first_kept(layer, start);
                let room = window.next_multiple_of(CHUNK_TOKENS) + self.ahead;
                pages(first, known.min(first + room))
            }
        }
    }

    /// The most pages that a sequence of `tokens` tokens takes at any time.
    pub fn pages_most(&self, tokens: usize) -> usize {
        let all = tokens.div_ceil(PAGE_TOKENS);
        let layer = |window: &Option<usize>| match window {
            None => all,
            Some(window) => {
                // What is kept, and the scratch of a restore.
                let kept = window.next_multiple_of(CHUNK_TOKENS) + CHUNK_TOKENS;
                let scratch = window.next_multiple_of(CHUNK_TOKENS) + self.ahead;
                all.min((kept + scratch).div_ceil(PAGE_TOKENS) + 1)
            }
        };
        self.windows.iter().map(layer).sum::<usize>() * self.kv_heads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_keep_whole_chunks_and_bound_the_pages() {
        let shape = TableShape::new(vec![None, Some(100)], 2, 70);
        assert_eq!(shape.first_kept(0, 1000), 0);
        // 1000 - 100 = 900, in the chunk from 896 on.
        assert_eq!(shape.first_kept(1, 1000), 896);
        assert_eq!(shape.first_kept(1, 99), 0);
        assert_eq!(shape.kept(1, 1000), 56..63);
        assert_eq!(shape.written(1, 1000, 5000), 62..71);
        assert_eq!(shape.written(0, 1000, 5000), 62..313);
        assert_eq!(shape.pages_most(64), 2 * (4 + 4));
        let bound = shape.pages_most(100_000) - 2 * 6250;
        assert_eq!(bound, shape.pages_most(1_000_000) - 2 * 62_500, "a window layer does not grow");
    }
}
