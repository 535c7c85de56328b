//! The forward pass, layer by layer over block tables.
//!
//! Row independence is inherited from the backend: a token's K, V and logits do not depend on what
//! else is in the step, on how a prompt is cut into steps, or on where its pages lie.

use std::sync::Arc;
use std::time::Instant;

use kernels::backend::{AttentionShape, Backend, KvType, PageId, PoolSpec, RowGroup};
use kernels::codec::lossless::CellLayout;
use kernels::codec::{CellShape, Codec};

use super::weights::{Layer, Weights};
use crate::error::Error;
use crate::models::architecture::{Gate, LayerKind, ModelConfig};

/// Where a sequence's pages are: one list per (layer, KV head).
pub trait Tables {
    /// Pages of one (layer, KV head), in token order.
    fn pages(&self, layer: usize, kv_head: usize) -> &[PageId];
}

/// Which rows of a sequence give logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: only K and V are wanted.
    None,
    /// The last one.
    Last,
    /// All of them.
    All,
}

/// Consecutive tokens of one sequence in a step.
pub struct SequenceRows<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Index in the sequence of the first one; also its position.
    pub start: usize,
    /// The sequence's pages, with room for every token.
    pub tables: &'a dyn Tables,
    /// Which rows give logits.
    pub logits: LogitRows,
}

/// Rows whose logits are computed at once.
const LOGIT_ROWS: usize = 32;

/// A model on a device with its pool of pages.
pub struct Engine<B: Backend> {
    backend: Arc<B>,
    config: ModelConfig,
    weights: Weights<B>,
    pool: B::Pool,
    pool_spec: PoolSpec,
    rope: B::Rope,
    /// Rotary factors of window layers, where they have others.
    window_rope: Option<B::Rope>,
    step_rows: usize,
    buffers: Buffers<B>,
    /// Seconds spent in each layer, where that is measured.
    layer_seconds: Option<Vec<f64>>,
}

struct Buffers<B: Backend> {
    hidden: B::Tensor,
    normed: B::Tensor,
    query: B::Tensor,
    key: B::Tensor,
    value: B::Tensor,
    attended: B::Tensor,
    projected: B::Tensor,
    gate: B::Tensor,
    up: B::Tensor,
    picked: B::Tensor,
    picked_normed: B::Tensor,
    logits: B::Tensor,
}

impl<B: Backend> Buffers<B> {
    fn new(backend: &B, config: &ModelConfig, rows: usize) -> Result<Self, Error> {
        let query = config.heads * config.head_dim;
        let kv = config.kv_heads * config.head_dim;
        let tensor = |rows, cols| backend.tensor(rows, cols).map_err(Error::from);
        Ok(Self {
            hidden: tensor(rows, config.hidden)?,
            normed: tensor(rows, config.hidden)?,
            query: tensor(rows, query)?,
            key: tensor(rows, kv)?,
            value: tensor(rows, kv)?,
            attended: tensor(rows, query)?,
            projected: tensor(rows, config.hidden)?,
            gate: tensor(rows, config.ffn)?,
            up: tensor(rows, config.ffn)?,
            picked: tensor(LOGIT_ROWS, config.hidden)?,
            picked_normed: tensor(LOGIT_ROWS, config.hidden)?,
            logits: tensor(LOGIT_ROWS, config.vocab)?,
        })
    }
}

