//! The seam between the forward pass and a device.
//!
//! A backend owns its weights, its activation buffers and its pool of KV pages. The forward pass
//! names what to compute; the backend decides how. Every operation is *row independent*: the bits
//! of row `r` of a result depend on row `r` of the inputs and on nothing else, not on the number of
//! rows, the number of threads or the place of a page in the pool. Invariant I1 rests on that.

use crate::codec::lossless::{self, CellLayout};
use crate::codec::{self, CellShape, Codec};
use crate::error::KernelError;
use crate::formats::TensorType;

/// Tokens held by one page.
pub const PAGE_TOKENS: usize = 16;

/// Index of a page in a device pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

impl PageId {
    /// A place in a table whose page was given back: it lies before every window, so no kernel reads it. No pool
    /// has a page of this index.
    pub const ABSENT: PageId = PageId(u32::MAX);
}

/// Shape and storage type of a weight matrix as a model file holds it: `rows` outputs, each a
/// contiguous run of `cols` inputs in `format`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixSpec {
    /// Tensor name, used in errors.
    pub name: String,
    /// Storage type in the file.
    pub format: TensorType,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// How K and V are stored, in pages and in cells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    /// Rounded to f16.
    #[default]
    F16,
    /// As computed, in twice the bytes.
    F32,
    /// Rounded to eight bits and a scale for each token and block of [`SCALE_BLOCK`] channels of a head, in little more
    /// than half the bytes.
    Int8,
}

/// Channels of a head that share a scale where K and V are [`KvType::Int8`]; the last block may be shorter.
pub const SCALE_BLOCK: usize = 32;

impl KvType {
    /// Bytes of K, or of V, of one token and KV head.
    pub const fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F16 => 2 * head_dim,
            Self::F32 => 4 * head_dim,
            Self::Int8 => head_dim + size_of::<f32>() * head_dim.div_ceil(SCALE_BLOCK),
        }
    }

    /// `f16`, `f32` or `int8`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Int8 => "int8",
        }
    }
}

impl std::str::FromStr for KvType {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "f16" => Ok(Self::F16),
            "f32" => Ok(Self::F32),
            "int8" => Ok(Self::Int8),
            other => Err(format!("'{other}' is not a type of KV: use f16, f32 or int8")),
        }
    }
}

/// Size of one pool of pages: `pages` pages of `PAGE_TOKENS` tokens with `head_dim` channels for K
/// and for V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    /// Number of pages.
    pub pages: usize,
    /// Channels of one KV head.
    pub head_dim: usize,
    /// How K and V are stored.
    pub kv_type: KvType,
}

impl PoolSpec {
    /// Bytes of one page (K and V).
    pub fn page_bytes(&self) -> usize {
        2 * PAGE_TOKENS * self.kv_type.head_bytes(self.head_dim)
    }

    /// Bytes of a cell of `tokens` tokens: K and V of `kv_heads` KV heads.
    pub fn cell_bytes(&self, kv_heads: usize, tokens: usize) -> usize {
        kv_heads * 2 * tokens * self.kv_type.head_bytes(self.head_dim)
    }
}

/// How rotary embedding pairs the channels of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// Channel `2i` with `2i + 1` (the `llama` architecture in GGUF files).
    Adjacent,
    /// Channel `i` with `i + head_dim / 2` (`qwen2`, `qwen3`, and every checkpoint).
    Halves,
}

/// Rows of one sequence inside a step, for one layer. Row `first_row + r` is the token at index
/// `start + r` of the sequence: it is written to that slot by `append`, and it attends to the
/// `start + r + 1` tokens at indices `0..=start + r`, or to the last [`AttentionShape::window`] of them.
#[derive(Clone, Debug)]
pub struct RowGroup<'a> {
    /// Block tables of this layer, one per KV head: page ids in token order. Pages wholly before the window of the
    /// first row may be [`PageId::ABSENT`].
    pub tables: &'a [&'a [PageId]],
    /// First row of the group in the activation buffers.
    pub first_row: usize,
    /// Rows in the group.
    pub rows: usize,
    /// Index in the sequence of the first row's token.
    pub start: usize,
}

/// Attention shape of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// KV heads; `heads` is a multiple of it. Query head `h` reads KV head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// How many tokens a row attends to, itself included; `None` for all.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// The first token that the token at `index` attends to.
    pub fn first_seen(&self, index: usize) -> usize {
        self.window.map_or(0, |window| (index + 1).saturating_sub(window))
    }
}

/// One of several products of the same inputs.
pub struct Output<'a, B: Backend + ?Sized> {
    /// The matrix.
    pub weights: &'a B::Matrix,
    /// Added to every row.
    pub bias: Option<&'a B::Vector>,
    /// Where the product goes.
    pub out: &'a mut B::Tensor,
}

