//! What a model is: its shape, read from the metadata of a model file and checked.
//!
//! Owns the mapping from what model files say to the numbers the engine needs, and refuses by name
//! everything this runtime would compute wrongly (another architecture, scaled RoPE, experts,
//! unknown tensors). `gguf` reads the keys of GGUF files, `hub` the `config.json` of checkpoints.
//! Knows no weights' values and no kernels.

mod gguf;
mod hub;

use std::collections::HashSet;
use std::fmt;

use kernels::backend::{KvType, RopePairing};
use kernels::formats::TensorType;

use super::checkpoint::CheckpointError;
use super::gguf::{GgufError, TensorView};

/// Why a model was refused.
#[derive(Debug, thiserror::Error)]
pub enum ArchitectureError {
    /// The metadata or tensor directory lacks something or has it in another type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A checkpoint lacks something or has it in another type.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// An architecture this version does not know.
    #[error("architecture `{found}` is not supported (supported: {supported})")]
    Unsupported {
        /// What the file names.
        found: String,
        /// What would work in such a file.
        supported: &'static str,
    },
    /// A feature of the architecture this version does not know.
    #[error("{feature} is not supported: {found} (supported: {supported})")]
    Feature {
        /// The feature.
        feature: &'static str,
        /// What the file asks for.
        found: String,
        /// What would work.
        supported: String,
    },
    /// A value that cannot be right.
    #[error("metadata key `{key}`: {problem}; convert or download the model again")]
    Invalid {
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor whose shape contradicts the metadata.
    #[error("tensor `{name}` is {rows} x {cols}, expected {want_rows} x {want_cols} (outputs x inputs)")]
    Shape {
        /// The tensor.
        name: String,
        /// Outputs in the file.
        rows: usize,
        /// Inputs in the file.
        cols: usize,
        /// Outputs expected.
        want_rows: usize,
        /// Inputs expected.
        want_cols: usize,
    },
    /// A tensor that this architecture does not have; ignoring it would give wrong results.
    #[error("tensor `{name}` is not part of architecture `{architecture}` as implemented here")]
    UnexpectedTensor {
        /// The tensor.
        name: String,
        /// The architecture.
        architecture: &'static str,
    },
}

/// A family of decoder-only models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama and models of its shape (SmolLM2).
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3: norms over the heads of Q and K, no biases.
    Qwen3,
    /// The text part of Gemma 3: window layers, GeGLU, norms around both halves of a layer.
    Gemma3,
}

impl Architecture {
    /// The name in `general.architecture`, which is also the prefix of the model's keys.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
            Architecture::Gemma3 => "gemma3",
        }
    }

    /// Whether the heads of Q and K are normalised before they are rotated.
    pub fn has_qk_norm(self) -> bool {
        matches!(self, Architecture::Qwen3 | Architecture::Gemma3)
    }
}

/// What a layer keeps of every token, which decides what is appended, read, saved and restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Attention over the whole context: K and V of every token are kept.
    Full,
    /// Attention over this many last tokens: K and V of older ones are dropped.
    Window(usize),
}

impl LayerKind {
    /// Tokens a row attends to, itself included; `None` for all.
    pub fn window(self) -> Option<usize> {
        match self {
            LayerKind::Full => None,
            LayerKind::Window(tokens) => Some(tokens),
        }
    }

    /// Bytes of state one token adds to such a layer.
    pub fn token_bytes(self, kv_heads: usize, head_dim: usize, kv_type: KvType) -> usize {
        match self {
            LayerKind::Full | LayerKind::Window(_) => 2 * kv_heads * kv_type.head_bytes(head_dim),
        }
    }
}

/// The name used in contracts and reports.
impl fmt::Display for LayerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerKind::Full => f.write_str("full"),
            LayerKind::Window(tokens) => write!(f, "window:{tokens}"),
        }
    }
}

/// What gates the feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gate {
    /// SwiGLU.
    Silu,
    /// GeGLU, with the tanh form of GELU.
    Gelu,
}

