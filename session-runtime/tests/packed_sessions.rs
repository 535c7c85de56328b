//! Sessions that asked for a codec: their cells take fewer bits and go on after a restart. Where something is lost they serve nobody
//! else; where nothing is, the session goes on as one that never left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;

use kernels::backend::KvType;
use kernels::codec::lossless::{self, CellLayout};
use session_runtime::kv::chunk::{CHUNK_TOKENS, cell_id, chunks};
use session_runtime::kv::codec::KvCodec;
use session_runtime::kv::contract::Contract;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::session::spec::SessionSpec;
use session_runtime::{Config, Runtime};
use store::{CellWrite, TierFault};
use support::{SECOND, config, control, create, say, story};

/// Layers, KV heads and channels of the model.
const LAYERS: u32 = 30;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
/// Bytes of K and V of one token in all layers, as f16.
const TOKEN_BYTES: u64 = 30 * 3 * 2 * 64 * 2;

async fn create_packed(runtime: &Runtime, id: &str, kv_codec: KvCodec) {
    let spec = SessionSpec { id: Some(id.to_owned()), kv_codec, ..SessionSpec::default() };
    runtime.create_session(spec).await.unwrap();
}

async fn sharing(directory: &Path) -> Runtime {
    Runtime::open(Config { share_prefixes: true, ..config(directory) }).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn sealed_chunks_come_back_from_fewer_bytes_also_after_a_restart() {
    // Bits of a code and, for 32 of them, those of a zero and a step.
    for (codec, bits) in [(KvCodec::Int4, 5), (KvCodec::Int8, 9)] {
        let directory = tempfile::tempdir().unwrap();
        let runtime = support::open(directory.path()).await;
        create_packed(&runtime, "s", codec).await;
        say(&runtime, "s", &story(1), 16).await;
        runtime.evict("s").await.unwrap();
        let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
        assert_eq!((report.cells_refused(), report.tokens_recomputed), (0, 0), "{report:?}");
        let known = report.tokens;
        let tail = known % CHUNK_TOKENS as u64;
        assert!(known > 500 && tail > 0, "{report:?}");
        // The newest sealed chunk and the tail are as they were.
        let recent = tail + CHUNK_TOKENS as u64;
        let bytes = (known - recent) * TOKEN_BYTES * bits / 16 + recent * TOKEN_BYTES;
        assert_eq!(report.bytes_loaded, bytes, "{report:?}");
        // Leaving again loses nothing more and writes nothing new.
        let changes = runtime.evict("s").await.unwrap();
        assert!(changes.bytes <= recent * TOKEN_BYTES, "{changes:?}");
        runtime.shutdown().await.unwrap();
        let runtime = support::open(directory.path()).await;
        let turn = say(&runtime, "s", "And then?", 8).await;
        // The history has grown by what ended its message since the tail was saved.
        assert_eq!(turn.restores[0].tokens_loaded, known - tail, "{:?}", turn.restores);
        assert_eq!(turn.usage.output_tokens, 8);
        runtime.shutdown().await.unwrap();
    }
}

/// KIVI's recent window: older tokens are packed, the newest are as one that packs nothing has them.
#[tokio::test(flavor = "multi_thread")]
async fn the_newest_tokens_lose_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = support::open(directory.path()).await;
    create(&runtime, "raw").await;
    create_packed(&runtime, "s", KvCodec::Int4).await;
    for id in ["raw", "s"] {
        say(&runtime, id, &story(1), 16).await;
        runtime.evict(id).await.unwrap();
    }
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    let known = report.tokens as usize;
    let tokens = runtime.tokens("s").await.unwrap();
    assert_eq!(tokens, runtime.tokens("raw").await.unwrap());
    let (exact, own) = (runtime.contract().digest(), runtime.contract().packed("int4", "s").digest());
    let pairs: Vec<_> =
        chunks(&exact, &tokens[..known]).into_iter().zip(chunks(&own, &tokens[..known])).collect();
    let cells = runtime.store().cells();
    let mut as_they_were = 0;
    for (raw, packed) in &pairs {
        let newest = raw.start + raw.tokens + CHUNK_TOKENS > known;
        let found = if newest && packed.is_sealed() { packed.as_recent() } else { packed.clone() };
        for layer in [0, LAYERS / 2, LAYERS - 1] {
            let raw = cells.get(&cell_id(&raw.id, layer), &exact).unwrap();
            let found = cells.get(&cell_id(&found.id, layer), &own).unwrap();
            assert_eq!(found == raw, newest, "{known}: {} {layer}", packed.start);
            assert_eq!(found.len() < raw.len() / 2, !newest);
        }
        if newest {
            as_they_were += raw.tokens;
            let later = cells.get(&cell_id(&packed.id, 0), &own);
            assert_eq!(later.is_err(), packed.is_sealed(), "what is packed later has another id");
        }
    }
    assert!((CHUNK_TOKENS..2 * CHUNK_TOKENS).contains(&as_they_were), "{as_they_were} of {known}");
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_what_a_codec_may_have_lost_serves_no_other_session() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = sharing(directory.path()).await;
    create_packed(&runtime, "packed", KvCodec::Int4).await;
    say(&runtime, "packed", &story(1), 16).await;
    runtime.evict("packed").await.unwrap();
    runtime.restore("packed", RestoreMode::Load).await.unwrap();
    create(&runtime, "control").await;
    let turn = say(&runtime, "control", &story(1), 16).await;
    assert_eq!((turn.usage.cached_tokens, turn.restores.len()), (0, 0), "neither pages nor cells");
    // The other way round nothing is lost: what another computed exactly may be taken.
    create_packed(&runtime, "late", KvCodec::Int4).await;
    let turn = say(&runtime, "late", &story(1), 16).await;
    assert!(turn.usage.cached_tokens > 200, "{:?}", turn.usage);
    assert_eq!(runtime.tokens("late").await.unwrap(), runtime.tokens("control").await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_keeps_the_codec_and_cells_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = support::open(directory.path()).await;
    create_packed(&runtime, "s", KvCodec::Int4).await;
    say(&runtime, "s", &story(1), 16).await;
    runtime.fork_session("s", Some("t".to_owned()), None).await.unwrap();
    runtime.evict("t").await.unwrap();
    runtime.delete_session("s").await.unwrap();
    let report = runtime.restore("t", RestoreMode::Load).await.unwrap();
    assert_eq!((report.cells_refused(), report.tokens_recomputed), (0, 0), "{report:?}");
    assert!(report.bytes_loaded < report.tokens * TOKEN_BYTES / 2, "{report:?}");
    say(&runtime, "t", "And then?", 8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i3_kv_that_is_not_f16_is_not_packed() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config { kv_type: KvType::Int8, ..config(directory.path()) };
    let runtime = Runtime::open(config).await.unwrap();
    let spec = SessionSpec { kv_codec: KvCodec::Int4, ..SessionSpec::default() };
    let error = runtime.create_session(spec).await.unwrap_err();
    assert_eq!(error.code, "kv_codec_unsupported");
    assert!(error.to_string().contains("--kv-type f16"), "{error}");
}

/// Cells of the first tokens of a session's history on disk under a contract, and their bytes.
async fn on_disk(runtime: &Runtime, id: &str, contract: &Contract, count: usize) -> (usize, u64) {
    let tokens = runtime.tokens(id).await.unwrap();
    let chunks = chunks(&contract.digest(), &tokens[..count]);
    let ids: Vec<_> =
        chunks.iter().flat_map(|chunk| (0..LAYERS).map(|layer| cell_id(&chunk.id, layer))).collect();
    let places = runtime.store().cells().locate(&ids);
    (places.iter().flatten().count(), places.iter().flatten().map(|place| place.len).sum())
}

/// Compares every cell that both have on disk, one packed without loss and the other as it is; how many there were.
async fn equal_cells(runtime: &Runtime, packed: &str, raw: &str) -> usize {
    let tokens = runtime.tokens(packed).await.unwrap();
    assert_eq!(tokens, runtime.tokens(raw).await.unwrap());
    let contract = runtime.contract();
    let (exact, lossless) = (contract.digest(), contract.lossless().digest());
    let mut count = 0;
    for (one, other) in chunks(&exact, &tokens).iter().zip(chunks(&lossless, &tokens)) {
        let layout =
            CellLayout { kv_heads: KV_HEADS, tokens: one.tokens, head_dim: HEAD_DIM, kv_type: KvType::F16 };
        for layer in 0..LAYERS {
            let cells = runtime.store().cells();
            let raw = cells.get(&cell_id(&one.id, layer), &exact);
            let packed = cells.get(&cell_id(&other.id, layer), &lossless);
            if let (Ok(raw), Ok(packed)) = (raw, packed) {
                assert!(lossless::unpack(&layout, &packed).unwrap() == raw, "{} {layer}", one.start);
                count += 1;
            }
        }
    }
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_a_session_packed_without_loss_goes_on_as_one_that_never_left() {
    let expected = control(1).await;
    // From disk, and from host memory.
    for host_budget_bytes in [0, 64 << 20] {
        let directory = tempfile::tempdir().unwrap();
        let runtime = Runtime::open(Config { host_budget_bytes, ..config(directory.path()) }).await.unwrap();
        let modes = [RestoreMode::Load, RestoreMode::Recompute, RestoreMode::Alternate, RestoreMode::Cut(11)];
        for mode in modes {
            let id = mode.to_string().replace(':', "-");
            create_packed(&runtime, &id, KvCodec::Lossless).await;
            say(&runtime, &id, &story(1), 16).await;
            runtime.evict(&id).await.unwrap();
            let report = runtime.restore(&id, mode).await.unwrap();
            assert_eq!(report.cells_refused(), 0, "{report:?}");
            let raw = report.cells_loaded * TOKEN_BYTES / u64::from(LAYERS) * CHUNK_TOKENS as u64;
            assert!(report.bytes_loaded <= raw * 9 / 10, "{report:?}");
            if mode == RestoreMode::Load {
                assert_eq!(report.tokens_recomputed + report.tokens_mixed, 0, "{report:?}");
                // What is told is what lies there, the tail included.
                let (cells, bytes) =
                    on_disk(&runtime, &id, &runtime.contract().lossless(), report.tokens as usize).await;
                assert_eq!((report.cells_loaded, report.bytes_loaded), (cells as u64, bytes), "{report:?}");
            }
            say(&runtime, &id, SECOND, 24).await;
            assert_eq!(runtime.tokens(&id).await.unwrap(), expected, "{mode}");
        }
        create(&runtime, "raw").await;
        say(&runtime, "raw", &story(1), 16).await;
        say(&runtime, "raw", SECOND, 24).await;
        for id in ["raw", "load", "alternate"] {
            runtime.evict(id).await.unwrap();
        }
        for id in ["load", "alternate"] {
            assert!(equal_cells(&runtime, id, "raw").await >= 8 * LAYERS as usize);
        }
        runtime.shutdown().await.unwrap();
        // They are found again after a restart.
        let runtime = support::open(directory.path()).await;
        let report = runtime.restore("load", RestoreMode::Load).await.unwrap();
        // The history has grown by what ended its message since the tail was saved.
        let sealed = report.tokens / CHUNK_TOKENS as u64 * CHUNK_TOKENS as u64;
        assert_eq!(
            (report.tokens_loaded, report.tokens - sealed),
            (sealed, report.tokens_recomputed),
            "{report:?}"
        );
        runtime.shutdown().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_sessions_packed_without_loss_share_cells_with_each_other_and_pages_with_all() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = sharing(directory.path()).await;
    create_packed(&runtime, "first", KvCodec::Lossless).await;
    say(&runtime, "first", &story(1), 16).await;
    // Pages of one that is packed, for one that is not; and back.
    create(&runtime, "raw").await;
    let turn = say(&runtime, "raw", &story(1), 16).await;
    assert!(turn.usage.cached_tokens > 200 && turn.restores.is_empty(), "{turn:?}");
    runtime.evict("first").await.unwrap();
    create_packed(&runtime, "second", KvCodec::Lossless).await;
    let turn = say(&runtime, "second", &story(1), 16).await;
    assert!(turn.usage.cached_tokens > 200 && turn.restores.is_empty(), "{turn:?}");
    // What it took was not saved under its own contract before.
    runtime.evict("raw").await.unwrap();
    runtime.evict("second").await.unwrap();
    let contract = runtime.contract();
    let raw = on_disk(&runtime, "raw", contract, 8 * CHUNK_TOKENS).await;
    let packed = on_disk(&runtime, "second", &contract.lossless(), 8 * CHUNK_TOKENS).await;
    assert_eq!((raw.0, packed.0), (8 * LAYERS as usize, 8 * LAYERS as usize));
    assert!(packed.1 * 10 < raw.1 * 9, "{raw:?} {packed:?}");
    // Cells, where no pages are left. A fork has those of its source.
    create_packed(&runtime, "third", KvCodec::Lossless).await;
    let turn = say(&runtime, "third", &story(1), 16).await;
    assert!(turn.restores.iter().any(|restore| restore.cells_loaded > 0), "{turn:?}");
    runtime.fork_session("third", Some("fork".to_owned()), None).await.unwrap();
    runtime.evict("third").await.unwrap();
    let before = runtime.info().await.unwrap().disk.cells;
    runtime.evict("fork").await.unwrap();
    let after = runtime.info().await.unwrap().disk.cells;
    assert_eq!(before, after, "it has the cells of its source");
    let tokens = runtime.tokens("first").await.unwrap();
    for id in ["raw", "second", "third", "fork"] {
        assert_eq!(runtime.tokens(id).await.unwrap(), tokens, "{id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_cells_packed_without_loss_that_are_damaged_are_recomputed_with_the_reason() {
    let expected = control(1).await;
    let directory = tempfile::tempdir().unwrap();
    let runtime = support::open(directory.path()).await;
    create_packed(&runtime, "s", KvCodec::Lossless).await;
    say(&runtime, "s", &story(1), 16).await;
    runtime.evict("s").await.unwrap();
    // Bytes that are whole and verify, and are no packed cell: as if one of another codec had got there.
    let tokens = runtime.tokens("s").await.unwrap();
    let contract = runtime.contract().lossless().digest();
    let chunk = chunks(&contract, &tokens).remove(2);
    let (id, raw) = (cell_id(&chunk.id, 4), vec![0; KV_HEADS * 2 * CHUNK_TOKENS * HEAD_DIM * 2]);
    runtime.store().cells().remove(&[id]).unwrap();
    let written = runtime.store().cells().put(&[CellWrite {
        id,
        contract,
        chunk: chunk.id,
        layer: 4,
        tokens: CHUNK_TOKENS as u32,
        codec: KvCodec::Lossless.number(),
        owner: [0; 16],
        owner_quota: None,
        payload: &raw,
    }]);
    assert!(written.unwrap().refused.is_empty());
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    assert_eq!((report.cells_refused(), report.tokens_mixed), (1, CHUNK_TOKENS as u64), "{report:?}");
    assert!(report.refused[0].reason.contains("version is 0"), "{report:?}");
    // A flipped bit is found before that.
    runtime.evict("s").await.unwrap();
    runtime.store().cells().set_fault(TierFault::FlipBit);
    let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
    runtime.store().cells().set_fault(TierFault::None);
    assert_eq!((report.tokens_loaded, &*report.refused[0].reason), (0, "corrupt"), "{report:?}");
    say(&runtime, "s", SECOND, 24).await;
    assert_eq!(runtime.tokens("s").await.unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_kv_of_any_type_is_packed_without_loss() {
    for kv_type in [KvType::F32, KvType::Int8] {
        let directory = tempfile::tempdir().unwrap();
        let runtime = Runtime::open(Config { kv_type, ..config(directory.path()) }).await.unwrap();
        create(&runtime, "control").await;
        create_packed(&runtime, "s", KvCodec::Lossless).await;
        for id in ["control", "s"] {
            say(&runtime, id, &story(1), 16).await;
        }
        runtime.evict("s").await.unwrap();
        let report = runtime.restore("s", RestoreMode::Load).await.unwrap();
        assert_eq!((report.cells_refused(), report.tokens_recomputed), (0, 0), "{report:?}");
        for id in ["control", "s"] {
            say(&runtime, id, SECOND, 16).await;
        }
        assert_eq!(runtime.tokens("s").await.unwrap(), runtime.tokens("control").await.unwrap());
    }
}
