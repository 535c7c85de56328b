//! The engine against float32 references of the same dequantised weights, made by another
//! implementation (`tests/fixtures/generate.py`): logits, greedy continuations, perplexity.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/fixtures.rs"]
mod fixtures;

use std::sync::Arc;

use kernels::backend::KvType;
use kernels::codec::{CellShape, Codec, pack, unpack};
use kernels::cpu::{CpuBackend, CpuOptions, Rounding};
use session_runtime::engine::{self, Engine, EngineOptions, LogitRows, SequenceRows};
use session_runtime::kv::chunk::CHUNK_TOKENS;
use session_runtime::kv::pool::PagePool;
use session_runtime::kv::table::BlockTable;
use session_runtime::models::progress::Silent;
use session_runtime::models::{self, Tokenizer};

const STEP_ROWS: usize = 256;

struct Subject {
    engine: Engine<CpuBackend>,
    pool: PagePool,
    tokenizer: Tokenizer,
}

impl Subject {
    fn open(alias: &str, rounding: Rounding, kv_type: KvType) -> Self {
        let model = models::open(alias).unwrap();
        let backend =
            Arc::new(CpuBackend::new(CpuOptions { threads: 2, rounding, ..CpuOptions::default() }).unwrap());
        let options =
            EngineOptions { budget_bytes: 192 << 20, context_length: 4096, step_rows: STEP_ROWS, kv_type };
        let engine = engine::open(backend, &model, options, &Silent).unwrap();
        let pool = PagePool::new(engine.pool_spec().pages);
        Self { engine, pool, tokenizer: model.tokenizer }
    }

    /// Calls `look` with each position's logits after computing `tokens`.
    fn logits(&mut self, tokens: &[u32], look: &mut dyn FnMut(usize, &[f32])) {
        let (layers, kv_heads) = (self.engine.config().layers, self.engine.config().kv_heads);
        let vocab = self.engine.config().vocab;
        let mut table = BlockTable::new(layers, kv_heads);
        table.prepare(&mut self.pool, 0, tokens.len()).unwrap();
        let mut logits = Vec::new();
        for start in (0..tokens.len()).step_by(STEP_ROWS) {
            let end = (start + STEP_ROWS).min(tokens.len());
            logits.clear();
            let rows =
                SequenceRows { tokens: &tokens[start..end], start, tables: &table, logits: LogitRows::All };
            self.engine.forward(&[rows], layers, &mut logits).unwrap();
            for (index, row) in logits.chunks_exact(vocab).enumerate() {
                look(start + index, row);
            }
        }
        table.truncate(&mut self.pool, 0);
    }
}

/// Tokens whose KV is as computed while what is older went through a codec.
const RECENT: usize = 128;

/// Perplexity of the passage where the KV of all but the most recent tokens was packed and unpacked.
fn packed_perplexity(subject: &mut Subject, codec: Codec) -> f64 {
    let config = subject.engine.config().clone();
    let tokens = subject.tokenizer.encode_text(&fixtures::passage()).unwrap();
    let mut table = BlockTable::new(config.layers, config.kv_heads);
    table.prepare(&mut subject.pool, 0, tokens.len()).unwrap();
    let (mut logits, mut total) = (Vec::new(), 0.0);
    for start in (0..tokens.len()).step_by(CHUNK_TOKENS) {
        let end = (start + CHUNK_TOKENS).min(tokens.len());
        logits.clear();
        let rows =
            SequenceRows { tokens: &tokens[start..end], start, tables: &table, logits: LogitRows::All };
        subject.engine.forward(&[rows], config.layers, &mut logits).unwrap();
        total += surprise(config.vocab, &logits, &tokens[start + 1..(end + 1).min(tokens.len())]);
        let Some(old) = end.checked_sub(RECENT + CHUNK_TOKENS) else { continue };
        let (start, end) = (old, old + CHUNK_TOKENS);
        let shape = CellShape {
            kv_heads: config.kv_heads,
            tokens: CHUNK_TOKENS,
            head_dim: config.head_dim,
            start,
            rope_base: config.rope_base,
            rope_pairing: config.rope_pairing,
        };
        for layer in 0..config.layers {
            let pages = table.range(layer, start, end).unwrap();
            let cell = subject.engine.gather_cell(&pages, CHUNK_TOKENS).unwrap();
            let packed = pack(codec, &shape, &cell).unwrap();
            let cell = unpack(codec, &shape, &packed).unwrap();
            subject.engine.scatter_cell(&pages, CHUNK_TOKENS, &cell).unwrap();
        }
    }
    table.truncate(&mut subject.pool, 0);
    (total / (tokens.len() - 1) as f64).exp()
}

/// Minus the sum of the log probabilities of `next`, each of which follows a row of `logits`.
fn surprise(vocab: usize, logits: &[f32], next: &[u32]) -> f64 {
    let rows = logits.chunks_exact(vocab).zip(next);
    rows.map(|(row, next)| {
        let highest = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|logit| f64::from(logit - highest).exp()).sum();
        sum.ln() - f64::from(row[*next as usize] - highest)
    })
    .sum()
}

