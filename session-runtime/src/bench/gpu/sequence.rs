//! One sequence on an engine: its pages, and the tokens that are read into them.

use kernels::backend::Backend;

use crate::engine::{Engine, LogitRows, SequenceRows};
use crate::error::Error;
use crate::kv::pool::PagePool;
use crate::kv::table::BlockTable;

/// An engine with room for some sequences.
pub(super) struct Sequences<B: Backend> {
    pub engine: Engine<B>,
    pub tables: Vec<BlockTable>,
}

impl<B: Backend> Sequences<B> {
    /// `count` sequences of `tokens` tokens each, nothing computed.
    pub(super) fn new(engine: Engine<B>, count: usize, tokens: usize) -> Result<Self, Error> {
        let mut pool = PagePool::new(engine.pool_spec().pages);
        let config = engine.config();
        let tables = (0..count).map(|_| -> Result<BlockTable, Error> {
            let mut table = BlockTable::new(config.layers, config.kv_heads);
            table.prepare(&mut pool, 0, tokens).map_err(Error::internal)?;
            Ok(table)
        });
        let tables = tables.collect::<Result<_, Error>>()?;
        Ok(Self { engine, tables })
    }

    /// Reads `tokens` into the first sequence from its start, a step of `piece` rows at a time; the logits wanted.
    pub(super) fn read(
        &mut self,
        tokens: &[u32],
        piece: usize,
        wanted: LogitRows,
    ) -> Result<Vec<f32>, Error> {
        let layers = self.engine.config().layers;
        let mut logits = Vec::new();
        for start in (0..tokens.len()).step_by(piece) {
            let end = (start + piece).min(tokens.len());
            let wanted = match wanted {
                LogitRows::Last if end < tokens.len() => LogitRows::None,
                other => other,
            };
            let rows =
                SequenceRows { tokens: &tokens[start..end], start, tables: &self.tables[0], logits: wanted };
            self.engine.forward(&[rows], layers, &mut logits)?;
        }
        self.engine.finish()?;
        Ok(logits)
    }

    /// One token of each sequence, at place `index`; its logits.
    pub(super) fn decode(&mut self, token: u32, index: usize) -> Result<Vec<f32>, Error> {
        let layers = self.engine.config().layers;
        let tokens = [token];
        let rows: Vec<SequenceRows<'_>> = self
            .tables
            .iter()
            .map(|tables| SequenceRows { tokens: &tokens, start: index, tables, logits: LogitRows::Last })
            .collect();
        let mut logits = Vec::new();
        self.engine.forward(&rows, layers, &mut logits)?;
        Ok(logits)
    }
}

/// Tokens that repeat late.
pub(super) fn tokens(count: usize, vocab: usize) -> Vec<u32> {
    (0..count).map(|index| ((index * 7919 + 13) % vocab) as u32).collect()
}
