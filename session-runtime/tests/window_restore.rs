//! Sessions of a model with window layers: bounded pages, and the same tokens and bits after every restore.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/checkpoints.rs"]
mod checkpoints;
#[path = "support/scheduling.rs"]
mod scheduling;
mod support;

use std::path::Path;
use std::sync::Arc;

use checkpoints::TinyCheckpoint;
use kernels::backend::{KvType, PAGE_TOKENS, PageId};
use kernels::cpu::{CpuBackend, CpuOptions};
use scheduling::{options, write};
use session_runtime::engine::{self, Engine, EngineOptions, LogitRows, SequenceRows};
use session_runtime::kv::chunk::CHUNK_TOKENS;
use session_runtime::kv::pool::PagePool;
use session_runtime::kv::shape::TableShape;
use session_runtime::kv::table::{BlockTable, Need};
use session_runtime::models::progress::Silent;
use session_runtime::models::{self, Tokenizer};
use session_runtime::restore::plan::RestoreMode;
use session_runtime::restore::report::RestoreReport;
use session_runtime::scheduler::{
    KvObserver, KvTransition, OpenSession, Scheduler, SchedulerOptions, Speculation,
};
use session_runtime::{Config, Runtime};
use support::{create, say};

/// Window of the checkpoint, and its layers: window, window, full, window.
const WINDOW: usize = 40;
const LAYERS: u64 = 4;
const FULL_LAYERS: u64 = 1;

struct Subject {
    engine: Engine<CpuBackend>,
    pool: PagePool,
    shape: Arc<TableShape>,
    tokens: Vec<u32>,
}

impl Subject {
    fn new(count: usize) -> Self {
        let checkpoint = TinyCheckpoint::new("gemma3");
        let model = models::open(&checkpoint.name()).unwrap();
        let backend = Arc::new(CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap());
        let options = EngineOptions {
            budget_bytes: 4 << 20,
            context_length: 1024,
            step_rows: CHUNK_TOKENS,
            kv_type: KvType::F16,
        };
        let engine = engine::open(backend, &model, options, &Silent).unwrap();
        let config = engine.config();
        let windows = config.layer_kinds.iter().map(|kind| kind.window()).collect();
        let shape = Arc::new(TableShape::new(windows, config.kv_heads, engine.step_rows()));
        let tokens = (0..count as u32).map(|index| (index * 7919 + 11) % config.vocab as u32).collect();
        Self { pool: PagePool::new(engine.pool_spec().pages), engine, shape, tokens }
    }

    fn step(&mut self, table: &BlockTable, start: usize, end: usize, layers: usize) -> Vec<u32> {
        let mut logits = Vec::new();
        let piece = &self.tokens[start..end];
        let rows = SequenceRows { tokens: piece, start, tables: table, logits: LogitRows::All };
        self.engine.forward(&[rows], layers, &mut logits).unwrap();
        logits.iter().map(|value| value.to_bits()).collect()
    }

    /// Computes tokens `start..end` in pieces of `rows`, dropping what leaves the windows; logits as bits.
    fn compute(&mut self, table: &mut BlockTable, start: usize, end: usize, rows: usize) -> Vec<u32> {
        let mut logits = Vec::new();
        for first in (start..end).step_by(rows) {
            let last = (first + rows).min(end);
            table.prepare(&mut self.pool, first, last).unwrap();
            logits.extend(self.step(table, first, last, LAYERS as usize));
            table.trim(&mut self.pool, last);
        }
        logits
    }
}

