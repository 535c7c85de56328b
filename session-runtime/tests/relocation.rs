//! Sessions that take KV near what would be computed: what follows a cut keeps its KV, moved to its new positions, and KV of another
//! rounding or type of element is converted. In the lowest layer K and V depend on a token and its position alone, so that what was moved
//! there is known without the runtime: the values bit for bit, the keys up to the rounding of their elements.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/scheduling.rs"]
mod scheduling;
mod support;

use std::path::Path;
use std::sync::{Arc, Mutex};

use half::f16;
use kernels::backend::KvType;
use kernels::cpu::{CpuBackend, CpuOptions, Rounding};
use session_runtime::engine::{self, EngineOptions};
use session_runtime::kv::chunk::{CHUNK_TOKENS, cell_id, chunks};
use session_runtime::kv::codec::KvCodec;
use session_runtime::kv::contract::Contract;
use session_runtime::kv::reuse::KvReuse;
use session_runtime::models::progress::Silent;
use session_runtime::models::{self, Tokenizer};
use session_runtime::restore::report::RestoreReport;
use session_runtime::scheduler::{
    KvObserver, KvTransition, OpenSession, Relocation, Scheduler, SchedulerOptions,
};
use session_runtime::session::spec::SessionSpec;
use session_runtime::{Config, Runtime};
use store::Store;
use support::{SECOND, config, say, story};

/// Layers, KV heads and channels of the model.
const LAYERS: u32 = 30;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
/// Bytes of K, or of V, of a token and KV head.
const ROW: usize = 2 * HEAD_DIM;

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<(Vec<RestoreReport>, Vec<Relocation>)>>);

impl KvObserver for Seen {
    fn transition(&self, _: &str, _: &KvTransition) {}

    fn restored(&self, _: &str, report: &RestoreReport) {
        self.0.lock().unwrap().0.push(report.clone());
    }

    fn relocated(&self, _: &str, relocation: &Relocation) {
        self.0.lock().unwrap().1.push(relocation.clone());
    }
}

/// A scheduler of its own, where histories can be cut anywhere.
struct Subject {
    scheduler: Scheduler,
    tokenizer: Arc<Tokenizer>,
    store: Store,
    contract: Contract,
    seen: Seen,
}

impl Subject {
    fn new(directory: &Path) -> Self {
        let model = models::open(support::MODEL).unwrap();
        let backend = Arc::new(CpuBackend::new(CpuOptions::default()).unwrap());
        let contract = session_runtime::runtime::contract(&model, backend.as_ref(), KvType::F16, "");
        let (context_length, step_rows) = (1024, 128);
        let engine =
            EngineOptions { budget_bytes: 64 << 20, context_length, step_rows, kv_type: KvType::F16 };
        let engine = engine::open(backend, &model, engine, &Silent).unwrap();
        let store = Store::open(directory, store::StoreOptions::default()).unwrap();
        let options = SchedulerOptions {
            save_when_idle: false,
            share_prefixes: true,
            ..scheduling::options(context_length)
        };
        let clock = Arc::new(store::SystemClock::default());
        let seen = Seen::default();
        let observer = Box::new(seen.clone());
        let scheduler =
            Scheduler::start(engine, store.clone(), contract.clone(), options, clock, observer).unwrap();
        Self { scheduler, tokenizer: Arc::new(model.tokenizer), store, contract, seen }
    }

    /// Makes a session with a history known.
    fn open(&self, id: &str, reuse: KvReuse, tokens: &[u32]) -> Arc<str> {
        let session: Arc<str> = id.into();
        self.scheduler.open(&session, OpenSession { reuse, ..OpenSession::default() }).unwrap();
        self.scheduler.append(&session, tokens.to_vec()).unwrap();
        session
    }

    /// Lets a session write up to `count` tokens.
    async fn write(&self, session: &Arc<str>, count: usize) -> Vec<u32> {
        scheduling::write(&self.scheduler, &self.tokenizer, session, count).await
    }

    /// The cells of one layer of a session's sealed chunks, which leave the device for it.
    async fn cells(
        &self,
        session: &Arc<str>,
        contract: &Contract,
        tokens: &[u32],
        layer: u32,
    ) -> Vec<Vec<u8>> {
        self.scheduler.evict(session).await.unwrap();
        let digest = contract.digest();
        chunks(&digest, tokens)
            .iter()
            .filter(|chunk| chunk.tokens == CHUNK_TOKENS)
            .map(|chunk| self.store.cells().get(&cell_id(&chunk.id, layer), &digest).unwrap().clone())
            .collect()
    }