/// Smallest and largest head size with kernels, and the step between sizes.
const HEAD_DIMS: (usize, usize, usize) = (16, 256, 16);
/// Bounds that no supported model comes near; they keep later arithmetic from overflowing.
const MAX_LAYERS: usize = 1024;
const MAX_WIDTH: usize = 1 << 20;
const MAX_CONTEXT: usize = 1 << 24;

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Transformer layers.
    pub layers: usize,
    /// Channels of the residual stream.
    pub hidden: usize,
    /// Channels of the feed-forward network.
    pub ffn: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads; `heads` is a multiple.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Tokens in the vocabulary: rows of the embedding and of the logits.
    pub vocab: usize,
    /// Longest context the model was trained for, in tokens.
    pub context_length: usize,
    /// Epsilon of the RMS norms.
    pub rms_eps: f32,
    /// Base of the rotary angles.
    pub rope_base: f32,
    /// Base of the rotary angles of window layers, where it is another one.
    pub window_rope_base: Option<f32>,
    /// Channels of a head that are rotated (all of them).
    pub rope_dims: usize,
    /// Which channels rotate together.
    pub rope_pairing: RopePairing,
    /// Whether the embedding matrix is also the output matrix.
    pub tied_embeddings: bool,
    /// Whether Q, K and V have biases.
    pub qkv_bias: bool,
    /// Whether the heads of Q and K are normalised before they are rotated.
    pub qk_norm: bool,
    /// Whether what attention and the feed-forward network give is normalised before it is added.
    pub post_norms: bool,
    /// What gates the feed-forward network.
    pub gate: Gate,
    /// Factor on the embedding, where there is one.
    pub embedding_scale: Option<f32>,
    /// Factor on the attention scores.
    pub attention_scale: f32,
    /// Kind of each layer; `layers` entries.
    pub layer_kinds: Vec<LayerKind>,
}

impl ModelConfig {
    /// Bytes of KV that one token takes over all layers, as stored.
    pub fn kv_token_bytes(&self, kv_type: KvType) -> usize {
        self.layer_kinds.iter().map(|kind| kind.token_bytes(self.kv_heads, self.head_dim, kv_type)).sum()
    }

    /// Checks name, shape and type of every tensor: `find` gives one by its name, `names` are all of them.
    fn check_tensors<'a>(
        &self,
        find: Find<'_, 'a>,
        mut names: impl Iterator<Item = &'a str>,
    ) -> Result<(), ArchitectureError> {
        let mut known = HashSet::new();
        let mut matrix = |name: &str, rows: usize, cols: usize| {
            known.insert(name.to_string());
            check_shape(find, name, rows, cols, false)
        };
        matrix(TOKEN_EMBD, self.vocab, self.hidden)?;
        if !self.tied_embeddings {
            matrix(OUTPUT, self.vocab, self.hidden)?;
        }
        let (q_width, kv_width) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for layer in 0..self.layers {
            let names = LayerTensors::new(layer);
            matrix(&names.attn_q, q_width, self.hidden)?;
            matrix(&names.attn_k, kv_width, self.hidden)?;
            matrix(&names.attn_v, kv_width, self.hidden)?;
            matrix(&names.attn_output, self.hidden, q_width)?;
            matrix(&names.ffn_gate, self.ffn, self.hidden)?;
            matrix(&names.ffn_up, self.ffn, self.hidden)?;
            matrix(&names.ffn_down, self.hidden, self.ffn)?;
        }
        let mut vector = |name: &str, width: usize| {
            known.insert(name.to_string());
            check_shape(find, name, 1, width, true)
        };
        vector(OUTPUT_NORM, self.hidden)?;
        for layer in 0..self.layers {
            let names = LayerTensors::new(layer);
            vector(&names.attn_norm, self.hidden)?;
            vector(&names.ffn_norm, self.hidden)?;
            if self.post_norms {
                vector(&names.attn_post_norm, self.hidden)?;
                vector(&names.ffn_post_norm, self.hidden)?;
            }
            if self.qk_norm {
                vector(&names.attn_q_norm, self.head_dim)?;
                vector(&names.attn_k_norm, self.head_dim)?;
            }
            if self.qkv_bias {
                vector(&names.attn_q_bias, q_width)?;
                vector(&names.attn_k_bias, kv_width)?;
                vector(&names.attn_v_bias, kv_width)?;
            }
        }
        match names.find(|name| !known.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(ArchitectureError::UnexpectedTensor {
                name: name.to_string(),
                architecture: self.architecture.name(),
            }),
        }
    }
}