#[test]
fn i1_dropping_what_left_the_windows_changes_no_bit() {
    let mut subject = Subject::new(400);
    // A table that keeps every page of every layer.
    let mut whole = BlockTable::new(LAYERS as usize, 1);
    whole.prepare(&mut subject.pool, 0, 400).unwrap();
    let mut expected = Vec::new();
    for start in (0..400).step_by(CHUNK_TOKENS) {
        expected.extend(subject.step(&whole, start, (start + CHUNK_TOKENS).min(400), LAYERS as usize));
    }
    for rows in [CHUNK_TOKENS, 1, 23] {
        let mut table = BlockTable::with_shape(Arc::clone(&subject.shape));
        let got = subject.compute(&mut table, 0, 400, rows);
        assert!(got == expected, "in pieces of {rows}");
        let held = |layer| table.pages(layer, 0).iter().filter(|page| **page != PageId::ABSENT).count();
        assert_eq!(held(2), 25, "the full layer keeps 400 tokens");
        // 400 - 40 = 360 lies in the chunk from 320 on.
        assert_eq!([held(0), held(1), held(3)], [80 / PAGE_TOKENS; 3]);
        table.truncate(&mut subject.pool, 0);
    }
}

/// Cells of the needed chunks and layers are enough to go on, whichever of them are recomputed.
#[test]
fn i1_needed_cells_and_recompute_from_the_front_give_the_same_bits() {
    let mut subject = Subject::new(420);
    let (known, end) = (390, 420);
    let mut stayed = BlockTable::with_shape(Arc::clone(&subject.shape));
    subject.compute(&mut stayed, 0, known, 50);
    let chunks: Vec<(usize, usize)> =
        (0..known).step_by(CHUNK_TOKENS).map(|start| (start, (start + CHUNK_TOKENS).min(known))).collect();
    let cell = |subject: &Subject, table: &BlockTable, (start, end): (usize, usize), layer: usize| {
        let pages = table.range(layer, start, end)?;
        Some(subject.engine.gather_cell(&pages, end - start).unwrap())
    };
    let saved: Vec<Vec<Option<Vec<u8>>>> = chunks
        .iter()
        .map(|chunk| (0..LAYERS as usize).map(|layer| cell(&subject, &stayed, *chunk, layer)).collect())
        .collect();
    let kept = saved.iter().flatten().flatten().count();
    assert_eq!(kept, chunks.len() + 3 * 2, "the full layer's cells, and two chunks of each window layer");
    let expected = subject.compute(&mut stayed, known, end, 7);

    // Cuts fall from chunk to chunk, as plans of such a model do.
    for cuts in [[0; 7], [4; 7], [4, 4, 4, 2, 0, 0, 0], [4, 4, 4, 4, 4, 4, 1], [2; 7], [3, 3, 1, 1, 1, 1, 1]]
    {
        let mut table = BlockTable::with_shape(Arc::clone(&subject.shape));
        table.prepare_for(&mut subject.pool, Need::Restore { known, tokens: known + 1 }).unwrap();
        for (chunk, (&(start, end), cut)) in chunks.iter().zip(cuts).enumerate() {
            table.trim_restore(&mut subject.pool, start, known);
            table.prepare_for(&mut subject.pool, Need::Recompute { start, known }).unwrap();
            subject.step(&table, start, end, cut);
            for (layer, cell) in saved[chunk].iter().enumerate().skip(cut) {
                if let Some(cell) = cell {
                    let pages = table.range(layer, start, end).unwrap();
                    subject.engine.scatter_cell(&pages, end - start, cell).unwrap();
                }
            }
        }
        table.trim(&mut subject.pool, known);
        for (chunk, cells) in chunks.iter().zip(&saved) {
            for (layer, saved) in cells.iter().enumerate() {
                assert!(cell(&subject, &table, *chunk, layer) == *saved, "{cuts:?}: {chunk:?} {layer}");
            }
        }
        let got = subject.compute(&mut table, known, end, 1);
        assert!(got == expected, "logits after a restore by {cuts:?}");
        table.truncate(&mut subject.pool, 0);
    }
    stayed.truncate(&mut subject.pool, 0);
    subject.pool.check([].into_iter()).unwrap();
}

fn config(directory: &Path, model: &TinyCheckpoint) -> Config {
    Config { model: model.name(), device_budget_bytes: 1 << 20, ..support::config(directory) }
}

fn first_message() -> String {
    (0..9).map(|day| format!("Day {day}: the keeper lit {} lamps by the sea at night. ", day * 3)).collect()
}

