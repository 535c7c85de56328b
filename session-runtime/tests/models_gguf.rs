//! Reading model files: good ones give what was written, bad ones give errors that name the place.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/fixtures.rs"]
mod fixtures;
#[path = "support/gguf_writer.rs"]
mod gguf_writer;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf_writer::{
    Encoded, GgufFile, Sizes, Tensor, array, boolean, f32, small_model, string, strings, u32 as word,
};
use kernels::backend::RopePairing;
use kernels::formats::TensorType;
use proptest::prelude::*;
use session_runtime::models::gguf::{Array, GgufError, Value};
use session_runtime::models::{Architecture, Gguf, LayerKind, LayerTensors, ModelConfig, Tokenizer};

/// Notes the largest single allocation, so that a test can see what a hostile length causes.
struct Watching;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system allocator unchanged.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from `alloc` above with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

fn read(file: &GgufFile) -> Result<Gguf, GgufError> {
    Gguf::from_bytes(file.to_bytes())
}

fn sample() -> GgufFile {
    let mut file = GgufFile::default();
    file.set("a.word", word(7));
    file.set("a.float", f32(1.5));
    file.set("a.flag", boolean(true));
    file.set("a.text", string("héllo"));
    file.set("a.list", strings(&["x", "", "中"]));
    file.set("a.bytes", Encoded(9, [&0u32.to_le_bytes()[..], &3u64.to_le_bytes(), &[1, 2, 3]].concat()));
    file.set("a.nested", array(9, &[strings(&["p"]), strings(&["q", "r"])]));
    file.set("a.wide", Encoded(10, u64::MAX.to_le_bytes().to_vec()));
    file.set("a.small", Encoded(1, vec![0xFE]));
    file.tensors.push(Tensor::f32("vector", 0, 5, (0..5).map(|i| i as f32)));
    file.tensors.push(Tensor {
        name: "quantised".to_owned(),
        dimensions: vec![64, 3],
        type_id: 8,
        bytes: (0..34 * 2 * 3).map(|i| i as u8).collect(),
    });
    file.tensors.push(Tensor {
        name: "odd".to_owned(),
        dimensions: vec![2, 2],
        type_id: 24,
        bytes: vec![0; 4],
    });
    file
}

#[test]
fn what_was_written_is_read() {
    for version in [2, 3] {
        let gguf = read(&GgufFile { version, ..sample() }).unwrap();
        assert_eq!(gguf.version(), version);
        assert_eq!(gguf.u32("a.word").unwrap(), 7);
        assert_eq!(gguf.f32("a.float").unwrap(), 1.5);
        assert_eq!(gguf.get("a.flag"), Some(&Value::Bool(true)));
        assert_eq!(gguf.str("a.text").unwrap(), "héllo");
        assert_eq!(gguf.strings("a.list").unwrap(), ["x", "", "中"]);
        assert_eq!(gguf.get("a.bytes"), Some(&Value::Array(Array::U8(vec![1, 2, 3]))));
        let inner = |words: &[&str]| Array::String(words.iter().map(|w| (*w).to_owned()).collect());
        let nested = Array::Array(vec![inner(&["p"]), inner(&["q", "r"])]);
        assert_eq!(gguf.get("a.nested"), Some(&Value::Array(nested)));
        assert_eq!(gguf.get("a.small"), Some(&Value::I8(-2)));
        assert_eq!(gguf.get("absent"), None);
        let vector = gguf.tensor("vector").unwrap();
        assert_eq!((vector.format, vector.rows, vector.cols), (TensorType::F32, 1, 5));
        assert_eq!(gguf.vector("vector").unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0]);
        let matrix = gguf.tensor("quantised").unwrap();
        assert_eq!((matrix.format, matrix.rows, matrix.cols), (TensorType::Q8_0, 3, 64));
        assert_eq!(matrix.bytes, (0..204).map(|i| i as u8).collect::<Vec<_>>());
        assert_eq!(gguf.parameters(), 5 + 192 + 4);
        assert_eq!(gguf.tensor_names().collect::<Vec<_>>(), ["vector", "quantised", "odd"]);
    }
}