/// A device that runs the forward pass. `rows` arguments count valid rows from the start of a buffer.
pub trait Backend: Send + Sync + 'static {
    /// A weight matrix resident on the device, repacked for its kernels.
    type Matrix: Send + Sync;
    /// A vector of f32 on the device (norm weights, biases).
    type Vector: Send + Sync;
    /// Row-major f32 activations on the device.
    type Tensor: Send;
    /// A pool of KV pages on the device.
    type Pool: Send;
    /// Rotary sines and cosines on the device.
    type Rope: Send + Sync;

    /// `cpu` or `cuda`.
    fn name(&self) -> &'static str;
    /// Identity of the numbers this backend gives; a contract field. Backends of one class give the same bits.
    fn numerics_class(&self) -> &'static str;
    /// One line for people: device, instruction set, threads.
    fn describe(&self) -> String;

    /// Bytes of the device's own memory that may still be taken; `None` where its memory is the host's.
    ///
    /// # Errors
    /// A device that does not answer.
    fn free_memory(&self) -> Result<Option<u64>, KernelError> {
        Ok(None)
    }

    /// Repacks `bytes` (the tensor as in the file) for the device.
    ///
    /// # Errors
    /// Unsupported format or shape, wrong byte count, NaN or infinity in the weights; all name the tensor.
    fn load_matrix(&self, spec: &MatrixSpec, bytes: &[u8]) -> Result<Self::Matrix, KernelError>;
    /// Copies a vector to the device. Refuses NaN and infinity.
    fn load_vector(&self, name: &str, values: &[f32]) -> Result<Self::Vector, KernelError>;
    /// Allocates `rows x cols` zeroed activations.
    fn tensor(&self, rows: usize, cols: usize) -> Result<Self::Tensor, KernelError>;
    /// Allocates a pool of pages.
    fn pool(&self, spec: PoolSpec) -> Result<Self::Pool, KernelError>;
    /// Precomputes rotary factors for positions `0..positions`: angle of pair `i` at `p` is `p * base^(-2i / dims)`.
    fn rope_table(&self, base: f32, dims: usize, positions: usize) -> Result<Self::Rope, KernelError>;
    /// Bytes the matrix occupies on the device.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize;

    /// `out[r] = table[ids[r]]`, dequantised.
    fn embed(&self, table: &Self::Matrix, ids: &[u32], out: &mut Self::Tensor) -> Result<(), KernelError>;
    /// `out[r] = weights * x[r] + bias`.
    fn linear(
        &self,
        weights: &Self::Matrix,
        bias: Option<&Self::Vector>,
        x: &Self::Tensor,
        out: &mut Self::Tensor,
        rows: usize,
    ) -> Result<(), KernelError>;
    /// [`Backend::linear`] for several matrices at once, so that what they share is done once.
    fn linears(
        &self,
        products: &mut [Output<'_, Self>],
        x: &Self::Tensor,
        rows: usize,
    ) -> Result<(), KernelError>;
    /// `out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight`.
    fn rms_norm(
        &self,
        x: &Self::Tensor,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Tensor,
        rows: usize,
    ) -> Result<(), KernelError>;
    /// Normalises each head of `x[r]` by itself, in place: `rms_norm` over `heads` runs of the weight's length.
    fn head_norm(
        &self,
        x: &mut Self::Tensor,
        heads: usize,
        weight: &Self::Vector,
        eps: f32,
        rows: usize,
    ) -> Result<(), KernelError>;
    /// `x[r] *= factor`.
    fn scale(&self, x: &mut Self::Tensor, factor: f32, rows: usize) -> Result<(), KernelError>;
    /// `x[r][c] *= factors[c]`.
    fn scale_channels(
        &self,
        x: &mut Self::Tensor,
        factors: &Self::Vector,
        rows: usize,
    ) -> Result<(), KernelError>;
    /// `x[r] += y[r]`.
    fn add(&self, x: &mut Self::Tensor, y: &Self::Tensor, rows: usize) -> Result<(), KernelError>;
    /// `gate[r] = silu(gate[r]) * up[r]`.
    fn swiglu(&self, gate: &mut Self::Tensor, up: &Self::Tensor, rows: usize) -> Result<(), KernelError>;
    /// `gate[r] = gelu(gate[r]) * up[r]`, with the tanh form of GELU.
    fn geglu(&self, gate: &mut Self::Tensor, up: &Self::Tensor, rows: usize) -> Result<(), KernelError>;
    /// Rotates each head of `x[r]` (`heads * head_dim` channels) to `positions[r]`.
    fn rope(
        &self,
        x: &mut Self::Tensor,
        heads: usize,
        head_dim: usize,
        rope: &Self::Rope,
        pairing: RopePairing,
        positions: &[u32],
    ) -> Result<(), KernelError>;
    /// Rounds K and V rows (`kv_heads * head_dim` channels) to the pool's type and writes them to their pages.
    fn append(
        &self,
        pool: &mut Self::Pool,
        shape: AttentionShape,
        groups: &[RowGroup<'_>],
        k: &Self::Tensor,
        v: &Self::Tensor,
    ) -> Result<(), KernelError>;
    /// Causal attention of each row over its sequence's pages (rows must have been appended first).
    /// When `lse` is given it receives the natural log-sum-exp of the scaled scores per `[row][head]`.
    fn attention(
        &self,
        pool: &Self::Pool,
        shape: AttentionShape,
        groups: &[RowGroup<'_>],
        q: &Self::Tensor,
        out: &mut Self::Tensor,
        lse: Option<&mut [f32]>,
    ) -> Result<(), KernelError>;
    /// Copies row `rows[i]` of `x` to row `i` of `out`.
    fn gather_rows(
        &self,
        x: &Self::Tensor,
        rows: &[usize],
        out: &mut Self::Tensor,
    ) -> Result<(), KernelError>;
    /// Waits until everything that was queued is done. A device may return from the other calls before that; those that
    /// give something to the host wait by themselves. Time is measured around this.
    fn finish(&self) -> Result<(), KernelError> {
        Ok(())
    }
    /// Copies the first `rows` rows to the host, row-major.
    fn read(&self, x: &Self::Tensor, rows: usize, out: &mut [f32]) -> Result<(), KernelError>;
    /// Copies row-major values from the host.
    fn write(&self, x: &mut Self::Tensor, values: &[f32]) -> Result<(), KernelError>;

    /// Copies page `source` over page `target` (copy-on-write).
    fn copy_page(&self, pool: &mut Self::Pool, source: PageId, target: PageId) -> Result<(), KernelError>;
    /// Pages to cell: for each KV head, K of `tokens` tokens (`[tokens][head_dim]` in the pool's type, little-endian),
    /// then V; where they have scales, those of K follow (`[tokens][blocks]` f32), then those of V.
    /// `tables[h]` are the pages of head `h` that hold the chunk, in token order.
    fn gather_cell(
        &self,
        pool: &Self::Pool,
        tables: &[&[PageId]],
        tokens: usize,
        cell: &mut [u8],
    ) -> Result<(), KernelError>;
    /// Cell to pages, the inverse of `gather_cell`.
    fn scatter_cell(
        &self,
        pool: &mut Self::Pool,
        tables: &[&[PageId]],
        tokens: usize,
        cell: &[u8],
    ) -> Result<(), KernelError>;

    /// Moves K and V of tokens to an earlier place of their sequence, in place: values as they are, keys turned to their new
    /// positions, as [`codec::elements::turn_back`] does. `tables[h]` are the pages of head `h` from the sequence's first token on, of f16
    /// or f32; `shape` says which tokens move (`start`, `tokens`) and how keys turn, `to` where the first of them goes.
    fn relocate(
        &self,
        pool: &mut Self::Pool,
        kv_type: KvType,
        tables: &[&[PageId]],
        shape: &CellShape,
        to: usize,
    ) -> Result<(), KernelError> {
        codec::relocation::through_cells(self, pool, kv_type, tables, shape, to)
    }

    /// [`Backend::gather_cell`] of f16 pages, packed by a codec on the way: the bytes of [`codec::pack`]. `shape` is the cell's,
    /// with as many KV heads as there are tables.
    fn gather_packed(
        &self,
        pool: &Self::Pool,
        tables: &[&[PageId]],
        codec: Codec,
        shape: &CellShape,
        packed: &mut [u8],
    ) -> Result<(), KernelError> {
        shape.check("bytes of the packed cell", packed.len(), shape.packed_bytes(codec))?;
        let mut cell = vec![0; shape.bytes()];
        self.gather_cell(pool, tables, shape.tokens, &mut cell)?;
        packed.copy_from_slice(&codec::pack(codec, shape, &cell)?);
        Ok(())
    }

    /// The inverse of [`Backend::gather_packed`]: [`codec::unpack`], then [`Backend::scatter_cell`].
    fn scatter_packed(
        &self,
        pool: &mut Self::Pool,
        tables: &[&[PageId]],
        codec: Codec,
        shape: &CellShape,
        packed: &[u8],
    ) -> Result<(), KernelError> {
        self.scatter_cell(pool, tables, shape.tokens, &codec::unpack(codec, shape, packed)?)
    }

    /// [`Backend::gather_cell`], packed without loss on the way: the bytes of [`lossless::pack`], which is work of the host.
    /// `layout` is the cell's, with as many KV heads as there are tables.
    fn gather_lossless(
        &self,
        pool: &Self::Pool,
        tables: &[&[PageId]],
        layout: &CellLayout,
    ) -> Result<Vec<u8>, KernelError> {
        let mut cell = vec![0; layout.bytes()];
        self.gather_cell(pool, tables, layout.tokens, &mut cell)?;
        lossless::pack(layout, &cell)
    }

    /// The inverse of [`Backend::gather_lossless`]: [`lossless::unpack`], then [`Backend::scatter_cell`].
    fn scatter_lossless(
        &self,
        pool: &mut Self::Pool,
        tables: &[&[PageId]],
        layout: &CellLayout,
        packed: &[u8],
    ) -> Result<(), KernelError> {
        self.scatter_cell(pool, tables, layout.tokens, &lossless::unpack(layout, packed)?)
    }
}
