//! Readers of the fixtures that `tests/fixtures/generate.py` writes, which says what is in them.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

use std::io::Read;
use std::path::PathBuf;

use serde::Deserialize;
use session_runtime::models::catalog;

/// The file of a model, or `None` (and a line that says so) when it is not on this machine. With
/// `SESSION_RUNTIME_REQUIRE_MODELS=1` a missing model fails the test instead.
pub fn model(alias: &str) -> Option<PathBuf> {
    match catalog::resolve(alias) {
        Ok(file) => Some(file.path),
        Err(error) => {
            let required = std::env::var("SESSION_RUNTIME_REQUIRE_MODELS").is_ok_and(|value| value == "1");
            assert!(!required, "{error}");
            println!("left out: {error}");
            None
        }
    }
}

/// The path of a fixture.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap_or_else(|error| panic!("fixture {name}: {error}"))
}

/// The text whose perplexity is known.
pub fn passage() -> String {
    String::from_utf8(bytes("passage.txt")).unwrap()
}

/// A text and its token ids.
#[derive(Debug, Deserialize)]
pub struct Tokenized {
    pub text: String,
    /// Names of control tokens read as text.
    pub plain: Vec<u32>,
    /// Names of control tokens read as tokens, where that differs.
    pub special: Option<Vec<u32>>,
}

/// The corpus of a pre-tokenizer (`smollm`, `qwen2`).
pub fn tokenized(pre: &str) -> Vec<Tokenized> {
    let packed = bytes(&format!("tokenizer_{pre}.jsonl.gz"));
    let mut text = String::new();
    flate2::read::GzDecoder::new(packed.as_slice()).read_to_string(&mut text).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A chat template with conversations and what they are rendered to.
#[derive(Debug, Deserialize)]
pub struct TemplateFixture {
    pub alias: String,
    pub source: String,
    pub bos: String,
    pub eos: String,
    pub cases: Vec<TemplateCase>,
}

/// One conversation.
#[derive(Debug, Deserialize)]
pub struct TemplateCase {
    pub messages: Vec<serde_json::Value>,
    pub tools: Vec<serde_json::Value>,
    pub add_generation_prompt: bool,
    pub rendered: String,
}

/// The templates of all models.
pub fn templates() -> Vec<TemplateFixture> {
    serde_json::from_slice(&bytes("templates.json")).unwrap()
}

/// Logits of some prompts.
#[derive(Debug)]
pub struct Logits {
    /// Vocabulary ids of `Position::sampled`, ascending.
    pub sampled_ids: Vec<u32>,
    pub prompts: Vec<PromptLogits>,
}

/// Logits at every position of a prompt.
#[derive(Debug)]
pub struct PromptLogits {
    pub ids: Vec<u32>,
    /// One for each of `ids`: the logits after reading it.
    pub positions: Vec<Position>,
}

/// Logits at one position.
#[derive(Debug)]
pub struct Position {
    /// Logits at `Logits::sampled_ids`, rounded to half precision.
    pub sampled: Vec<f32>,
    /// The largest logits and their ids, largest first.
    pub top: Vec<(u32, f32)>,
}

impl Position {
    /// Cosine between the sampled reference logits and `logits` (of the whole vocabulary) at the same ids.
    pub fn cosine(&self, sampled_ids: &[u32], logits: &[f32]) -> f64 {
        let (mut dot, mut ours, mut theirs) = (0.0, 0.0, 0.0);
        for (&id, &reference) in sampled_ids.iter().zip(&self.sampled) {
            let (value, reference) = (f64::from(logits[id as usize]), f64::from(reference));
            dot += value * reference;
            ours += value * value;
            theirs += reference * reference;
        }
        dot / (ours * theirs).sqrt()
    }

    /// How far the largest reference logit is above the second.
    pub fn margin(&self) -> f32 {
        self.top[0].1 - self.top[1].1
    }
}

/// The reference logits of a model; `None` when that fixture is not committed.
pub fn logits(alias: &str) -> Option<Logits> {
    let data = std::fs::read(path(&format!("logits_{alias}.bin"))).ok()?;
    let rest = data.strip_prefix(b"LOGITS01").expect("magic");
    let mut words = Reader { rest };
    let (prompts, sampled, top) = (words.u32(), words.u32(), words.u32());
    let sampled_ids = words.u32s(sampled);
    let prompts = (0..prompts)
        .map(|_| {
            let count = words.u32();
            let ids = words.u32s(count);
            let positions = ids.iter().map(|_| words.position(sampled, top)).collect();
            PromptLogits { ids, positions }
        })
        .collect();
    assert!(words.rest.is_empty());
    Some(Logits { sampled_ids, prompts })
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (&head, rest) = self.rest.split_first_chunk().expect("the fixture ends early");
        self.rest = rest;
        head
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u32s(&mut self, count: u32) -> Vec<u32> {
        (0..count).map(|_| self.u32()).collect()
    }

    fn position(&mut self, sampled: u32, top: u32) -> Position {
        let sampled = (0..sampled).map(|_| half::f16::from_le_bytes(self.take()).to_f32()).collect();
        let top = (0..top).map(|_| (self.u32(), f32::from_le_bytes(self.take()))).collect();
        Position { sampled, top }
    }
}

/// Perplexity and greedy continuations of a model.
#[derive(Debug, Deserialize)]
pub struct Reference {
    pub alias: String,
    pub sha256: String,
    pub passage: Passage,
    pub greedy: Vec<Greedy>,
}

/// What the model makes of `passage()`.
#[derive(Debug, Deserialize)]
pub struct Passage {
    /// Tokens of the text.
    pub tokens: usize,
    /// Sum of -ln p of all tokens but the first.
    pub nll: f64,
    /// exp(nll / (tokens - 1)).
    pub perplexity: f64,
}

/// A greedy continuation.
#[derive(Debug, Deserialize)]
pub struct Greedy {
    pub prompt: String,
    pub prompt_ids: Vec<u32>,
    pub ids: Vec<u32>,
    /// For each id, its logit minus the next largest.
    pub margins: Vec<f32>,
}

/// The reference of a model; `None` when that fixture is not committed.
pub fn reference(alias: &str) -> Option<Reference> {
    let data = std::fs::read(path(&format!("reference_{alias}.json"))).ok()?;
    Some(serde_json::from_slice(&data).unwrap())
}
