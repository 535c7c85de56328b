//! What a model is: its shape, read from the metadata of a model file and checked.
//!
//! Owns the mapping from the names in GGUF files to the numbers the engine needs, and refuses by
//! name everything this runtime would compute wrongly (another architecture, scaled RoPE, sliding
//! windows, experts, unknown tensors). Knows no weights' values and no kernels.

use std::collections::HashSet;

use kernels::backend::RopePairing;
use kernels::formats::TensorType;

use super::gguf::{Gguf, GgufError};

/// Why a model was refused.
#[derive(Debug, thiserror::Error)]
pub enum ArchitectureError {
    /// The metadata or tensor directory lacks something or has it in another type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// An architecture this version does not know.
    #[error("architecture `{found}` is not supported (supported: llama, qwen2)")]
    Unsupported {
        /// `general.architecture` of the file.
        found: String,
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
    #[error("metadata key `{key}`: {problem}")]
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
}

impl Architecture {
    /// The name in `general.architecture`, which is also the prefix of the model's keys.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
        }
    }

    /// How GGUF files of this architecture order the channels of Q and K heads.
    pub fn rope_pairing(self) -> RopePairing {
        match self {
            Architecture::Llama => RopePairing::Adjacent,
            Architecture::Qwen2 => RopePairing::Halves,
        }
    }
}

/// What a layer keeps of every token, which decides what is appended, read, saved and restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Attention over the whole context: K and V of every token are kept.
    Full,
}

impl LayerKind {
    /// Name used in contracts and reports.
    pub fn name(self) -> &'static str {
        match self {
            LayerKind::Full => "full",
        }
    }

    /// Bytes of state one token adds to such a layer, with f16 K and V.
    pub fn token_bytes(self, kv_heads: usize, head_dim: usize) -> usize {
        match self {
            LayerKind::Full => 2 * kv_heads * head_dim * 2,
        }
    }
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
    /// Channels of a head that are rotated (all of them).
    pub rope_dims: usize,
    /// Which channels rotate together.
    pub rope_pairing: RopePairing,
    /// Whether the embedding matrix is also the output matrix.
    pub tied_embeddings: bool,
    /// Whether Q, K and V have biases.
    pub qkv_bias: bool,
    /// Kind of each layer; `layers` entries.
    pub layer_kinds: Vec<LayerKind>,
}

impl ModelConfig {
    /// Reads and checks the shape of a model: metadata, and name, shape and type of every tensor.
    ///
    /// # Errors
    /// [`ArchitectureError`], which names the key or tensor and says what is supported.
    pub fn from_gguf(gguf: &Gguf) -> Result<ModelConfig, ArchitectureError> {
        let architecture = match gguf.str("general.architecture")? {
            "llama" => Architecture::Llama,
            "qwen2" => Architecture::Qwen2,
            other => return Err(ArchitectureError::Unsupported { found: other.to_string() }),
        };
        let keys = Keys { gguf, prefix: architecture.name() };
        keys.refuse_unsupported()?;
        let layers = keys.size("block_count", MAX_LAYERS)?;
        let hidden = keys.size("embedding_length", MAX_WIDTH)?;
        let heads = keys.size("attention.head_count", MAX_WIDTH)?;
        let kv_heads = keys.optional_size("attention.head_count_kv", MAX_WIDTH)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(keys.invalid(
                "attention.head_count_kv",
                format!("{heads} query heads cannot share {kv_heads} KV heads"),
            ));
        }
        let head_dim = keys.head_dim(hidden, heads)?;
        let vocab = gguf.strings("tokenizer.ggml.tokens")?.len();
        let config = ModelConfig {
            architecture,
            layers,
            hidden,
            ffn: keys.size("feed_forward_length", MAX_WIDTH)?,
            heads,
            kv_heads,
            head_dim,
            vocab,
            context_length: keys.size("context_length", MAX_CONTEXT)?,
            rms_eps: keys.positive("attention.layer_norm_rms_epsilon", None)?,
            rope_base: keys.positive("rope.freq_base", Some(10_000.0))?,
            rope_dims: head_dim,
            rope_pairing: architecture.rope_pairing(),
            tied_embeddings: !gguf.has_tensor(OUTPUT),
            qkv_bias: gguf.has_tensor(&LayerTensors::new(0).attn_q_bias),
            layer_kinds: vec![LayerKind::Full; layers],
        };
        config.check_tensors(gguf)?;
        Ok(config)
    }

    /// Bytes of KV that one token takes over all layers, with f16 K and V.
    pub fn kv_token_bytes(&self) -> usize {
        self.layer_kinds.iter().map(|kind| kind.token_bytes(self.kv_heads, self.head_dim)).sum()
    }

    fn check_tensors(&self, gguf: &Gguf) -> Result<(), ArchitectureError> {
        let mut known = HashSet::new();
        let mut matrix = |name: &str, rows: usize, cols: usize| {
            known.insert(name.to_string());
            check_shape(gguf, name, rows, cols, false)
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
            check_shape(gguf, name, 1, width, true)
        };
        vector(OUTPUT_NORM, self.hidden)?;
        for layer in 0..self.layers {
            let names = LayerTensors::new(layer);
            vector(&names.attn_norm, self.hidden)?;
            vector(&names.ffn_norm, self.hidden)?;
            if self.qkv_bias {
                vector(&names.attn_q_bias, q_width)?;
                vector(&names.attn_k_bias, kv_width)?;
                vector(&names.attn_v_bias, kv_width)?;
            }
        }
        match gguf.tensor_names().find(|name| !known.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(ArchitectureError::UnexpectedTensor {
                name: name.to_string(),
                architecture: self.architecture.name(),
            }),
        }
    }
}

