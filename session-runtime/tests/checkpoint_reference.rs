//! Every architecture against the reference library: a small random checkpoint, read from safetensors, gives the
//! logits that `transformers` gives in float32.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/checkpoints.rs"]
mod checkpoints;
#[path = "support/gguf_writer.rs"]
mod gguf_writer;

use std::sync::Arc;

use checkpoints::TinyCheckpoint;
use gguf_writer::{GgufFile, Tensor};
use kernels::backend::KvType;
use kernels::cpu::{CpuBackend, CpuOptions};
use kernels::formats::TensorType;
use session_runtime::engine::{self, Engine, EngineOptions, LogitRows, SequenceRows, Weights};
use session_runtime::kv::pool::PagePool;
use session_runtime::kv::table::BlockTable;
use session_runtime::models::digest::Digest;
use session_runtime::models::progress::Silent;
use session_runtime::models::{self, Checkpoint, Gguf, LayerKind, ModelConfig, Precision, WeightFile};
use sha2::Digest as _;

/// Bytes of the pool.
const BUDGET: u64 = 16 << 20;

/// Logits of every token of `ids`.
fn logits(checkpoint: &TinyCheckpoint, precision: Precision, kv_type: KvType, ids: &[u32]) -> Vec<f32> {
    let model = models::open_as(&checkpoint.name(), precision, &Silent).unwrap();
    let options = EngineOptions { budget_bytes: BUDGET, context_length: 1024, step_rows: 64, kv_type };
    compute(engine::open(backend(), &model, options, &Silent).unwrap(), ids)
}

fn backend() -> Arc<CpuBackend> {
    Arc::new(CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap())
}

fn compute(mut engine: Engine<CpuBackend>, ids: &[u32]) -> Vec<f32> {
    let mut pool = PagePool::new(engine.pool_spec().pages);
    let (layers, kv_heads) = (engine.config().layers, engine.config().kv_heads);
    let mut table = BlockTable::new(layers, kv_heads);
    table.prepare(&mut pool, 0, ids.len()).unwrap();
    let mut out = Vec::new();
    for (index, piece) in ids.chunks(64).enumerate() {
        let rows = SequenceRows { tokens: piece, start: index * 64, tables: &table, logits: LogitRows::All };
        engine.forward(&[rows], layers, &mut out).unwrap();
    }
    out
}

/// The largest distance between rows of logits, relative to the length of the reference's row.
fn distance(got: &[f32], want: &[f32], vocab: usize, positions: &[usize]) -> f64 {
    let rows = positions.iter().zip(want.chunks_exact(vocab));
    rows.map(|(position, want)| {
        let got = &got[position * vocab..][..vocab];
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
        let apart = squares(&mut got.iter().zip(want).map(|(got, want)| f64::from(got - want)));
        (apart / squares(&mut want.iter().map(|want| f64::from(*want)))).sqrt()
    })
    .fold(0.0, f64::max)
}

/// To 1e-4 of the reference in float32 where pages are f32, and of the reference that rounds K and V where they are f16.
fn check(name: &str) {
    let checkpoint = TinyCheckpoint::new(name);
    let reference = checkpoint.logits();
    for (kv_type, want) in [(KvType::F32, &reference.exact), (KvType::F16, &reference.rounded)] {
        let got = logits(&checkpoint, Precision::Stored, kv_type, &reference.ids);
        let apart = distance(&got, want, reference.vocab, &reference.positions);
        assert!(apart < 1e-4, "{name}: {apart:e} from the reference with K and V of {}", kv_type.name());
    }
}

#[test]
fn llama_gives_the_reference_logits() {
    check("llama");
}

#[test]
fn qwen2_from_shards_gives_the_reference_logits() {
    check("qwen2");
}

#[test]
fn qwen3_gives_the_reference_logits() {
    check("qwen3");
}

