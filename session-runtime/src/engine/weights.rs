//! A model's weights on a device.

use kernels::backend::{Backend, KvType, MatrixSpec, Output, PoolSpec};
use kernels::error::KernelError;

use super::key_scales;
use crate::error::Error;
use crate::models::TensorSource;
use crate::models::architecture::{LayerTensors, ModelConfig, OUTPUT, OUTPUT_NORM, TOKEN_EMBD};
use crate::models::progress::{Event, Progress, Stage};

/// One transformer layer.
pub(super) struct Layer<B: Backend> {
    pub attention_norm: B::Vector,
    pub query: Linear<B>,
    /// Norms of the heads of Q and K.
    pub head_norms: Option<[B::Vector; 2]>,
    pub key: Linear<B>,
    pub value: Linear<B>,
    pub output: Linear<B>,
    pub ffn_norm: B::Vector,
    pub gate: Linear<B>,
    pub up: Linear<B>,
    pub down: Linear<B>,
    /// Factors of the channels of K and of Q, where keys are stored with few bits.
    pub key_scales: Option<[B::Vector; 2]>,
    /// Norms of what attention and the feed-forward network give.
    pub post_norms: Option<[B::Vector; 2]>,
}

/// A matrix with its optional bias.
pub(super) struct Linear<B: Backend> {
    pub weights: B::Matrix,
    pub bias: Option<B::Vector>,
}

impl<B: Backend> Linear<B> {
    /// Its product, to be written to `out`.
    pub(super) fn product_to<'a>(&'a self, out: &'a mut B::Tensor) -> Output<'a, B> {
        Output { weights: &self.weights, bias: self.bias.as_ref(), out }
    }
}

/// All weights of a model.
pub struct Weights<B: Backend> {
    pub(super) embedding: B::Matrix,
    pub(super) layers: Vec<Layer<B>>,
    pub(super) output_norm: B::Vector,
    /// Absent when the embedding is tied.
    pub(super) output: Option<B::Matrix>,
    bytes: usize,
}

impl<B: Backend> Weights<B> {
    /// Repacks every tensor of a model for the device, to be used with KV of `kv_type`. `progress` is told its
    /// bytes, as those of `source`.
    ///
    /// # Errors
    /// A missing tensor, a wrong shape, or what the backend refuses; all name the tensor.
    pub fn load(
        backend: &B,
        file: &dyn TensorSource,
        config: &ModelConfig,
        kv_type: KvType,
        source: &str,
        progress: &dyn Progress,
    ) -> Result<Self, Error> {
        let mut loader = Loader { backend, file, kv_type, bytes: 0, done: 0, source, progress };
        let embedding = loader.matrix(TOKEN_EMBD, config.vocab, config.hidden)?;
        let layers =
            (0..config.layers).map(|index| loader.layer(config, index)).collect::<Result<Vec<_>, Error>>()?;
        let output_norm = loader.vector(OUTPUT_NORM, config.hidden)?;
        let output = if config.tied_embeddings {
            None
        } else {
            Some(loader.matrix(OUTPUT, config.vocab, config.hidden)?)
        };
        progress.event(Event::Finished);
        Ok(Self { embedding, layers, output_norm, output, bytes: loader.bytes })
    }

    /// Weights of a device that computes nothing: a model's shape without its numbers.
    pub fn blank(config: &ModelConfig) -> Self
    where
        B::Matrix: Default,
        B::Vector: Default,
    {
        let linear = || Linear { weights: B::Matrix::default(), bias: None };
        let norms = |there: bool| there.then(|| [B::Vector::default(), B::Vector::default()]);
        let layer = |_| Layer {
            attention_norm: B::Vector::default(),
            query: linear(),
            head_norms: norms(config.qk_norm),
            key: linear(),
            value: linear(),
            output: linear(),
            ffn_norm: B::Vector::default(),
            gate: linear(),
            up: linear(),
            down: linear(),
            key_scales: None,
            post_norms: norms(config.post_norms),
        };
        Self {
            embedding: B::Matrix::default(),
            layers: (0..config.layers).map(layer).collect(),
            output_norm: B::Vector::default(),
            output: None,
            bytes: 0,
        }
    }

