//! A model's weights on a device.

use kernels::backend::{Backend, MatrixSpec, PoolSpec};

use crate::error::Error;
use crate::models::architecture::ModelConfig;
use crate::models::gguf::Gguf;

/// One transformer layer.
pub(super) struct Layer<B: Backend> {
    pub attention_norm: B::Vector,
    pub query: Linear<B>,
    pub key: Linear<B>,
    pub value: Linear<B>,
    pub output: Linear<B>,
    pub ffn_norm: B::Vector,
    pub gate: Linear<B>,
    pub up: Linear<B>,
    pub down: Linear<B>,
}

/// A matrix with its optional bias.
pub(super) struct Linear<B: Backend> {
    pub weights: B::Matrix,
    pub bias: Option<B::Vector>,
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
    /// Repacks every tensor of a model file for the device. `progress` is told tensors done and in all.
    ///
    /// # Errors
    /// A missing tensor, a wrong shape, or what the backend refuses; all name the tensor.
    pub fn load(
        backend: &B,
        gguf: &Gguf,
        config: &ModelConfig,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let mut loader = Loader { backend, gguf, bytes: 0, done: 0, total: config.layers * 9 + 3, progress };
        let embedding = loader.matrix("token_embd.weight", config.vocab, config.hidden)?;
        let layers =
            (0..config.layers).map(|index| loader.layer(config, index)).collect::<Result<Vec<_>, Error>>()?;
        let output_norm = loader.vector("output_norm.weight", config.hidden)?;
        let output = if config.tied_embeddings {
            None
        } else {
            Some(loader.matrix("output.weight", config.vocab, config.hidden)?)
        };
        Ok(Self { embedding, layers, output_norm, output, bytes: loader.bytes })
    }

    /// Bytes the matrices occupy on the device.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

struct Loader<'a, B: Backend> {
    backend: &'a B,
    gguf: &'a Gguf,
    bytes: usize,
    done: usize,
    total: usize,
    progress: &'a mut dyn FnMut(usize, usize),
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&mut self, config: &ModelConfig, index: usize) -> Result<Layer<B>, Error> {
        let name = |part: &str| format!("blk.{index}.{part}");
        let query_width = config.heads * config.head_dim;
        let kv_width = config.kv_heads * config.head_dim;
        Ok(Layer {
            attention_norm: self.vector(&name("attn_norm.weight"), config.hidden)?,
            query: self.linear(&name("attn_q"), query_width, config.hidden, config.qkv_bias)?,
            key: self.linear(&name("attn_k"), kv_width, config.hidden, config.qkv_bias)?,
            value: self.linear(&name("attn_v"), kv_width, config.hidden, config.qkv_bias)?,
            output: self.linear(&name("attn_output"), config.hidden, query_width, false)?,
            ffn_norm: self.vector(&name("ffn_norm.weight"), config.hidden)?,
            gate: self.linear(&name("ffn_gate"), config.ffn, config.hidden, false)?,
            up: self.linear(&name("ffn_up"), config.ffn, config.hidden, false)?,
            down: self.linear(&name("ffn_down"), config.hidden, config.ffn, false)?,
        })
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize, bias: bool) -> Result<Linear<B>, Error> {
        let weights = self.matrix(&format!("{name}.weight"), rows, cols)?;
        let bias = if bias { Some(self.vector(&format!("{name}.bias"), rows)?) } else { None };
        Ok(Linear { weights, bias })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<B::Matrix, Error> {
        let tensor = self.gguf.tensor(name).map_err(crate::models::refusal)?;
        if (tensor.rows, tensor.cols) != (rows, cols) {
            return Err(Error::invalid(
                "model_malformed",
                format!(
                    "tensor '{name}' has {} x {} values where the model's metadata asks for {rows} x {cols}: \
                     the file is damaged or not of the stated architecture",
                    tensor.rows, tensor.cols
                ),
            ));
        }
        let spec = MatrixSpec { name: name.to_owned(), format: tensor.format, rows, cols };
        let matrix = self.backend.load_matrix(&spec, tensor.bytes).map_err(load_refused)?;
        self.bytes += self.backend.matrix_bytes(&matrix);
        self.step();
        Ok(matrix)
    }

    fn vector(&mut self, name: &str, length: usize) -> Result<B::Vector, Error> {
        let values = self.gguf.vector(name).map_err(crate::models::refusal)?;
        if values.len() != length {
            return Err(Error::invalid(
                "model_malformed",
                format!("tensor '{name}' has {} values, {length} expected", values.len()),
            ));
        }
        let vector = self.backend.load_vector(name, &values).map_err(load_refused)?;
        self.step();
        Ok(vector)
    }

    fn step(&mut self) {
        self.done += 1;
        (self.progress)(self.done.min(self.total), self.total);
    }
}

fn load_refused(error: kernels::error::KernelError) -> Error {
    Error::invalid("model_unsupported", error.to_string())
}

/// The pool a device budget pays for.
///
/// # Errors
/// A budget below one page per (layer, KV head).
pub fn pool_spec(config: &ModelConfig, budget_bytes: u64) -> Result<PoolSpec, Error> {
    let mut spec = PoolSpec { pages: 0, head_dim: config.head_dim };
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

/// Refuses weights that would not fit in memory, before anything is allocated.
///
/// # Errors
/// The bytes needed and available.
pub(super) fn check_memory(file_bytes: u64, pool_bytes: u64) -> Result<(), Error> {
    // Repacked weights take at most about twice the file's bytes.
    let needed = file_bytes * 2 + pool_bytes;
    match available_memory() {
        Some(available) if needed > available => Err(Error::new(
            crate::error::ErrorKind::Limit,
            "out_of_memory",
            format!(
                "the model and its KV pool need about {} MiB and {} MiB are available: lower the device budget \
                 or choose a smaller model",
                needed >> 20,
                available >> 20
            ),
        )),
        _ => Ok(()),
    }
}

fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
