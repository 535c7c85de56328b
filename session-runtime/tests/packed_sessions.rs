//! Sessions that asked for a codec: their cells take fewer bits, serve nobody else, and go on after a restart.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::path::Path;

use kernels::backend::KvType;
use session_runtime::kv::chunk::CHUNK_TOKENS;
use session_runtime::kv::codec::KvCodec;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::session::spec::SessionSpec;
use session_runtime::{Config, Runtime};
use support::{config, create, say, story};

/// Bytes of K and V of one token in all layers: 30 layers, 3 KV heads, 64 channels, f16.
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
        let bytes = (known - tail) * TOKEN_BYTES * bits / 16 + tail * TOKEN_BYTES;
        assert_eq!(report.bytes_loaded, bytes, "{report:?}");
        // Leaving again loses nothing more and writes nothing new.
        let changes = runtime.evict("s").await.unwrap();
        assert!(changes.bytes <= CHUNK_TOKENS as u64 * TOKEN_BYTES, "{changes:?}");
        runtime.shutdown().await.unwrap();
        let runtime = support::open(directory.path()).await;
        let turn = say(&runtime, "s", "And then?", 8).await;
        // The history has grown by what ended its message since the tail was saved.
        assert_eq!(turn.restores[0].tokens_loaded, known - tail, "{:?}", turn.restores);
        assert_eq!(turn.usage.output_tokens, 8);
        runtime.shutdown().await.unwrap();
    }
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