#[test]
fn errors_name_the_key_or_tensor() {
    let gguf = read(&sample()).unwrap();
    for (error, parts) in [
        (gguf.u32("a.text").unwrap_err(), ["a.text", "string"]),
        (gguf.u32("a.wide").unwrap_err(), ["a.wide", "2^32"]),
        (gguf.u32("none").unwrap_err(), ["none", "no key"]),
        (gguf.strings("a.bytes").unwrap_err(), ["a.bytes", "array of strings"]),
        (gguf.tensor("absent").unwrap_err(), ["absent", "no tensor"]),
        (gguf.tensor("odd").unwrap_err(), ["`odd`", "Q4_K"]),
        (gguf.vector("quantised").unwrap_err(), ["quantised", "Q8_0"]),
    ] {
        let error = error.to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

/// A change that spoils a file, and what the error must name.
type Spoil = (&'static str, fn(&mut GgufFile));

#[test]
fn malformed_headers_are_refused_by_name() {
    let cases: [Spoil; 11] = [
        ("version 1 ", |file| file.version = 1),
        ("version 4 ", |file| file.version = 4),
        ("`a.text`", |file| file.keys.push(("a.text".to_owned(), word(1)))),
        ("`vector`", |file| file.tensors.push(file.tensors[0].clone())),
        ("unknown value type 13", |file| file.keys.push(("x".to_owned(), Encoded(13, vec![])))),
        ("boolean byte 2", |file| file.keys.push(("x".to_owned(), Encoded(7, vec![2])))),
        ("`x`: a string is not UTF-8", |file| {
            file.keys.push(("x".to_owned(), Encoded(8, [&1u64.to_le_bytes()[..], &[0xFF]].concat())));
        }),
        ("nested deeper", |file| {
            let deep = (0..6).fold(strings(&["x"]), |inner, _| array(9, &[inner]));
            file.keys.push(("x".to_owned(), deep));
        }),
        ("5 dimensions", |file| file.tensors[0].dimensions = vec![1; 5]),
        ("a dimension is 0", |file| file.tensors[0].dimensions = vec![0]),
        ("general.alignment", |file| {
            file.set("general.alignment", word(33));
        }),
    ];
    for (expected, spoil) in cases {
        let mut file = sample();
        spoil(&mut file);
        let error = read(&file).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    assert!(matches!(Gguf::from_bytes(b"GGU".to_vec()), Err(GgufError::NotGguf { .. })));
    assert!(matches!(Gguf::from_bytes(b"{\"a\": 1}".to_vec()), Err(GgufError::NotGguf { .. })));
    let missing = Gguf::open(std::path::Path::new("/nonexistent.gguf")).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent.gguf"));
}

#[test]
fn every_cut_is_an_error() {
    let bytes = sample().to_bytes();
    // The unknown tensor at the end has no known size; the one before it ends where it begins.
    let needed = bytes.len() - 4 - (204usize.next_multiple_of(32) - 204);
    for length in 0..needed {
        assert!(Gguf::from_bytes(bytes[..length].to_vec()).is_err(), "{length} of {needed} bytes");
    }
}

#[test]
fn huge_counts_cost_nothing() {
    // (where a 64-bit count lies in the file, what it counts)
    let file = sample();
    let whole = file.to_bytes();
    let find = |needle: &[u8]| whole.windows(needle.len()).position(|w| w == needle).unwrap();
    let list = find(b"a.list") + 6 + 4 + 4;
    let text = find(b"a.text") + 6 + 4;
    let bytes = find(b"a.bytes") + 7 + 4 + 4;
    let name = find(b"vector") - 8;
    let size = find(b"vector") + 6 + 4;
    let offset = size + 8 + 4;
    for at in [8, 16, list, text, bytes, name, size, offset] {
        for count in [u64::MAX, 1 << 63, 1 << 40, 1 << 32, 1 << 31, whole.len() as u64 * 2] {
            let mut bytes = whole.clone();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            LARGEST.store(0, Ordering::Relaxed);
            assert!(Gguf::from_bytes(bytes).is_err(), "count {count} at {at}");
            let largest = LARGEST.load(Ordering::Relaxed);
            assert!(largest < 64 << 20, "count {count} at {at} caused an allocation of {largest} bytes");
        }
    }
}

/// Everything a reader of untrusted files does with one.
fn use_file(bytes: Vec<u8>) {
    let Ok(gguf) = Gguf::from_bytes(bytes) else { return };
    for name in gguf.tensor_names() {
        if let Ok(view) = gguf.tensor(name) {
            assert_eq!(view.format.tensor_bytes(view.rows, view.cols), Some(view.bytes.len()));
        }
    }
    let _ = ModelConfig::from_gguf(&gguf);
    let _ = Tokenizer::from_gguf(&gguf);
    let _ = session_runtime::models::ChatTemplate::from_gguf(&gguf)
        .and_then(|template| session_runtime::models::Frames::probe(&template));
}

fn tiny() -> GgufFile {
    small_model("qwen2", Sizes { layers: 1, heads: 1, kv_heads: 1, head_dim: 16, ffn: 16 })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..400), version in 2u32..4) {
        use_file(bytes.clone());
        let mut with_magic = b"GGUF".to_vec();
        with_magic.extend(version.to_le_bytes());
        with_magic.append(&mut bytes);
        use_file(with_magic);
    }

    #[test]
    fn mutated_files_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
        small in any::<bool>(),
    ) {
        let mut bytes = if small { sample().to_bytes() } else { tiny().to_bytes() };
        // Most of a file is weights, where nothing can go wrong: aim at the header.
        let header = if small { bytes.len() } else { bytes.len() - tiny().tensors.iter().map(|t| t.bytes.len()).sum::<usize>() };
        for (index, byte, kind) in edits {
            let at = index.index(header.min(bytes.len()));
            match kind {
                0 => bytes[at] = byte,
                1 => bytes[at] ^= 1 << (byte % 8),
                2 => { bytes.remove(at); }
                _ => bytes.insert(at, byte),
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        use_file(bytes);
    }
}

#[test]
fn shapes_of_made_up_models() {
    let sizes = Sizes { layers: 3, heads: 4, kv_heads: 2, head_dim: 32, ffn: 96 };
    for (name, architecture, pairing, bias, hidden) in [
        ("llama", Architecture::Llama, RopePairing::Adjacent, false, 128),
        ("qwen2", Architecture::Qwen2, RopePairing::Halves, true, 128),
        ("qwen3", Architecture::Qwen3, RopePairing::Halves, false, 64),
    ] {
        let config = ModelConfig::from_gguf(&read(&small_model(name, sizes)).unwrap()).unwrap();
        assert_eq!(config.architecture, architecture);
        assert_eq!((config.layers, config.hidden, config.ffn), (3, hidden, 96));
        assert_eq!(config.qk_norm, name == "qwen3");
        assert!((config.attention_scale - 1.0 / 32_f32.sqrt()).abs() < 1e-9);
        assert_eq!((config.heads, config.kv_heads, config.head_dim, config.rope_dims), (4, 2, 32, 32));
        assert_eq!((config.vocab, config.context_length), (264, 512));
        assert_eq!((config.rms_eps, config.rope_base), (1e-5, 10_000.0));
        assert_eq!((config.rope_pairing, config.qkv_bias, config.tied_embeddings), (pairing, bias, true));
        assert_eq!(config.layer_kinds, vec![LayerKind::Full; 3]);
        // 3 layers x (K and V) x 2 KV heads x 32 channels x 2 bytes
        assert_eq!(config.kv_token_bytes(kernels::backend::KvType::F16), 3 * 2 * 2 * 32 * 2);
    }
}

#[test]
fn unsupported_models_are_refused_by_name() {
    let cases: [Spoil; 15] = [
        ("`mamba` is not supported (supported: llama, qwen2, qwen3)", |file| {
            file.set("general.architecture", string("mamba"));
        }),
        ("llama.block_count", |file| {
            file.unset("llama.block_count");
        }),
        ("`llama.block_count`: 0 is outside", |file| {
            file.set("llama.block_count", word(0));
        }),
        ("4 query heads cannot share 3 KV heads", |file| {
            file.set("llama.attention.head_count_kv", word(3));
        }),
        ("head size is not supported: 8 (supported: multiples of 16", |file| {
            file.set("llama.attention.key_length", word(8));
        }),
        ("a part of each head is not supported: 8", |file| {
            file.set("llama.rope.dimension_count", word(8));
        }),
        ("RoPE scaling is not supported: yarn", |file| {
            file.set("llama.rope.scaling.type", string("yarn"));
        }),
        ("mixture of experts is not supported", |file| {
            file.set("llama.expert_count", word(8));
        }),
        ("sliding window is not supported", |file| {
            file.set("llama.attention.sliding_window", word(128));
        }),
        ("rms_epsilon`: 0 is not a positive number", |file| {
            file.set("llama.attention.layer_norm_rms_epsilon", f32(0.0));
        }),
        ("no tensor `blk.1.ffn_up.weight`", |file| {
            file.tensors.retain(|tensor| tensor.name != "blk.1.ffn_up.weight");
        }),
        ("`rope_freqs.weight` is not part of architecture `llama`", |file| {
            file.tensors.push(Tensor::f32("rope_freqs.weight", 0, 8, (0..8).map(|_| 1.0)));
        }),
        ("tensor `blk.0.attn_q.weight` is 64 x 32, expected 64 x 64", |file| {
            let tensor = file.tensors.iter_mut().find(|t| t.name == "blk.0.attn_q.weight").unwrap();
            *tensor = Tensor::f32("blk.0.attn_q.weight", 64, 32, (0..64 * 32).map(|_| 0.0));
        }),
        ("`blk.0.attn_v.weight` has unsupported type IQ2_XXS (ggml type 16)", |file| {
            file.tensors.iter_mut().find(|t| t.name == "blk.0.attn_v.weight").unwrap().type_id = 16;
        }),
        ("`output_norm.weight` is Q8_0, but a norm", |file| {
            let tensor = file.tensors.iter_mut().find(|t| t.name == "output_norm.weight").unwrap();
            (tensor.type_id, tensor.bytes) = (8, vec![0; 68]);
        }),
    ];
    for (expected, spoil) in cases {
        let mut file = small_model("llama", Sizes::default());
        spoil(&mut file);
        let error = ModelConfig::from_gguf(&read(&file).unwrap()).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

#[test]
fn real_models_are_what_their_authors_say() {
    // (alias, architecture, layers, hidden, ffn, heads, KV heads, head size, vocabulary, context, RoPE base, tied)
    let known = [
        ("smollm2-135m", Architecture::Llama, 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, true),
        ("qwen2.5-coder-0.5b", Architecture::Qwen2, 24, 896, 4864, 14, 2, 64, 151_936, 32768, 1e6, false),
        ("qwen2.5-coder-1.5b", Architecture::Qwen2, 28, 1536, 8960, 12, 2, 128, 151_936, 32768, 1e6, false),
    ];
    for (alias, architecture, layers, hidden, ffn, heads, kv_heads, head_dim, vocab, context, base, tied) in
        known
    {
        let Some(path) = fixtures::model(alias) else { continue };
        let gguf = Gguf::open(&path).unwrap();
        let config = ModelConfig::from_gguf(&gguf).unwrap();
        assert_eq!(config.architecture, architecture);
        assert_eq!((config.layers, config.hidden, config.ffn), (layers, hidden, ffn));
        assert_eq!((config.heads, config.kv_heads, config.head_dim), (heads, kv_heads, head_dim));
        assert_eq!((config.vocab, config.context_length), (vocab, context));
        assert_eq!((config.rope_base, config.tied_embeddings), (base, tied));
        for layer in 0..layers {
            assert!(gguf.tensor(&LayerTensors::new(layer).ffn_down).is_ok());
        }
    }
}
