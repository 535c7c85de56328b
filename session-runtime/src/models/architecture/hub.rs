//! The shape of a model from the `config.json` of a checkpoint.

use kernels::backend::RopePairing;
use serde_json::Value;

use super::{
    Architecture, ArchitectureError, Gate, LayerKind, MAX_CONTEXT, MAX_LAYERS, MAX_WIDTH, ModelConfig,
    OUTPUT, check_head_dim,
};
use crate::models::checkpoint::Checkpoint;

/// Model types that work.
const SUPPORTED: &str = "llama, qwen2, qwen3, gemma3_text";

impl ModelConfig {
    /// Reads and checks the shape of a model: `config.json`, and name, shape and type of every tensor.
    ///
    /// # Errors
    /// [`ArchitectureError`], which names the field or tensor and says what is supported.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<ModelConfig, ArchitectureError> {
        let fields = Fields { json: checkpoint.config() };
        let architecture = architecture_of(checkpoint.config())?;
        fields.refuse_unsupported(architecture)?;
        let layers = fields.size("num_hidden_layers", MAX_LAYERS)?;
        let hidden = fields.size("hidden_size", MAX_WIDTH)?;
        let heads = fields.size("num_attention_heads", MAX_WIDTH)?;
        let kv_heads = fields.optional_size("num_key_value_heads", MAX_WIDTH)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let problem = format!("{heads} query heads cannot share {kv_heads} KV heads");
            return Err(invalid("num_key_value_heads", problem));
        }
        let head_dim = match fields.optional_size("head_dim", MAX_WIDTH)? {
            Some(head_dim) => head_dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(invalid("num_attention_heads", format!("{hidden} channels / {heads} heads"))),
        };
        let gemma = architecture == Architecture::Gemma3;
        let layer_kinds = fields.layer_kinds(architecture, layers)?;
        let scaled_by = if gemma { fields.positive("query_pre_attn_scalar")? } else { head_dim as f32 };
        let tied = fields.flag("tie_word_embeddings")?.unwrap_or(gemma);
        let config = ModelConfig {
            architecture,
            layers,
            hidden,
            ffn: fields.size("intermediate_size", MAX_WIDTH)?,
            heads,
            kv_heads,
            head_dim: check_head_dim(head_dim)?,
            vocab: fields.size("vocab_size", MAX_WIDTH * 4)?,
            context_length: fields.size("max_position_embeddings", MAX_CONTEXT)?,
            rms_eps: fields.positive("rms_norm_eps")?,
            rope_base: fields.rope_base("full_attention", "rope_theta")?,
            window_rope_base: if gemma {
                Some(fields.rope_base("sliding_attention", "rope_local_base_freq")?)
            } else {
                None
            },
            rope_dims: head_dim,
            rope_pairing: RopePairing::Halves,
            tied_embeddings: tied || !checkpoint.has_tensor(OUTPUT),
            qkv_bias: architecture == Architecture::Qwen2,
            qk_norm: architecture.has_qk_norm(),
            post_norms: gemma,
            gate: if gemma { Gate::Gelu } else { Gate::Silu },
            embedding_scale: gemma.then(|| (hidden as f32).sqrt()),
            attention_scale: 1.0 / scaled_by.sqrt(),
            layer_kinds,
        };
        // The output matrix of a tied model may be stored a second time.
        let names = checkpoint.tensor_names().filter(|name| !(config.tied_embeddings && *name == OUTPUT));
        config.check_tensors(&|name| Ok(checkpoint.tensor(name)?), names)?;
        Ok(config)
    }
}

/// The architecture that `model_type` names.
fn architecture_of(config: &Value) -> Result<Architecture, ArchitectureError> {
    match config.get("model_type").and_then(Value::as_str) {
        Some("llama") => Ok(Architecture::Llama),
        Some("qwen2") => Ok(Architecture::Qwen2),
        Some("qwen3") => Ok(Architecture::Qwen3),
        Some("gemma3_text") => Ok(Architecture::Gemma3),
        Some(found) => Err(ArchitectureError::Unsupported { found: found.to_owned(), supported: SUPPORTED }),
        None => Err(invalid("model_type", "it is missing or not a string".to_owned())),
    }
}

fn invalid(name: &str, problem: String) -> ArchitectureError {
    ArchitectureError::Invalid { key: format!("config.json: {name}"), problem }
}

fn feature(feature: &'static str, found: String, supported: &str) -> ArchitectureError {
    ArchitectureError::Feature { feature, found, supported: supported.to_owned() }
}