fn check_shape(
    gguf: &Gguf,
    name: &str,
    want_rows: usize,
    want_cols: usize,
    vector: bool,
) -> Result<(), ArchitectureError> {
    let view = gguf.tensor(name)?;
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
    /// Norm before the feed-forward network.
    pub ffn_norm: String,
    /// Gate projection.
    pub ffn_gate: String,
    /// Up projection.
    pub ffn_up: String,
    /// Down projection.
    pub ffn_down: String,
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
            ffn_norm: name("ffn_norm.weight"),
            ffn_gate: name("ffn_gate.weight"),
            ffn_up: name("ffn_up.weight"),
            ffn_down: name("ffn_down.weight"),
        }
    }
}

/// Reads the keys of one architecture.
struct Keys<'a> {
    gguf: &'a Gguf,
    prefix: &'static str,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn invalid(&self, name: &str, problem: String) -> ArchitectureError {
        ArchitectureError::Invalid { key: self.key(name), problem }
    }

    fn size(&self, name: &str, limit: usize) -> Result<usize, ArchitectureError> {
        let size = self.gguf.u32(&self.key(name))? as usize;
        if size == 0 || size > limit {
            return Err(self.invalid(name, format!("{size} is outside 1..={limit}")));
        }
        Ok(size)
    }

    fn optional_size(&self, name: &str, limit: usize) -> Result<Option<usize>, ArchitectureError> {
        if self.gguf.get(&self.key(name)).is_none() { Ok(None) } else { self.size(name, limit).map(Some) }
    }

    fn positive(&self, name: &str, default: Option<f32>) -> Result<f32, ArchitectureError> {
        let key = self.key(name);
        let value = match (self.gguf.get(&key), default) {
            (None, Some(default)) => default,
            _ => self.gguf.f32(&key)?,
        };
        if value.is_finite() && value > 0.0 {
            Ok(value)
        } else {
            Err(self.invalid(name, format!("{value} is not a positive number")))
        }
    }

    fn head_dim(&self, hidden: usize, heads: usize) -> Result<usize, ArchitectureError> {
        let key_length = self.optional_size("attention.key_length", MAX_WIDTH)?;
        let head_dim = match key_length {
            Some(length) => length,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(
                    self.invalid("attention.head_count", format!("{hidden} channels / {heads} heads"))
                );
            }
        };
        let (smallest, largest, step) = HEAD_DIMS;
        if head_dim < smallest || head_dim > largest || !head_dim.is_multiple_of(step) {
            return Err(ArchitectureError::Feature {
                feature: "head size",
                found: head_dim.to_string(),
                supported: format!("multiples of {step} from {smallest} to {largest}"),
            });
        }
        for (name, feature) in [
            ("attention.value_length", "a value head size other than the key head size"),
            ("rope.dimension_count", "rotating a part of each head"),
        ] {
            let found = self.optional_size(name, MAX_WIDTH)?.unwrap_or(head_dim);
            if found != head_dim {
                let supported = format!("{head_dim}, the head size");
                return Err(ArchitectureError::Feature { feature, found: found.to_string(), supported });
            }
        }
        Ok(head_dim)
    }

    /// Features that change the numbers and that this version does not know.
    fn refuse_unsupported(&self) -> Result<(), ArchitectureError> {
        let scaling = self.key("rope.scaling.type");
        if let Some(found) = self.gguf.get(&scaling).map(|v| v.as_str().unwrap_or("not a string"))
            && found != "none"
        {
            return Err(ArchitectureError::Feature {
                feature: "RoPE scaling",
                found: found.to_string(),
                supported: "none".to_string(),
            });
        }
        for (name, feature) in [
            ("attention.sliding_window", "a sliding window"),
            ("expert_count", "a mixture of experts"),
            ("rope.scale_linear", "RoPE scaling"),
        ] {
            let value = self.gguf.get(&self.key(name));
            let off = value.is_none_or(|v| v.as_u32() == Some(0) || v.as_f32() == Some(1.0));
            if !off {
                return Err(ArchitectureError::Feature {
                    feature,
                    found: format!("key `{}` is set", self.key(name)),
                    supported: "models without it".to_string(),
                });
            }
        }
        Ok(())
    }
}
