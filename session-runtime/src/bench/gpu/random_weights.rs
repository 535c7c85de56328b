//! Made-up weights with the shapes and the storage types of the named models: a device can be measured, and compared with the
//! CPU, where the models themselves are not.

use half::f16;
use kernels::backend::RopePairing;
use kernels::formats::TensorType;

use crate::error::Error;
use crate::models::architecture::{Gate, LayerKind, ModelConfig, TOKEN_EMBD};
use crate::models::checkpoint::StoredMatrix;
use crate::models::{Architecture, TensorSource};

/// A model by its shape, and what its matrices are stored as.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// Name of the model that has it.
    pub name: &'static str,
    pub config: ModelConfig,
    formats: Formats,
}

/// Storage types, by what a row's length allows.
#[derive(Clone, Copy, Debug)]
struct Formats {
    embedding: Made,
    /// Where a row is whole blocks of 256; matrices take turns.
    large: [Made; 2],
    /// Elsewhere.
    small: Made,
}

/// Storage types that are made up here: those of the named models' files.
#[derive(Clone, Copy, Debug)]
enum Made {
    Q4_1,
    Q5_0,
    Q8_0,
    Q4K,
    Q6K,
}

impl Made {
    fn format(self) -> TensorType {
        match self {
            Self::Q4_1 => TensorType::Q4_1,
            Self::Q5_0 => TensorType::Q5_0,
            Self::Q8_0 => TensorType::Q8_0,
            Self::Q4K => TensorType::Q4_K,
            Self::Q6K => TensorType::Q6_K,
        }
    }

    /// Gives the random codes of a block scales under which its values have about the size `scale`, around zero.
    fn scale_block(self, block: &mut [u8], scale: f32) {
        let mut put = |at: usize, value: f32| {
            block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
        };
        // Divided by how far codes of the type are from their middle on average.
        match self {
            Self::Q5_0 => put(0, scale / 9.2),
            Self::Q8_0 => put(0, scale / 74.0),
            Self::Q4_1 => {
                put(0, scale / 4.6);
                put(2, -7.5 * scale / 4.6);
            }
            // Scales and minima of the parts of a block have six bits, as large on average; codes have 7.5.
            Self::Q4K => {
                put(0, scale / 260.0);
                put(2, 7.5 * scale / 260.0);
            }
            Self::Q6K => put(208, scale / 1370.0),
        }
    }
}

impl Shape {
    /// The three named models.
    pub(super) fn all() -> [Self; 3] {
        [
            Self {
                name: "smollm2-135m",
                config: config(Architecture::Llama, [30, 576, 1536, 9, 3, 64, 49_152], 1e5),
                formats: Formats { embedding: Made::Q8_0, large: [Made::Q4_1; 2], small: Made::Q4_1 },
            },
            Self {
                name: "qwen2.5-coder-0.5b",
                config: config(Architecture::Qwen2, [24, 896, 4864, 14, 2, 64, 151_936], 1e6),
                formats: Formats { embedding: Made::Q8_0, large: [Made::Q6K, Made::Q4K], small: Made::Q5_0 },
            },
            Self {
                name: "qwen2.5-coder-1.5b",
                config: config(Architecture::Qwen2, [28, 1536, 8960, 12, 2, 128, 151_936], 1e6),
                formats: Formats { embedding: Made::Q6K, large: [Made::Q4K, Made::Q6K], small: Made::Q5_0 },
            },
        ]
    }
}

/// Layers, channels, channels of the feed-forward network, query heads, KV heads, channels of a head, vocabulary.
fn config(architecture: Architecture, shape: [usize; 7], rope_base: f32) -> ModelConfig {
    let [layers, hidden, ffn, heads, kv_heads, head_dim, vocab] = shape;
    let is_qwen = architecture == Architecture::Qwen2;
    ModelConfig {
        architecture,
        layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim,
        vocab,
        context_length: 8192,
        rms_eps: 1e-5,
        rope_base,
        window_rope_base: None,
        rope_dims: head_dim,
        rope_pairing: if is_qwen { RopePairing::Halves } else { RopePairing::Adjacent },
        tied_embeddings: true,
        qkv_bias: is_qwen,
        qk_norm: false,
        post_norms: false,
        gate: Gate::Silu,
        embedding_scale: None,
        attention_scale: 1.0 / (head_dim as f32).sqrt(),
        layer_kinds: vec![LayerKind::Full; layers],
    }
}

/// The weights of a shape: the same numbers for every device.
pub(super) struct RandomWeights<'a>(pub &'a Shape);

impl RandomWeights<'_> {
    /// Outputs and inputs of a matrix.
    fn matrix_shape(&self, name: &str) -> (usize, usize) {
        let config = &self.0.config;
        let (query, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        match part(name) {
            "attn_q" => (query, config.hidden),
            "attn_k" | "attn_v" => (kv, config.hidden),
            "attn_output" => (config.hidden, query),
            "ffn_gate" | "ffn_up" => (config.ffn, config.hidden),
            "ffn_down" => (config.hidden, config.ffn),
            _ => (config.vocab, config.hidden),
        }
    }

    fn made(&self, name: &str, cols: usize) -> Made {
        let formats = &self.0.formats;
        match name {
            TOKEN_EMBD => formats.embedding,
            _ if cols.is_multiple_of(256) => formats.large[(seed(name) % 2) as usize],
            _ => formats.small,
        }
    }
}

impl TensorSource for RandomWeights<'_> {
    fn matrix(&self, name: &str) -> Result<StoredMatrix<'_>, Error> {
        let (rows, cols) = self.matrix_shape(name);
        let made = self.made(name, cols);
        let format = made.format();
        let bytes =
            format.tensor_bytes(rows, cols).ok_or_else(|| Error::internal("a tensor is too large"))?;
        let mut bytes = random_bytes(seed(name), bytes);
        // Sums of `cols` products keep the size of their inputs.
        let scale = 1.0 / (cols as f32).sqrt();
        bytes.chunks_exact_mut(format.block_bytes()).for_each(|block| made.scale_block(block, scale));
        Ok(StoredMatrix { format, rows, cols, bytes: bytes.into() })
    }

    fn vector(&self, name: &str) -> Result<Vec<f32>, Error> {
        let config = &self.0.config;
        let (length, middle) = match part(name) {
            "attn_q" => (config.heads * config.head_dim, 0.0),
            "attn_k" | "attn_v" => (config.kv_heads * config.head_dim, 0.0),
            _ => (config.hidden, 1.0),
        };
        let bytes = random_bytes(seed(name), length);
        Ok(bytes.into_iter().map(|byte| middle + (f32::from(byte) / 127.5 - 1.0) * 0.1).collect())
    }

    fn stored_name(&self, name: &str) -> String {
        name.to_owned()
    }

    fn stored_bytes(&self) -> u64 {
        0
    }
}

/// What a tensor is in its layer: `attn_q` of `blk.3.attn_q.weight`.
fn part(name: &str) -> &str {
    let mut parts = name.rsplit('.');
    parts.next();
    parts.next().unwrap_or(name)
}

fn seed(name: &str) -> u64 {
    let digest = blake3::hash(name.as_bytes());
    digest.as_bytes().iter().take(8).fold(0, |seed, byte| seed << 8 | u64::from(*byte))
}

/// SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
fn random_bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(length.next_multiple_of(8));
    while bytes.len() < length {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