const THEN: &str = "Which night had the most lamps?";

/// A runtime with a session that was talked to once.
async fn talked(directory: &Path, model: &TinyCheckpoint) -> Runtime {
    let runtime = Runtime::open(config(directory, model)).await.unwrap();
    create(&runtime, "s").await;
    say(&runtime, "s", &first_message(), 16).await;
    runtime
}

async fn expected(model: &TinyCheckpoint) -> Vec<u32> {
    let directory = tempfile::tempdir().unwrap();
    let runtime = talked(directory.path(), model).await;
    say(&runtime, "s", THEN, 24).await;
    let tokens = runtime.tokens("s").await.unwrap();
    assert!(tokens.len() > 3 * (WINDOW + CHUNK_TOKENS), "{} tokens leave the windows", tokens.len());
    tokens
}

fn check(report: &RestoreReport) {
    let cells = report.cells_loaded + report.cells_recomputed + report.cells_outside;
    assert_eq!(cells, report.plan.len() as u64 * LAYERS, "{report:?}");
    assert!(report.plan.is_sorted_by(|before, after| before >= after), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_sessions_with_windows_continue_the_same_after_any_restore() {
    let model = TinyCheckpoint::new("gemma3");
    let expected = expected(&model).await;
    for mode in ["load", "recompute", "cut:1", "cut:3", "alternate", "planned"] {
        let directory = tempfile::tempdir().unwrap();
        let runtime = talked(directory.path(), &model).await;
        let held = runtime.kv("s").await.unwrap().device_bytes;
        runtime.evict("s").await.unwrap();
        let mode: RestoreMode = mode.parse().unwrap();
        let report = runtime.restore("s", mode).await.unwrap();
        check(&report);
        if mode == RestoreMode::Load {
            let chunks = report.plan.len() as u64;
            // Two chunks of each window layer at most: the others hold nothing that is read.
            let most = chunks * FULL_LAYERS + 2 * (LAYERS - FULL_LAYERS);
            assert!(report.cells_loaded <= most && report.cells_outside > 0, "{report:?}");
            assert_eq!(report.cells_recomputed, 0);
        }
        assert_eq!(runtime.kv("s").await.unwrap().device_bytes, held, "{mode}: as many pages as before");
        say(&runtime, "s", THEN, 24).await;
        assert_eq!(runtime.tokens("s").await.unwrap(), expected, "{mode}");
        runtime.delete_session("s").await.unwrap();
        let device = runtime.info().await.unwrap().device;
        assert_eq!(device.pages_free, device.pages_total, "{mode}: every page is free again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_damaged_cells_of_windows_are_recomputed() {
    let model = TinyCheckpoint::new("gemma3");
    let expected = expected(&model).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = talked(directory.path(), &model).await;
    runtime.evict("s").await.unwrap();
    runtime.store().cells().set_fault(store::TierFault::FlipBit);
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    check(&report);
    assert_eq!((report.cells_loaded, report.cells_outside), (0, 0), "{report:?}");
    say(&runtime, "s", THEN, 24).await;
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_restarted_runtime_and_a_fork_continue_the_same() {
    let model = TinyCheckpoint::new("gemma3");
    let expected = expected(&model).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = talked(directory.path(), &model).await;
    runtime.fork_session("s", Some("f".into()), None).await.unwrap();
    say(&runtime, "f", "Another question.", 8).await;
    say(&runtime, "s", THEN, 24).await;
    assert_eq!(runtime.tokens("s").await.unwrap(), expected, "a fork disturbs nothing");
    runtime.delete_session("s").await.unwrap();
    runtime.shutdown().await.unwrap();

    let directory = tempfile::tempdir().unwrap();
    let runtime = talked(directory.path(), &model).await;
    runtime.shutdown().await.unwrap();
    let runtime = Runtime::open(config(directory.path(), &model)).await.unwrap();
    let turn = say(&runtime, "s", THEN, 24).await;
    check(&turn.restores[0]);
    assert_eq!(runtime.tokens("s").await.unwrap(), expected, "a restart changes nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn i9_sessions_with_windows_share_a_pool_that_does_not_hold_them() {
    let model = TinyCheckpoint::new("gemma3");
    let expected = expected(&model).await;
    let directory = tempfile::tempdir().unwrap();
    // 110 pages of 1,024 bytes. A session rests in about 36 (21 in the full layer, 5 in each other one) and reads its
    // first message in about 69.
    let small = Config { device_budget_bytes: 110 << 10, ..config(directory.path(), &model) };
    let runtime = Runtime::open(small).await.unwrap();
    for id in ["s", "t", "u"] {
        create(&runtime, id).await;
        say(&runtime, id, &first_message(), 16).await;
    }
    let turn = say(&runtime, "s", THEN, 24).await;
    assert_eq!(turn.restores.len(), 1, "the third session took the pages of the first");
    for id in ["t", "u"] {
        say(&runtime, id, THEN, 24).await;
    }
    for id in ["s", "t", "u"] {
        assert_eq!(runtime.tokens(id).await.unwrap(), expected);
    }
}

struct Unobserved;

impl KvObserver for Unobserved {
    fn transition(&self, _: &str, _: &KvTransition) {}
    fn restored(&self, _: &str, _: &RestoreReport) {}
}

/// A scheduler of its own, where histories can be cut anywhere.
fn scheduler(directory: &Path, checkpoint: &TinyCheckpoint) -> (Scheduler, Arc<Tokenizer>) {
    let model = models::open(&checkpoint.name()).unwrap();
    let backend = Arc::new(CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }).unwrap());
    let contract = session_runtime::runtime::contract(&model, backend.as_ref(), KvType::F16, "");
    let sizes =
        EngineOptions { budget_bytes: 1 << 20, context_length: 1024, step_rows: 128, kv_type: KvType::F16 };
    let engine = engine::open(backend, &model, sizes, &Silent).unwrap();
    let store = store::Store::open(directory, store::StoreOptions::default()).unwrap();
    let options = SchedulerOptions { speculation: Speculation::Always, ..options(1024) };
    let clock = Arc::new(store::SystemClock::default());
    let scheduler = Scheduler::start(engine, store, contract, options, clock, Box::new(Unobserved)).unwrap();
    (scheduler, Arc::new(model.tokenizer))
}

/// A cut may end the history where window layers have dropped everything.
#[tokio::test(flavor = "multi_thread")]
async fn i1_a_history_cut_before_its_windows_goes_on_as_if_it_had_been_shorter() {
    let checkpoint = TinyCheckpoint::new("gemma3");
    let directory = tempfile::tempdir().unwrap();
    let (scheduler, tokenizer) = scheduler(directory.path(), &checkpoint);
    let tokens: Vec<u32> = (0..420_u32).map(|index| 260 + index * 7919 % 90).collect();
    for (start, end) in [(100, 150), (405, 415), (64, 420), (0, 200)] {
        let (cut, control): (Arc<str>, Arc<str>) = ("cut".into(), "control".into());
        for session in [&cut, &control] {
            scheduler.open(session, OpenSession::default()).unwrap();
        }
        scheduler.append(&cut, tokens.clone()).unwrap();
        let mut left = tokens.clone();
        left.extend(write(&scheduler, &tokenizer, &cut, 6).await);
        scheduler.cut(&cut, start, end).await.unwrap();
        left.drain(start..end);
        scheduler.append(&control, left).unwrap();
        let went_on = write(&scheduler, &tokenizer, &cut, 12).await;
        assert_eq!(went_on, write(&scheduler, &tokenizer, &control, 12).await, "without {start}..{end}");
        assert!(!went_on.is_empty());
        for session in [&cut, &control] {
            scheduler.close(session).unwrap();
        }
        let device = scheduler.device().await.unwrap();
        assert_eq!(device.pages_free, device.pages_total);
    }
}
