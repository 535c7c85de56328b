//! The shape of a model from the metadata of a GGUF file.

use kernels::backend::RopePairing;

use super::{
    Architecture, ArchitectureError, Gate, LayerKind, LayerTensors, MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH,
    ModelConfig, OUTPUT, check_head_dim,
};
use crate::models::gguf::Gguf;

/// Architectures of GGUF files that work.
const SUPPORTED: &str = "llama, qwen2, qwen3";

impl ModelConfig {
    /// Reads and checks the shape of a model: metadata, and name, shape and type of every tensor.
    ///
    /// # Errors
    /// [`ArchitectureError`], which names the key or tensor and says what is supported.
    pub fn from_gguf(gguf: &Gguf) -> Result<ModelConfig, ArchitectureError> {
        let architecture = match gguf.str("general.architecture")? {
            "llama" => Architecture::Llama,
            "qwen2" => Architecture::Qwen2,
            "qwen3" => Architecture::Qwen3,
            other => {
                return Err(ArchitectureError::Unsupported {
                    found: other.to_string(),
                    supported: SUPPORTED,
                });
            }
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
            window_rope_base: None,
            // The converter of `llama` files reorders the channels of Q and K.
            rope_pairing: match architecture {
                Architecture::Llama => RopePairing::Adjacent,
                _ => RopePairing::Halves,
            },
            tied_embeddings: !gguf.has_tensor(OUTPUT),
            qkv_bias: gguf.has_tensor(&LayerTensors::new(0).attn_q_bias),
            qk_norm: architecture.has_qk_norm(),
            post_norms: false,
            gate: Gate::Silu,
            embedding_scale: None,
            attention_scale: 1.0 / (head_dim as f32).sqrt(),
            layer_kinds: vec![LayerKind::Full; layers],
        };
        config.check_tensors(&|name| Ok(gguf.tensor(name)?), gguf.tensor_names())?;
        Ok(config)
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
        check_head_dim(head_dim)?;
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
