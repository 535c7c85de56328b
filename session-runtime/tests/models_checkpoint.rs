//! Checkpoints that are incomplete, damaged or of an unknown kind are refused in one sentence that names the file
//! and the place; weights that are not numbers and models that do not fit are refused by every path.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/checkpoints.rs"]
mod checkpoints;
#[path = "support/gguf_writer.rs"]
mod gguf_writer;

use std::fs;
use std::sync::Arc;

use checkpoints::TinyCheckpoint;
use gguf_writer::{GgufFile, Sizes, small_model};
use kernels::backend::KvType;
use kernels::cpu::{CpuBackend, CpuOptions};
use serde_json::json;
use session_runtime::engine::{self, EngineOptions};
use session_runtime::models::progress::Silent;
use session_runtime::models::{self, Precision};
use session_runtime::{Error, ErrorKind};

const OPTIONS: EngineOptions =
    EngineOptions { budget_bytes: 1 << 20, context_length: 256, step_rows: 64, kv_type: KvType::F16 };

fn refusal(checkpoint: &TinyCheckpoint) -> Error {
    let error = models::open(&checkpoint.name()).unwrap_err();
    assert!(error.message.contains(&checkpoint.name()), "names the path: {error}");
    assert!(!error.message.contains('\n'), "one sentence: {error}");
    error
}

/// Puts a model on the device.
fn load(name: &str, precision: Precision, options: EngineOptions) -> Result<(), Error> {
    let model = models::open_as(name, precision, &Silent)?;
    let backend = Arc::new(CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap());
    engine::open(backend, &model, options, &Silent).map(drop)
}

/// A change that spoils a checkpoint, and what the error must name.
type Spoil = (&'static str, &'static str, fn(&TinyCheckpoint));

fn check(cases: &[Spoil]) {
    for (model, expected, spoil) in cases {
        let checkpoint = TinyCheckpoint::new(model);
        spoil(&checkpoint);
        let error = refusal(&checkpoint);
        assert!(error.message.contains(expected), "{expected}: {error}");
        assert!(matches!(error.code.as_ref(), "model_malformed" | "model_unsupported"), "{error:?}");
    }
}

fn remove(checkpoint: &TinyCheckpoint, file: &str) {
    fs::remove_file(checkpoint.path().join(file)).unwrap();
}

/// Replaces text of the same length in the header of the weights.
fn rename(checkpoint: &TinyCheckpoint, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let path = checkpoint.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    fs::write(path, bytes).unwrap();
}

#[test]
fn incomplete_and_damaged_directories_are_refused_by_file() {
    check(&[
        ("llama", "model.safetensors is missing", |model| remove(model, "model.safetensors")),
        ("llama", "tokenizer.json is missing", |model| remove(model, "tokenizer.json")),
        ("llama", "chat_template.jinja is missing", |model| remove(model, "tokenizer_config.json")),
        ("qwen2", "model-00003-of-00004.safetensors is missing", |model| {
            remove(model, "model-00003-of-00004.safetensors");
        }),
        ("qwen2", "is not a name inside the directory", |model| {
            model.edit("model.safetensors.index.json", |json| {
                json["weight_map"]["model.norm.weight"] = json!("../model-00004-of-00004.safetensors");
            });
        }),
        ("qwen2", "has no tensor `model.extra.weight`", |model| {
            model.edit("model.safetensors.index.json", |json| {
                json["weight_map"]["model.extra.weight"] = json!("model-00004-of-00004.safetensors");
            });
        }),
        ("llama", "config.json is malformed: JSON", |model| {
            fs::write(model.path().join("config.json"), "{\"model_type\": ").unwrap();
        }),
        ("llama", "tokenizer.json is malformed: JSON: it is not an object", |model| {
            fs::write(model.path().join("tokenizer.json"), "[]").unwrap();
        }),
        ("llama", "model.safetensors is malformed: header", |model| {
            fs::write(model.path().join("model.safetensors"), [255; 64]).unwrap();
        }),
        ("llama", "has no tensor `model.layers.1.mlp.up_proj.weight`", |model| {
            rename(model, "model.layers.1.mlp.up_proj", "model.layers.9.mlp.up_proj");
        }),
        ("llama", "`lm_hexx.weight` is not part of architecture `llama`", |model| {
            rename(model, "lm_head.weight", "lm_hexx.weight");
        }),
        ("llama", "tensor `model.layers.0.mlp.gate_proj.weight` is 64 x 32, expected 48 x 32", |model| {
            model.edit("config.json", |json| json["intermediate_size"] = json!(48));
        }),
    ]);
    let nothing = tempfile::tempdir().unwrap();
    let error = models::open(nothing.path().to_str().unwrap()).unwrap_err();
    assert!(error.message.contains("config.json and safetensors"), "{error}");
}