    fn own_contract(&self, session: &str) -> Contract {
        self.contract.approximate("raw", session)
    }
}

fn history(count: u32) -> Vec<u32> {
    (0..count).map(|index| 300 + index * 7919 % 40_000).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect()
}

/// Compares cells of the lowest layer with what is computed for the same tokens.
fn compare_lowest(moved: &[Vec<u8>], computed: &[Vec<u8>]) {
    assert!(!moved.is_empty());
    for (moved, computed) in moved.iter().zip(computed) {
        for (moved, computed) in
            moved.chunks(2 * CHUNK_TOKENS * ROW).zip(computed.chunks(2 * CHUNK_TOKENS * ROW))
        {
            let (keys, values) = moved.split_at(CHUNK_TOKENS * ROW);
            let (wanted_keys, wanted_values) = computed.split_at(CHUNK_TOKENS * ROW);
            assert!(values == wanted_values, "values have no position");
            let (keys, wanted) = (floats(keys), floats(wanted_keys));
            let largest = wanted.iter().fold(0.0f32, |most, key| most.max(key.abs()));
            for (key, wanted) in keys.iter().zip(&wanted) {
                // Both were rounded to f16, the moved one twice.
                assert!((key - wanted).abs() <= largest * 2.0f32.powi(-10), "{key} {wanted} of {largest}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_follows_a_cut_is_moved_and_only_what_is_new_is_computed() {
    let directory = tempfile::tempdir().unwrap();
    let subject = Subject::new(directory.path());
    for (start, end) in [(37, 90), (64, 128), (0, 5), (10, 11), (200, 390)] {
        let name = format!("moved-{start}");
        let mut tokens = history(400);
        let session = subject.open(&name, KvReuse::Approximate, &tokens);
        tokens.extend(subject.write(&session, 4).await);
        let before = subject.scheduler.device().await.unwrap().tokens_computed;
        subject.scheduler.cut(&session, start, end).await.unwrap();
        tokens.drain(start..end);
        let view = subject.scheduler.view(&session).await.unwrap();
        assert_eq!(view.tokens, tokens.len() as u64);
        tokens.extend(subject.write(&session, 4).await);
        let computed = subject.scheduler.device().await.unwrap().tokens_computed - before;
        // The last token of the first message, and all but the last of the second.
        assert!(computed <= 5, "{computed} tokens computed for a cut at {start}");
        let relocation = subject.seen.0.lock().unwrap().1.pop().unwrap();
        assert_eq!((relocation.start, relocation.cut), (start as u64, (end - start) as u64));

        let control = subject.open(&format!("control-{start}"), KvReuse::Exact, &tokens);
        subject.write(&control, 1).await;
        let own = subject.own_contract(&name);
        for layer in [0, LAYERS - 1] {
            let moved = subject.cells(&session, &own, &tokens, layer).await;
            let exact = subject.cells(&control, &subject.contract, &tokens, layer).await;
            assert_eq!(moved.len(), tokens.len() / CHUNK_TOKENS);
            if layer == 0 {
                compare_lowest(&moved, &exact);
            } else if moved.len() * CHUNK_TOKENS > start {
                assert!(moved.last() != exact.last(), "above it KV depends on what was cut out");
            }
            // What stands before the cut is as it was, in every layer.
            for (moved, exact) in moved.iter().zip(&exact).take(start / CHUNK_TOKENS) {
                assert!(moved == exact);
            }
        }
        subject.scheduler.close(&session).unwrap();
        subject.scheduler.close(&control).unwrap();
    }
    let device = subject.scheduler.device().await.unwrap();
    assert_eq!(device.pages_free, device.pages_total);
}

#[tokio::test(flavor = "multi_thread")]
async fn cuts_of_a_history_that_is_not_on_the_device_are_made_when_it_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let subject = Subject::new(directory.path());
    let tokens = history(400);
    let cuts = [(37, 90), (100, 200), (220, 237), (230, 234)];
    let mut sessions = Vec::new();
    for (name, leaves) in [("here", false), ("away", true)] {
        let mut left = tokens.clone();
        let session = subject.open(name, KvReuse::Approximate, &left);
        left.extend(subject.write(&session, 4).await);
        if leaves {
            subject.scheduler.evict(&session).await.unwrap();
        }
        for (start, end) in cuts {
            subject.scheduler.cut(&session, start, end).await.unwrap();
            left.drain(start..end);
        }
        let error = subject.scheduler.cut(&session, 10, left.len() + 1).await.unwrap_err();
        assert_eq!(error.code, "range_invalid");
        assert_eq!(subject.scheduler.view(&session).await.unwrap().tokens, left.len() as u64);
        left.extend(subject.write(&session, 4).await);
        sessions.push((session, left));
    }
    let (reports, relocations) = std::mem::take(&mut *subject.seen.0.lock().unwrap());
    assert_eq!(reports.len(), 1);
    assert_eq!((reports[0].tokens_loaded, reports[0].tokens_recomputed), (403, 0), "{:?}", reports[0]);
    let cut = |relocation: &Relocation| (relocation.start, relocation.cut, relocation.tokens);
    // The last cut has nothing behind it that was computed.
    assert_eq!(relocations.len(), 2 * (cuts.len() - 1), "{relocations:?}");
    let (here, away) = relocations.split_at(cuts.len() - 1);
    assert!(here.iter().map(cut).eq(away.iter().map(cut)), "{relocations:?}");
    assert_eq!(sessions[0].1, sessions[1].1, "both go on the same");
    for layer in 0..LAYERS {
        let mut cells = Vec::new();
        for (session, tokens) in &sessions {
            let own = subject.own_contract(session);
            cells.push(subject.cells(session, &own, tokens, layer).await);
        }
        assert!(cells[0] == cells[1], "layer {layer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_moving_disturbs_nobody_who_shares_the_pages() {
    let directory = tempfile::tempdir().unwrap();
    let subject = Subject::new(directory.path());
    let tokens = history(300);
    let control = subject.open("control", KvReuse::Exact, &tokens);
    let expected = subject.write(&control, 12).await;
    // One takes the control's pages, the other those of the first.
    let session = subject.open("s", KvReuse::Approximate, &tokens);
    subject.write(&session, 1).await;
    let fork: Arc<str> = "f".into();
    subject.scheduler.cut(&session, 300, 301).await.unwrap();
    subject.scheduler.fork(&session, &fork).await.unwrap();
    subject.scheduler.cut(&session, 20, 60).await.unwrap();
    assert_eq!(subject.seen.0.lock().unwrap().1.len(), 1);
    assert_eq!(subject.write(&fork, 12).await, expected, "a fork of what is still exact");
    subject.scheduler.cut(&control, 300, 312).await.unwrap();
    assert_eq!(subject.write(&control, 12).await, expected);
    // A fork of what is away takes its source's cells, with the cut that waits.
    subject.scheduler.evict(&fork).await.unwrap();
    subject.scheduler.cut(&fork, 0, 64).await.unwrap();
    let late: Arc<str> = "late".into();
    subject.scheduler.fork(&fork, &late).await.unwrap();
    subject.write(&late, 2).await;
    let (reports, relocations) = std::mem::take(&mut *subject.seen.0.lock().unwrap());
    assert_eq!((reports[0].tokens_recomputed, reports[0].cells_refused()), (0, 0), "{reports:?}");
    assert_eq!((relocations[1].start, relocations[1].cut), (0, 64));
    assert_eq!(subject.scheduler.view(&late).await.unwrap().tokens, 300 + 12 - 64 + 2);
    for session in [&session, &fork, &late, &control] {
        subject.scheduler.close(session).unwrap();
    }
    let device = subject.scheduler.device().await.unwrap();
    assert_eq!(device.pages_free, device.pages_total);
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_session_that_wants_it_exact_computes_again() {
    let directory = tempfile::tempdir().unwrap();
    let subject = Subject::new(directory.path());
    let mut tokens = history(300);
    let session = subject.open("s", KvReuse::Exact, &tokens);
    tokens.extend(subject.write(&session, 4).await);
    subject.scheduler.cut(&session, 37, 90).await.unwrap();
    tokens.drain(37..90);
    let before = subject.scheduler.device().await.unwrap().tokens_computed;
    let went_on = subject.write(&session, 8).await;
    assert!(subject.scheduler.device().await.unwrap().tokens_computed - before > 210);
    let control = subject.open("control", KvReuse::Exact, &[&[9], &tokens[..]].concat());
    subject.scheduler.cut(&control, 0, 1).await.unwrap();
    assert_eq!(subject.write(&control, 8).await, went_on);
    assert!(subject.seen.0.lock().unwrap().1.is_empty());
}

async fn create(runtime: &Runtime, id: &str, kv_reuse: KvReuse, kv_codec: KvCodec) {
    let id = Some(id.to_owned());
    runtime.create_session(SessionSpec { id, kv_reuse, kv_codec, ..SessionSpec::default() }).await.unwrap();
}

/// KV of f16 goes on as f32 under another rounding: converted where that is wanted, refused by the names of the fields where not.
#[tokio::test(flavor = "multi_thread")]
async fn i3_kv_near_what_would_be_computed_is_used_where_that_is_wanted() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = Runtime::open(config(directory.path())).await.unwrap();
    for (id, reuse) in [("near", KvReuse::Approximate), ("exact", KvReuse::Exact)] {
        create(&runtime, id, reuse, KvCodec::Raw).await;
        say(&runtime, id, &story(1), 16).await;
        runtime.evict(id).await.unwrap();
    }
    create(&runtime, "packed", KvReuse::Approximate, KvCodec::Lossless).await;
    say(&runtime, "packed", &story(2), 4).await;
    runtime.evict("packed").await.unwrap();
    let narrow = runtime.tokens("near").await.unwrap();
    runtime.shutdown().await.unwrap();

    let wide = Config { kv_type: KvType::F32, rounding: Rounding::Fine, ..config(directory.path()) };
    let runtime = Runtime::open(wide.clone()).await.unwrap();
    let turn = say(&runtime, "near", SECOND, 8).await;
    let report = &turn.restores[0];
    // What ended the message changed the tail since it was saved.
    assert!(report.tokens_loaded >= 512 && report.tokens_recomputed < 64, "{report:?}");
    for (id, fields) in
        [("exact", "contract: kv_layout, numerics_class"), ("packed", "contract: kv_layout, numerics_class")]
    {
        let turn = say(&runtime, id, SECOND, 8).await;
        let report = &turn.restores[0];
        assert_eq!(report.tokens_loaded, 0, "{report:?}");
        assert!(report.refused.iter().any(|refusal| refusal.reason == fields), "{id}: {report:?}");
    }
    // As it stands under the new contract: the same numbers.
    runtime.evict("near").await.unwrap();
    let base = |rounding, kv_type| {
        let model = models::open(support::MODEL).unwrap();
        let backend = CpuBackend::new(CpuOptions { rounding, ..CpuOptions::default() }).unwrap();
        session_runtime::runtime::contract(&model, &backend, kv_type, "").approximate("raw", "near").digest()
    };
    let (old, new) = (base(Rounding::Fast, KvType::F16), base(Rounding::Fine, KvType::F32));
    let sealed = narrow.len() / CHUNK_TOKENS * CHUNK_TOKENS - CHUNK_TOKENS;
    let cells = |digest| {
        let chunks = chunks(&digest, &narrow[..sealed]);
        let cell = |chunk: &_, layer| {
            let chunk: &session_runtime::kv::chunk::Chunk = chunk;
            runtime.store().cells().get(&cell_id(&chunk.id, layer), &digest).unwrap().clone()
        };
        chunks.iter().flat_map(|chunk| [0, LAYERS - 1].map(|layer| cell(chunk, layer))).collect::<Vec<_>>()
    };
    let (old, new) = (cells(old), cells(new));
    assert!(old.len() >= 14);
    for (old, new) in old.iter().zip(&new) {
        assert_eq!(old.len(), 2 * KV_HEADS * CHUNK_TOKENS * ROW);
        let wide: Vec<u8> = floats(old).iter().flat_map(|number| number.to_le_bytes()).collect();
        assert!(*new == wide);
    }
    runtime.shutdown().await.unwrap();

    // And on from there, after a restart, without another conversion.
    let runtime = Runtime::open(wide).await.unwrap();
    let turn = say(&runtime, "near", "And then?", 8).await;
    assert!(turn.restores[0].tokens_loaded >= 512, "{:?}", turn.restores);
}