/// Gives a tensor by its name.
type Find<'f, 'a> = &'f dyn Fn(&str) -> Result<TensorView<'a>, ArchitectureError>;

fn check_shape(
    find: Find<'_, '_>,
    name: &str,
    want_rows: usize,
    want_cols: usize,
    vector: bool,
) -> Result<(), ArchitectureError> {
    let view = find(name)?;
    let name = view.name;
    let (rows, cols) = (view.rows, view.cols);
    if (rows, cols) != (want_rows, want_cols) {
        return Err(ArchitectureError::Shape { name: name.to_string(), rows, cols, want_rows, want_cols });
    }
    if vector && !matches!(view.format, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
        return Err(GgufError::NotFloats { name: name.to_string(), format: view.format }.into());
    }
    Ok(())
}

/// The embedding matrix, vocabulary x hidden.
pub const TOKEN_EMBD: &str = "token_embd.weight";
/// The last norm.
pub const OUTPUT_NORM: &str = "output_norm.weight";
/// The output matrix, vocabulary x hidden; absent when embeddings are tied.
pub const OUTPUT: &str = "output.weight";

/// Names of the tensors of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTensors {
    /// Norm before attention.
    pub attn_norm: String,
    /// Query projection.
    pub attn_q: String,
    /// Key projection.
    pub attn_k: String,
    /// Value projection.
    pub attn_v: String,
    /// Attention output projection.
    pub attn_output: String,
    /// Query bias.
    pub attn_q_bias: String,
    /// Key bias.
    pub attn_k_bias: String,
    /// Value bias.
    pub attn_v_bias: String,
    /// Norm of each query head.
    pub attn_q_norm: String,
    /// Norm of each key head.
    pub attn_k_norm: String,
    /// Norm of what attention gives.
    pub attn_post_norm: String,
    /// Norm before the feed-forward network.
    pub ffn_norm: String,
    /// Gate projection.
    pub ffn_gate: String,
    /// Up projection.
    pub ffn_up: String,
    /// Down projection.
    pub ffn_down: String,
    /// Norm of what the feed-forward network gives.
    pub ffn_post_norm: String,
}

impl LayerTensors {
    /// The names for layer `layer`, counted from 0.
    pub fn new(layer: usize) -> LayerTensors {
        let name = |part: &str| format!("blk.{layer}.{part}");
        LayerTensors {
            attn_norm: name("attn_norm.weight"),
            attn_q: name("attn_q.weight"),
            attn_k: name("attn_k.weight"),
            attn_v: name("attn_v.weight"),
            attn_output: name("attn_output.weight"),
            attn_q_bias: name("attn_q.bias"),
            attn_k_bias: name("attn_k.bias"),
            attn_v_bias: name("attn_v.bias"),
            attn_q_norm: name("attn_q_norm.weight"),
            attn_k_norm: name("attn_k_norm.weight"),
            attn_post_norm: name("post_attention_norm.weight"),
            ffn_norm: name("ffn_norm.weight"),
            ffn_gate: name("ffn_gate.weight"),
            ffn_up: name("ffn_up.weight"),
            ffn_down: name("ffn_down.weight"),
            ffn_post_norm: name("post_ffw_norm.weight"),
        }
    }
}

/// Refuses a head size without kernels.
fn check_head_dim(head_dim: usize) -> Result<usize, ArchitectureError> {
    let (smallest, largest, step) = HEAD_DIMS;
    if (smallest..=largest).contains(&head_dim) && head_dim.is_multiple_of(step) {
        return Ok(head_dim);
    }
    Err(ArchitectureError::Feature {
        feature: "head size",
        found: head_dim.to_string(),
        supported: format!("multiples of {step} from {smallest} to {largest}"),
    })
}