/// Reads fields of `config.json`; `null` is the same as absent.
struct Fields<'a> {
    json: &'a Value,
}

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.json.get(name).filter(|value| !value.is_null())
    }

    fn optional_size(&self, name: &str, limit: usize) -> Result<Option<usize>, ArchitectureError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        match size.filter(|size| (1..=limit).contains(size)) {
            Some(size) => Ok(Some(size)),
            None => Err(invalid(name, format!("{value} is not a whole number in 1..={limit}"))),
        }
    }

    fn size(&self, name: &str, limit: usize) -> Result<usize, ArchitectureError> {
        self.optional_size(name, limit)?.ok_or_else(|| invalid(name, "it is missing".to_owned()))
    }

    fn flag(&self, name: &str) -> Result<Option<bool>, ArchitectureError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| invalid(name, format!("{value} is not true or false")))
    }

    fn positive(&self, name: &str) -> Result<f32, ArchitectureError> {
        let value = self.get(name).ok_or_else(|| invalid(name, "it is missing".to_owned()))?;
        positive(name, value)
    }

    /// The rotary base of one kind of layers: in `rope_parameters`, by kind or for all, or in `field`.
    fn rope_base(&self, kind: &str, field: &str) -> Result<f32, ArchitectureError> {
        let all = self.get("rope_parameters");
        let own = all.map(|all| all.get(kind).unwrap_or(all));
        match own.and_then(|own| own.get("rope_theta")) {
            Some(theta) => positive("rope_parameters.rope_theta", theta),
            None => match (self.get(field), field) {
                (None, "rope_theta") => Ok(10_000.0),
                _ => self.positive(field),
            },
        }
    }

    fn layer_kinds(
        &self,
        architecture: Architecture,
        layers: usize,
    ) -> Result<Vec<LayerKind>, ArchitectureError> {
        if architecture != Architecture::Gemma3 {
            return Ok(vec![LayerKind::Full; layers]);
        }
        let window = LayerKind::Window(self.size("sliding_window", MAX_CONTEXT)?);
        let Some(types) = self.get("layer_types") else {
            let pattern = ["sliding_window_pattern", "_sliding_window_pattern"]
                .into_iter()
                .find_map(|name| self.optional_size(name, MAX_LAYERS).transpose())
                .transpose()?
                .unwrap_or(6);
            let kind = |layer: usize| if layer.is_multiple_of(pattern) { LayerKind::Full } else { window };
            return Ok((1..=layers).map(kind).collect());
        };
        let types = types.as_array().filter(|types| types.len() == layers);
        let types =
            types.ok_or_else(|| invalid("layer_types", format!("it is not a list of {layers} kinds")))?;
        types
            .iter()
            .map(|kind| match kind.as_str() {
                Some("full_attention") => Ok(LayerKind::Full),
                Some("sliding_attention") => Ok(window),
                _ => Err(feature("layer kind", kind.to_string(), "full_attention, sliding_attention")),
            })
            .collect()
    }

    /// Features that change the numbers and that this version does not know.
    fn refuse_unsupported(&self, architecture: Architecture) -> Result<(), ArchitectureError> {
        let activation = self.get("hidden_activation").or_else(|| self.get("hidden_act"));
        let gemma = architecture == Architecture::Gemma3;
        let wanted = if gemma { "gelu_pytorch_tanh" } else { "silu" };
        if activation.and_then(Value::as_str) != Some(wanted) {
            let found = activation.map_or("none".to_owned(), Value::to_string);
            return Err(feature("activation", found, wanted));
        }
        for (name, what) in [
            ("attention_bias", "a bias of the attention projections"),
            ("mlp_bias", "a bias of the feed-forward network"),
            ("use_sliding_window", "a sliding window of this architecture"),
            ("use_bidirectional_attention", "attention to later tokens"),
        ] {
            if self.flag(name)? == Some(true) {
                return Err(feature(what, format!("`{name}` is true"), "models without it"));
            }
        }
        for (name, what) in [
            ("attn_logit_softcapping", "a soft cap of scores"),
            ("final_logit_softcapping", "a soft cap of logits"),
            ("quantization_config", "a quantised checkpoint"),
            ("num_experts", "a mixture of experts"),
        ] {
            if let Some(found) = self.get(name) {
                let found = format!("`{name}` is {}", shown(found));
                return Err(feature(what, found, "F32, F16 or BF16 checkpoints without it"));
            }
        }
        if self.get("partial_rotary_factor").is_some_and(|factor| factor.as_f64() != Some(1.0)) {
            return Err(feature(
                "rotating a part of each head",
                "`partial_rotary_factor` is set".into(),
                "1",
            ));
        }
        if !gemma
            && let Some(types) = self.get("layer_types").and_then(Value::as_array)
            && let Some(other) = types.iter().find(|kind| kind.as_str() != Some("full_attention"))
        {
            return Err(feature("layer kind", other.to_string(), "full_attention in this architecture"));
        }
        self.refuse_scaled_rope()
    }

    fn refuse_scaled_rope(&self) -> Result<(), ArchitectureError> {
        let tables = ["rope_scaling", "rope_parameters"].into_iter().filter_map(|name| self.get(name));
        let nested = |table: &'a Value| table.as_object().into_iter().flat_map(|object| object.values());
        for table in tables.flat_map(|table| std::iter::once(table).chain(nested(table))) {
            let kind = table.get("rope_type").or_else(|| table.get("type")).and_then(Value::as_str);
            if let Some(kind) = kind.filter(|kind| *kind != "default") {
                return Err(feature("RoPE scaling", kind.to_owned(), "default"));
            }
        }
        Ok(())
    }
}

fn positive(name: &str, value: &Value) -> Result<f32, ArchitectureError> {
    let number = value.as_f64().map(|number| number as f32);
    number
        .filter(|number| number.is_finite() && *number > 0.0)
        .ok_or_else(|| invalid(name, format!("{} is not a positive number", shown(value))))
}

/// The start of a value, for messages.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.len() > 60 { format!("{}...", text.chars().take(60).collect::<String>()) } else { text }
}