    /// Bytes the matrices occupy on the device.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

struct Loader<'a, B: Backend> {
    backend: &'a B,
    file: &'a dyn TensorSource,
    kv_type: KvType,
    bytes: usize,
    /// Bytes read of the file.
    done: u64,
    source: &'a str,
    progress: &'a dyn Progress,
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&mut self, config: &ModelConfig, index: usize) -> Result<Layer<B>, Error> {
        let names = LayerTensors::new(index);
        let (hidden, query_width) = (config.hidden, config.heads * config.head_dim);
        let kv_width = config.kv_heads * config.head_dim;
        let bias = |name| config.qkv_bias.then_some(name);
        let head_norms = if config.qk_norm {
            let dim = config.head_dim;
            Some([self.vector(&names.attn_q_norm, dim)?, self.vector(&names.attn_k_norm, dim)?])
        } else {
            None
        };
        let key_scales = if config.qkv_bias && self.kv_type == KvType::Int8 {
            let scales = key_scales::of_bias(config, &self.file.vector(&names.attn_k_bias)?);
            let load = |factors: &[f32]| {
                let name = self.file.stored_name(&names.attn_k_bias);
                self.backend.load_vector(&name, factors).map_err(load_refused)
            };
            Some([load(&scales.key)?, load(&scales.query)?])
        } else {
            None
        };
        let post_norms = if config.post_norms {
            Some([self.vector(&names.attn_post_norm, hidden)?, self.vector(&names.ffn_post_norm, hidden)?])
        } else {
            None
        };
        Ok(Layer {
            attention_norm: self.vector(&names.attn_norm, hidden)?,
            query: self.linear(&names.attn_q, bias(&names.attn_q_bias), query_width, hidden)?,
            key: self.linear(&names.attn_k, bias(&names.attn_k_bias), kv_width, hidden)?,
            value: self.linear(&names.attn_v, bias(&names.attn_v_bias), kv_width, hidden)?,
            output: self.linear(&names.attn_output, None, hidden, query_width)?,
            ffn_norm: self.vector(&names.ffn_norm, hidden)?,
            gate: self.linear(&names.ffn_gate, None, config.ffn, hidden)?,
            up: self.linear(&names.ffn_up, None, config.ffn, hidden)?,
            down: self.linear(&names.ffn_down, None, hidden, config.ffn)?,
            head_norms,
            key_scales,
            post_norms,
        })
    }

    fn linear(
        &mut self,
        name: &str,
        bias: Option<&String>,
        rows: usize,
        cols: usize,
    ) -> Result<Linear<B>, Error> {
        let weights = self.matrix(name, rows, cols)?;
        let bias = bias.map(|bias| self.vector(bias, rows)).transpose()?;
        Ok(Linear { weights, bias })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<B::Matrix, Error> {
        let tensor = self.file.matrix(name)?;
        if (tensor.rows, tensor.cols) != (rows, cols) {
            return Err(Error::invalid(
                "model_malformed",
                format!(
                    "tensor `{}` has {} x {} values where the model's metadata asks for {rows} x {cols}: \
                     the file is damaged or not of the stated architecture",
                    self.file.stored_name(name),
                    tensor.rows,
                    tensor.cols
                ),
            ));
        }
        let spec = MatrixSpec { name: self.file.stored_name(name), format: tensor.format, rows, cols };
        let matrix = self.backend.load_matrix(&spec, &tensor.bytes).map_err(load_refused)?;
        self.bytes += self.backend.matrix_bytes(&matrix);
        self.done += tensor.bytes.len() as u64;
        let total = self.file.stored_bytes().max(self.done);
        self.progress.bytes(self.source, Stage::Repacking, self.done, Some(total));
        Ok(matrix)
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<B::Vector, Error> {
        let values = self.file.vector(name)?;
        if values.len() != length {
            return Err(Error::invalid(
                "model_malformed",
                format!(
                    "tensor `{}` has {} values where {length} are expected: the file is damaged or not of the \
                     stated architecture",
                    self.file.stored_name(name),
                    values.len()
                ),
            ));
        }
        self.backend.load_vector(&self.file.stored_name(name), &values).map_err(load_refused)
    }
}

/// What a device says of a tensor.
fn load_refused(error: KernelError) -> Error {
    let message = error.to_string();
    match error {
        KernelError::NotFinite { .. } | KernelError::ByteCount { .. } => {
            Error::invalid("model_malformed", message)
        }
        KernelError::OutOfMemory { .. } | KernelError::Device(_) => error.into(),
        _ => Error::invalid("model_unsupported", message),
    }
}

/// The pool a device budget pays for.
///
/// # Errors
/// A budget below one page per (layer, KV head).
pub fn pool_spec(config: &ModelConfig, kv_type: KvType, budget_bytes: u64) -> Result<PoolSpec, Error> {
    let mut spec = PoolSpec { pages: 0, head_dim: config.head_dim, kv_type };
    let pages = budget_bytes / spec.page_bytes() as u64;
    let least = (config.layers * config.kv_heads) as u64;
    if pages < least {
        return Err(Error::invalid(
            "device_budget_too_small",
            format!(
                "a device budget of {budget_bytes} bytes holds no token of this model: give at least {} bytes",
                least * spec.page_bytes() as u64
            ),
        ));
    }
    spec.pages = usize::try_from(pages.min(u64::from(u32::MAX) - 1)).map_err(Error::internal)?;
    Ok(spec)
}