/// The same weights in a GGUF file are the same model to the bit.
#[test]
fn qwen3_from_a_gguf_file_gives_the_same_bits() {
    let fixture = TinyCheckpoint::new("qwen3");
    let checkpoint = Checkpoint::open(fixture.path(), false).unwrap();
    let read = models::open(&fixture.name()).unwrap().config;
    let mut file = GgufFile::default();
    file.set("general.architecture", gguf_writer::string("qwen3"));
    for (key, value) in [
        ("block_count", read.layers),
        ("context_length", read.context_length),
        ("embedding_length", read.hidden),
        ("feed_forward_length", read.ffn),
        ("attention.head_count", read.heads),
        ("attention.head_count_kv", read.kv_heads),
        ("attention.key_length", read.head_dim),
        ("attention.value_length", read.head_dim),
    ] {
        file.set(&format!("qwen3.{key}"), gguf_writer::u32(value as u32));
    }
    file.set("qwen3.attention.layer_norm_rms_epsilon", gguf_writer::f32(read.rms_eps));
    file.set("qwen3.rope.freq_base", gguf_writer::f32(read.rope_base));
    let words: Vec<String> = (0..read.vocab).map(|id| id.to_string()).collect();
    file.set("tokenizer.ggml.tokens", gguf_writer::strings(&words));
    for name in checkpoint.tensor_names() {
        let view = checkpoint.tensor(name).unwrap();
        let dimensions = if view.rows == 1 { vec![view.cols] } else { vec![view.cols, view.rows] };
        let dimensions = dimensions.into_iter().map(|size| size as u64).collect();
        file.tensors.push(Tensor {
            name: name.to_owned(),
            dimensions,
            type_id: 0,
            bytes: view.bytes.to_vec(),
        });
    }
    let gguf = Gguf::from_bytes(file.to_bytes()).unwrap();
    let config = ModelConfig::from_gguf(&gguf).unwrap();
    assert_eq!(config, read);
    let backend = backend();
    let file = WeightFile::Gguf(gguf);
    let weights = Weights::load(backend.as_ref(), &file, &config, KvType::F16, "fixture", &Silent).unwrap();
    let spec = engine::pool_spec(&config, KvType::F16, BUDGET).unwrap();
    let ids = fixture.logits().ids;
    let got = compute(Engine::new(backend, config, weights, spec, 1024, 64).unwrap(), &ids);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert!(bits(&got) == bits(&logits(&fixture, Precision::Stored, KvType::F16, &ids)));
}

#[test]
fn gemma3_gives_the_reference_logits() {
    let checkpoint = TinyCheckpoint::new("gemma3");
    let kinds = models::open(&checkpoint.name()).unwrap().config.layer_kinds;
    let window = LayerKind::Window(40);
    assert_eq!(kinds, [window, window, LayerKind::Full, window]);
    check("gemma3");
}

#[test]
fn quantised_at_load_stays_near_and_is_another_model() {
    let checkpoint = TinyCheckpoint::new("llama");
    let reference = checkpoint.logits();
    let got = logits(&checkpoint, Precision::Q8_0, KvType::F16, &reference.ids);
    let apart = distance(&got, &reference.exact, reference.vocab, &reference.positions);
    // Q8_0 rounds a weight by up to 1/254 of the largest of its block; three layers add that up.
    assert!(apart > 1e-4 && apart < 0.1, "{apart:e}");
    let stored = models::open(&checkpoint.name()).unwrap();
    let quantised = models::open_as(&checkpoint.name(), Precision::Q8_0, &Silent).unwrap();
    assert_ne!(stored.weights_digest, quantised.weights_digest, "their KV must not be mixed");
    assert_eq!(stored.tokenizer_digest, quantised.tokenizer_digest);
}

#[test]
fn quantised_matrices_are_those_of_the_reference() {
    let fixture = TinyCheckpoint::new("llama");
    let checkpoint = Checkpoint::open(fixture.path(), true).unwrap();
    let expected = fixture.quantised();
    let mut seen = 0;
    for name in checkpoint.tensor_names().filter(|name| !name.contains("norm")) {
        let matrix = checkpoint.matrix(name).unwrap();
        assert_eq!(matrix.format, TensorType::Q8_0);
        let digest = Digest(sha2::Sha256::digest(&matrix.bytes).into());
        assert_eq!(digest.to_string(), expected[&checkpoint.stored_name(name)], "{name}");
        seen += 1;
    }
    assert_eq!(seen, expected.len());
}

#[test]
fn tokenizers_of_checkpoints_give_the_reference_ids() {
    for name in ["llama", "qwen2", "qwen3", "gemma3"] {
        let checkpoint = TinyCheckpoint::new(name);
        let tokenizer = models::open(&checkpoint.name()).unwrap().tokenizer;
        for case in checkpoint.encoded() {
            assert_eq!(tokenizer.encode_text(&case.text).unwrap(), case.ids, "{name}: {:?}", case.text);
            assert_eq!(tokenizer.decode(&case.ids), case.text, "{name}");
        }
        let end = if name == "gemma3" { "<end_of_turn>" } else { "<|im_end|>" };
        let id = tokenizer.special(end).unwrap();
        assert!(tokenizer.is_end_of_turn(id), "{name}");
        assert!(
            !tokenizer.encode_text(end).unwrap().contains(&id),
            "{name}: text never becomes a control token"
        );
        assert_eq!(tokenizer.encode_with_specials(end).unwrap(), [id], "{name}");
    }
}
