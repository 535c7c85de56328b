//! Names of tensors in checkpoints and in GGUF files.

use serde_json::Value;

/// Families that name the norms of a layer differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// Two norms a layer.
    Plain,
    /// Four norms a layer, and norms stored less one.
    Gemma3,
}

impl Family {
    /// The family that `config.json` names.
    pub(super) fn of(config: &Value) -> Family {
        match config.get("model_type").and_then(Value::as_str) {
            Some("gemma3_text") => Family::Gemma3,
            _ => Family::Plain,
        }
    }

    /// Parts of a layer: (in the checkpoint, in GGUF files).
    fn parts(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Family::Plain => &PLAIN,
            Family::Gemma3 => &GEMMA3,
        }
    }
}

const WHOLE: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

const PROJECTIONS: [(&str, &str); 9] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

const PLAIN: [(&str, &str); 2] = [("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")];

const GEMMA3: [(&str, &str); 4] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Whether a tensor holds what the runtime computes itself; old checkpoints store such.
pub(super) fn is_derived(stored: &str) -> bool {
    stored.ends_with(".rotary_emb.inv_freq")
}

/// The name in GGUF files of a stored tensor, or the stored one where GGUF files have none.
pub(super) fn from_stored(stored: &str, family: Family) -> String {
    if let Some((_, name)) = WHOLE.iter().find(|(from, _)| *from == stored) {
        return (*name).to_owned();
    }
    let translate = || {
        let (layer, rest) = stored.strip_prefix("model.layers.")?.split_once('.')?;
        let (part, kind) = rest.rsplit_once('.')?;
        let (_, name) = parts(family).find(|(from, _)| *from == part)?;
        let layer: u32 = layer.parse().ok()?;
        Some(format!("blk.{layer}.{name}.{kind}"))
    };
    translate().unwrap_or_else(|| stored.to_owned())
}

/// The inverse of [`from_stored`].
pub(super) fn to_stored(name: &str, family: Family) -> String {
    if let Some((stored, _)) = WHOLE.iter().find(|(_, to)| *to == name) {
        return (*stored).to_owned();
    }
    let translate = || {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (part, kind) = rest.rsplit_once('.')?;
        let (stored, _) = parts(family).find(|(_, to)| *to == part)?;
        Some(format!("model.layers.{layer}.{stored}.{kind}"))
    };
    translate().unwrap_or_else(|| name.to_owned())
}

fn parts(family: Family) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    PROJECTIONS.iter().chain(family.parts())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        for (stored, family, name) in [
            ("model.embed_tokens.weight", Family::Plain, "token_embd.weight"),
            ("model.layers.7.self_attn.q_proj.bias", Family::Plain, "blk.7.attn_q.bias"),
            ("model.layers.0.post_attention_layernorm.weight", Family::Plain, "blk.0.ffn_norm.weight"),
            (
                "model.layers.0.post_attention_layernorm.weight",
                Family::Gemma3,
                "blk.0.post_attention_norm.weight",
            ),
            ("model.layers.12.self_attn.k_norm.weight", Family::Gemma3, "blk.12.attn_k_norm.weight"),
            ("model.vision.weight", Family::Plain, "model.vision.weight"),
            ("model.layers.x.mlp.up_proj.weight", Family::Plain, "model.layers.x.mlp.up_proj.weight"),
        ] {
            assert_eq!(from_stored(stored, family), name);
            assert_eq!(to_stored(name, family), stored);
        }
    }
}