#[test]
fn what_is_not_supported_is_refused_with_what_is() {
    check(&[
        ("llama", "`mamba` is not supported (supported: llama, qwen2, qwen3, gemma3_text)", |model| {
            model.edit("config.json", |json| json["model_type"] = json!("mamba"));
        }),
        ("llama", "head size is not supported: 8 (supported: multiples of 16 from 16 to 256)", |model| {
            model.edit("config.json", |json| json["head_dim"] = json!(8));
        }),
        ("llama", "unsupported type F64 (supported: F32, F16, BF16)", |model| rename(model, "F32", "F64")),
        ("llama", "RoPE scaling is not supported: llama3 (supported: default)", |model| {
            model.edit("config.json", |json| json["rope_parameters"]["rope_type"] = json!("llama3"));
        }),
        ("gemma3", "RoPE scaling is not supported: linear", |model| {
            model.edit("config.json", |json| {
                json["rope_parameters"]["full_attention"]["rope_type"] = json!("linear");
            });
        }),
        ("qwen3", "activation is not supported: \"relu\" (supported: silu)", |model| {
            model.edit("config.json", |json| json["hidden_act"] = json!("relu"));
        }),
        ("llama", "a quantised checkpoint is not supported", |model| {
            model.edit("config.json", |json| json["quantization_config"] = json!({"quant_method": "awq"}));
        }),
        ("gemma3", "a soft cap of logits is not supported", |model| {
            model.edit("config.json", |json| json["final_logit_softcapping"] = json!(30.0));
        }),
        ("qwen2", "layer kind is not supported: \"sliding_attention\"", |model| {
            model.edit("config.json", |json| json["layer_types"][1] = json!("sliding_attention"));
        }),
        ("gemma3", "config.json: sliding_window`: 0 is not a whole number", |model| {
            model.edit("config.json", |json| json["sliding_window"] = json!(0));
        }),
        ("llama", "rms_norm_eps`: -1.0 is not a positive number", |model| {
            model.edit("config.json", |json| json["rms_norm_eps"] = json!(-1.0));
        }),
        ("llama", "tokenizer.json: model is not supported: Unigram (supported: BPE)", |model| {
            model.edit("tokenizer.json", |json| json["model"]["type"] = json!("Unigram"));
        }),
        ("llama", "has `lstrip`", |model| {
            model.edit("tokenizer.json", |json| json["added_tokens"][0]["lstrip"] = json!(true));
        }),
        ("llama", "eos_token_id 5000 is not one of", |model| {
            model.edit("generation_config.json", |json| json["eos_token_id"] = json!(5000));
        }),
        ("gemma3", "there is no token for byte 0x41", |model| {
            model.edit("tokenizer.json", |json| {
                json["model"]["vocab"].as_object_mut().unwrap().remove("<0x41>");
            });
        }),
    ]);
}

/// Overwrites the first value of a tensor of a checkpoint.
fn poison(checkpoint: &TinyCheckpoint, tensor: &str, value: f32) {
    let path = checkpoint.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let at = 8 + length + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(path, bytes).unwrap();
}

#[test]
fn weights_that_are_not_numbers_are_refused_by_tensor() {
    for tensor in [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.input_layernorm.weight",
    ] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for precision in [Precision::Stored, Precision::Q8_0] {
                let checkpoint = TinyCheckpoint::new("llama");
                poison(&checkpoint, tensor, value);
                let error = load(&checkpoint.name(), precision, OPTIONS).unwrap_err();
                assert_eq!(error.code, "model_malformed", "{error}");
                assert!(error.message.contains(&format!("`{tensor}`")), "{error}");
                assert!(error.message.contains(&checkpoint.name()), "{error}");
            }
        }
    }
}

fn gguf(change: impl FnOnce(&mut GgufFile)) -> (tempfile::TempDir, String) {
    let mut file = small_model("llama", Sizes::default());
    change(&mut file);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.gguf");
    fs::write(&path, file.to_bytes()).unwrap();
    let name = path.to_str().unwrap().to_owned();
    (directory, name)
}

#[test]
fn weights_of_gguf_files_that_are_not_numbers_are_refused_by_tensor() {
    for tensor in ["token_embd.weight", "blk.1.ffn_down.weight", "blk.0.attn_norm.weight"] {
        let (_directory, name) = gguf(|file| {
            let found = file.tensors.iter_mut().find(|one| one.name == tensor).unwrap();
            found.bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
        });
        let error = load(&name, Precision::Stored, OPTIONS).unwrap_err();
        assert_eq!(error.code, "model_malformed", "{error}");
        assert!(
            error.message.contains(&format!("`{tensor}`")) && error.message.contains("m.gguf"),
            "{error}"
        );
    }
}

#[test]
fn a_pool_that_does_not_fit_is_refused_before_it_is_allocated() {
    let checkpoint = TinyCheckpoint::new("llama");
    let options = EngineOptions { budget_bytes: 1 << 50, ..OPTIONS };
    let error = load(&checkpoint.name(), Precision::Stored, options).unwrap_err();
    assert_eq!((error.kind, error.code.as_ref()), (ErrorKind::Limit, "out_of_memory"));
    // Pages of 1,024 bytes, as many as ids can name.
    let pages = (u64::from(u32::MAX) - 1) * 1024;
    assert!(error.message.contains(&format!("KV pages {pages}")), "{error}");
    for part in ["bytes of memory are needed", "are available"] {
        assert!(error.message.contains(part), "{error}");
    }
}

#[test]
fn a_gguf_file_is_not_quantised_again() {
    let (_directory, name) = gguf(|_| {});
    load(&name, Precision::Stored, OPTIONS).unwrap();
    let error = models::open_as(&name, Precision::Q8_0, &Silent).unwrap_err();
    assert_eq!(error.code, "config_invalid");
    assert!(error.message.contains("m.gguf"), "{error}");
}