/// Cosines to the reference's logits at the positions of 20 prompts: the worst one, how many are below 0.999, and of how
/// many.
fn cosines(subject: &mut Subject, alias: &str) -> (f64, usize, usize) {
    let reference = fixtures::logits(alias).unwrap();
    assert_eq!(reference.prompts.len(), 20);
    let (mut worst, mut short, mut all) = (1.0_f64, 0, 0);
    for prompt in &reference.prompts {
        subject.logits(&prompt.ids, &mut |position, logits| {
            let cosine = prompt.positions[position].cosine(&reference.sampled_ids, logits);
            worst = worst.min(cosine);
            short += usize::from(cosine < 0.999);
            all += 1;
        });
    }
    (worst, short, all)
}

/// Every position, where neither activations nor keys and values are rounded to few bits.
fn logits_agree(subject: &mut Subject, alias: &str) {
    let (worst, short, _) = cosines(subject, alias);
    assert!(worst >= 0.999, "{alias}: {short} positions are short, the worst cosine is {worst}");
}

/// Rounding to 8 bits is seen at near-ties: at few positions.
fn most_logits_agree(subject: &mut Subject, alias: &str) {
    let (worst, short, all) = cosines(subject, alias);
    assert!(short * 20 <= all, "{alias}: {short} of {all} positions are short, the worst cosine is {worst}");
}

/// Perplexity of a fixed text of about 2,000 tokens within a part of the reference's.
fn perplexity_agrees(subject: &mut Subject, alias: &str, within: f64) {
    let reference = fixtures::reference(alias).unwrap().passage;
    let tokens = subject.tokenizer.encode_text(&fixtures::passage()).unwrap();
    assert_eq!(tokens.len(), reference.tokens);
    let mut total = 0.0;
    subject.logits(&tokens, &mut |position, logits| {
        let next = &tokens[position + 1..(position + 2).min(tokens.len())];
        total += surprise(logits.len(), logits, next);
    });
    let perplexity = (total / (tokens.len() - 1) as f64).exp();
    let ratio = perplexity / reference.perplexity;
    assert!((ratio - 1.0).abs() <= within, "{alias}: {perplexity} against {}", reference.perplexity);
}

/// Greedy continuations are the reference's as long as its first choice leads clearly.
fn continuations_agree(subject: &mut Subject, alias: &str) {
    const CLEAR: f32 = 1.0;
    for case in fixtures::reference(alias).unwrap().greedy {
        assert_eq!(subject.tokenizer.encode_with_specials(&case.prompt).unwrap(), case.prompt_ids);
        let tokens: Vec<u32> = case.prompt_ids.iter().chain(&case.ids).copied().collect();
        let first = case.prompt_ids.len() - 1;
        subject.logits(&tokens, &mut |position, logits| {
            let Some(step) = position.checked_sub(first) else { return };
            let Some(wanted) = case.ids.get(step) else { return };
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            let agrees = best == *wanted as usize || case.margins[step] < CLEAR;
            assert!(agrees, "{alias}: '{}' step {step}: {best}, not {wanted}", case.prompt);
        });
    }
}

/// Perplexity where old KV was packed, within a part of the reference's.
fn packed_perplexity_agrees(alias: &str) {
    let mut subject = Subject::open(alias, Rounding::Fast, KvType::F16);
    let reference = fixtures::reference(alias).unwrap().passage.perplexity;
    for (codec, within) in [(Codec::Int8, 0.002), (Codec::Int4, 0.02)] {
        let perplexity = packed_perplexity(&mut subject, codec);
        assert!(
            perplexity / reference - 1.0 <= within,
            "{alias}, {codec:?}: {perplexity} against {reference}"
        );
    }
}

fn agrees(alias: &str) {
    let mut subject = Subject::open(alias, Rounding::Fine, KvType::F32);
    logits_agree(&mut subject, alias);
    let mut subject = Subject::open(alias, Rounding::Fast, KvType::F16);
    most_logits_agree(&mut subject, alias);
    continuations_agree(&mut subject, alias);
    perplexity_agrees(&mut subject, alias, 0.01);
    let mut subject = Subject::open(alias, Rounding::Fast, KvType::Int8);
    perplexity_agrees(&mut subject, alias, 0.005);
}

#[test]
fn smollm2_135m_agrees_with_its_reference() {
    agrees("smollm2-135m");
    packed_perplexity_agrees("smollm2-135m");
}

#[test]
fn qwen_0_5b_agrees_with_its_reference() {
    agrees("qwen2.5-coder-0.5b");
    packed_perplexity_agrees("qwen2.5-coder-0.5b");
}

#[test]
fn qwen_1_5b_agrees_with_its_reference() {
    agrees("qwen2.5-coder-1.5b");
}