impl<B: Backend> Engine<B> {
    /// Puts a model on a device. A step has at most `step_rows` rows.
    ///
    /// # Errors
    /// What the device refuses.
    pub fn new(
        backend: Arc<B>,
        config: ModelConfig,
        weights: Weights<B>,
        pool_spec: PoolSpec,
        context_length: usize,
        step_rows: usize,
    ) -> Result<Self, Error> {
        let pool = backend.pool(pool_spec)?;
        let table = |base| backend.rope_table(base, config.rope_dims, context_length);
        let rope = table(config.rope_base)?;
        let window_rope = config.window_rope_base.map(table).transpose()?;
        let buffers = Buffers::new(backend.as_ref(), &config, step_rows)?;
        Ok(Self {
            backend,
            config,
            weights,
            pool,
            pool_spec,
            rope,
            window_rope,
            step_rows,
            buffers,
            layer_seconds: None,
        })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The device's pool of pages.
    pub fn pool_spec(&self) -> PoolSpec {
        self.pool_spec
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes()
    }

    /// Most rows of a step.
    pub fn step_rows(&self) -> usize {
        self.step_rows
    }

    /// From now on measures the seconds spent in each layer, by waiting for the device after each.
    pub fn measure_layers(&mut self) {
        self.layer_seconds = Some(vec![0.0; self.config.layers]);
    }

    /// Ends that; the seconds spent in each layer since it began.
    pub fn take_layer_seconds(&mut self) -> Vec<f64> {
        self.layer_seconds.take().unwrap_or_default()
    }

    /// Waits until the device has done everything it was asked for: time is measured around this.
    ///
    /// # Errors
    /// A fault of the device, also of what was asked of it before.
    pub fn finish(&self) -> Result<(), Error> {
        Ok(self.backend.finish()?)
    }

    fn shape(&self, kind: LayerKind) -> AttentionShape {
        AttentionShape {
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
            head_dim: self.config.head_dim,
            scale: self.config.attention_scale,
            window: kind.window(),
        }
    }

    /// Runs the lowest `layers` layers over the rows of several sequences, appending K and V. With every
    /// layer run, the wanted logits are appended to `logits`, `vocab` values a row, in row order. With
    /// fewer, the last of them computes K and V only (the recompute of a layer's cells).
    ///
    /// # Errors
    /// More rows than a step has, or a fault of the device.
    pub fn forward(
        &mut self,
        sequences: &[SequenceRows<'_>],
        layers: usize,
        logits: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let rows: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        if rows == 0 || layers == 0 {
            return Ok(());
        }
        if rows > self.step_rows || layers > self.config.layers {
            return Err(Error::internal(format!(
                "a step of {rows} rows and {layers} layers is larger than {} rows and {} layers",
                self.step_rows, self.config.layers
            )));
        }
        let ids: Vec<u32> = sequences.iter().flat_map(|sequence| sequence.tokens).copied().collect();
        let positions: Vec<u32> = sequences
            .iter()
            .flat_map(|sequence| (sequence.start..).take(sequence.tokens.len()))
            .map(|position| position as u32)
            .collect();
        self.backend.embed(&self.weights.embedding, &ids, &mut self.buffers.hidden)?;
        if let Some(factor) = self.config.embedding_scale {
            self.backend.scale(&mut self.buffers.hidden, factor, rows)?;
        }
        for layer in 0..layers {
            let begun = Instant::now();
            let whole = layer + 1 < layers || layers == self.config.layers;
            self.layer(layer, sequences, &positions, whole)?;
            if self.layer_seconds.is_some() {
                self.backend.finish()?;
            }
            if let Some(seconds) = &mut self.layer_seconds {
                seconds[layer] += begun.elapsed().as_secs_f64();
            }
        }
        if layers == self.config.layers {
            self.logits(&wanted_rows(sequences), logits)?;
        }
        Ok(())
    }

    /// One layer; only its K and V unless `whole`.
    fn layer(
        &mut self,
        index: usize,
        sequences: &[SequenceRows<'_>],
        positions: &[u32],
        whole: bool,
    ) -> Result<(), Error> {
        let kind = self.config.layer_kinds[index];
        let shape = self.shape(kind);
        let rope = match kind {
            LayerKind::Full => &self.rope,
            LayerKind::Window(_) => self.window_rope.as_ref().unwrap_or(&self.rope),
        };
        let (config, backend, rows) = (&self.config, self.backend.as_ref(), positions.len());
        let (head_dim, pairing) = (config.head_dim, config.rope_pairing);
        let Buffers { hidden, normed, query, key, value, attended, projected, gate, up, .. } =
            &mut self.buffers;
        let layer: &Layer<B> = &self.weights.layers[index];

        backend.rms_norm(hidden, &layer.attention_norm, config.rms_eps, normed, rows)?;
        let mut products = vec![layer.key.product_to(key), layer.value.product_to(value)];
        if whole {
            products.push(layer.query.product_to(query));
        }
        backend.linears(&mut products, normed, rows)?;
        if let Some([_, norm]) = &layer.head_norms {
            backend.head_norm(key, config.kv_heads, norm, config.rms_eps, rows)?;
        }
        backend.rope(key, config.kv_heads, head_dim, rope, pairing, positions)?;
        if let Some([factors, _]) = &layer.key_scales {
            backend.scale_channels(key, factors, rows)?;
        }
        let tables: Vec<Vec<&[PageId]>> = sequences
            .iter()
            .map(|sequence| (0..config.kv_heads).map(|head| sequence.tables.pages(index, head)).collect())
            .collect();
        let groups = row_groups(sequences, &tables);
        backend.append(&mut self.pool, shape, &groups, key, value)?;
        if !whole {
            return Ok(());
        }
        if let Some([norm, _]) = &layer.head_norms {
            backend.head_norm(query, config.heads, norm, config.rms_eps, rows)?;
        }
        backend.rope(query, config.heads, head_dim, rope, pairing, positions)?;
        if let Some([_, factors]) = &layer.key_scales {
            backend.scale_channels(query, factors, rows)?;
        }
        backend.attention(&self.pool, shape, &groups, query, attended, None)?;
        backend.linear(&layer.output.weights, layer.output.bias.as_ref(), attended, projected, rows)?;
        match &layer.post_norms {
            None => backend.add(hidden, projected, rows)?,
            Some([norm, _]) => {
                backend.rms_norm(projected, norm, config.rms_eps, normed, rows)?;
                backend.add(hidden, normed, rows)?;
            }
        }

        backend.rms_norm(hidden, &layer.ffn_norm, config.rms_eps, normed, rows)?;
        backend.linears(&mut [layer.gate.product_to(gate), layer.up.product_to(up)], normed, rows)?;
        match config.gate {
            Gate::Silu => backend.swiglu(gate, up, rows)?,
            Gate::Gelu => backend.geglu(gate, up, rows)?,
        }
        backend.linear(&layer.down.weights, None, gate, projected, rows)?;
        match &layer.post_norms {
            None => backend.add(hidden, projected, rows)?,
            Some([_, norm]) => {
                backend.rms_norm(projected, norm, config.rms_eps, normed, rows)?;
                backend.add(hidden, normed, rows)?;
            }
        }
        Ok(())
    }

    fn logits(&mut self, wanted: &[usize], out: &mut Vec<f32>) -> Result<(), Error> {
        let (config, backend) = (&self.config, self.backend.as_ref());
        let buffers = &mut self.buffers;
        let head = self.weights.output.as_ref().unwrap_or(&self.weights.embedding);
        for piece in wanted.chunks(LOGIT_ROWS) {
            let rows = piece.len();
            backend.gather_rows(&buffers.hidden, piece, &mut buffers.picked)?;
            let norm = &self.weights.output_norm;
            backend.rms_norm(&buffers.picked, norm, config.rms_eps, &mut buffers.picked_normed, rows)?;
            backend.linear(head, None, &buffers.picked_normed, &mut buffers.logits, rows)?;
            let begin = out.len();
            out.resize(begin + rows * config.vocab, 0.0);
            backend.read(&buffers.logits, rows, &mut out[begin..])?;
        }
        Ok(())
    }

    /// Copies a page before its new owner writes to it.
    ///
    /// # Errors
    /// A page outside the pool.
    pub fn copy_page(&mut self, source: PageId, target: PageId) -> Result<(), Error> {
        Ok(self.backend.copy_page(&mut self.pool, source, target)?)
    }

    /// Moves tokens of a layer to an earlier place ([`Backend::relocate`]).
    pub(super) fn move_tokens(
        &mut self,
        pages: &[&[PageId]],
        kv_type: KvType,
        shape: &CellShape,
        to: usize,
    ) -> Result<(), Error> {
        Ok(self.backend.relocate(&mut self.pool, kv_type, pages, shape, to)?)
    }

    /// Bytes of the cell of `tokens` tokens in one layer.
    pub fn cell_bytes(&self, tokens: usize) -> usize {
        self.pool_spec.cell_bytes(self.config.kv_heads, tokens)
    }

    /// Copies one cell from its pages (per KV head, in token order).
    ///
    /// # Errors
    /// A page outside the pool.
    pub fn gather_cell(&self, pages: &[&[PageId]], tokens: usize) -> Result<Vec<u8>, Error> {
        let mut cell = vec![0; self.cell_bytes(tokens)];
        self.backend.gather_cell(&self.pool, pages, tokens, &mut cell)?;
        Ok(cell)
    }

    /// Copies one cell from its pages, packed by a codec on the way.
    ///
    /// # Errors
    /// A page outside the pool, pages that are not f16, or another shape than theirs.
    pub fn gather_packed(
        &self,
        pages: &[&[PageId]],
        codec: Codec,
        shape: &CellShape,
    ) -> Result<Vec<u8>, Error> {
        let mut packed = vec![0; shape.packed_bytes(codec)];
        self.backend.gather_packed(&self.pool, pages, codec, shape, &mut packed)?;
        Ok(packed)
    }

    /// Copies one packed cell to its pages.
    ///
    /// # Errors
    /// As [`Engine::gather_packed`], or a cell of another length.
    pub fn scatter_packed(
        &mut self,
        pages: &[&[PageId]],
        codec: Codec,
        shape: &CellShape,
        packed: &[u8],
    ) -> Result<(), Error> {
        Ok(self.backend.scatter_packed(&mut self.pool, pages, codec, shape, packed)?)
    }

    /// Copies one cell from its pages, packed without loss on the way.
    ///
    /// # Errors
    /// A page outside the pool, or a compressor that has no memory.
    pub fn gather_lossless(&self, pages: &[&[PageId]], tokens: usize) -> Result<Vec<u8>, Error> {
        Ok(self.backend.gather_lossless(&self.pool, pages, &self.cell_layout(tokens))?)
    }

    /// Copies one cell that was packed without loss to its pages.
    ///
    /// # Errors
    /// A page outside the pool, or bytes that are no packed cell of so many tokens.
    pub fn scatter_lossless(
        &mut self,
        pages: &[&[PageId]],
        tokens: usize,
        packed: &[u8],
    ) -> Result<(), Error> {
        let layout = self.cell_layout(tokens);
        Ok(self.backend.scatter_lossless(&mut self.pool, pages, &layout, packed)?)
    }

    /// How a cell of `tokens` tokens is laid out.
    fn cell_layout(&self, tokens: usize) -> CellLayout {
        let PoolSpec { head_dim, kv_type, .. } = self.pool_spec;
        CellLayout { kv_heads: self.config.kv_heads, tokens, head_dim, kv_type }
    }

    /// Copies one cell to its pages.
    ///
    /// # Errors
    /// A page outside the pool, or a cell of another length.
    pub fn scatter_cell(&mut self, pages: &[&[PageId]], tokens: usize, cell: &[u8]) -> Result<(), Error> {
        Ok(self.backend.scatter_cell(&mut self.pool, pages, tokens, cell)?)
    }
}

/// Indices of the rows that give logits.
fn wanted_rows(sequences: &[SequenceRows<'_>]) -> Vec<usize> {
    let mut first = 0;
    let mut wanted = Vec::new();
    for sequence in sequences {
        let rows = sequence.tokens.len();
        match sequence.logits {
            LogitRows::None => {}
            LogitRows::Last => wanted.push(first + rows - 1),
            LogitRows::All => wanted.extend(first..first + rows),
        }
        first += rows;
    }
    wanted
}

fn row_groups<'a>(sequences: &[SequenceRows<'_>], tables: &'a [Vec<&'a [PageId]>]) -> Vec<RowGroup<'a>> {
    let mut first_row = 0;
    sequences
        .iter()
        .zip(tables)
        .map(|(sequence, tables)| {
            let rows = sequence.tokens.len();
            let group = RowGroup { tables, first_row, rows, start: sequence.start };
            first_row += rows;
            group
        })
        .collect()
}
