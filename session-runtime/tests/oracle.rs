//! The oracle of I1: random lives of sessions (turns, forks, evictions, restores with any cut, throttles and faults of host
//! memory and disk, full disks, restarts, other sessions beside them, cells raw or packed without loss) against controls that never
//! left memory and pack nothing. Tokens are equal, and so are the bytes of every cell that both have saved. `ORACLE_CASES` sets how many cases run, `ORACLE_SEED` where they begin.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/checkpoints.rs"]
mod checkpoints;
mod support;

use std::time::Duration;

use checkpoints::TinyCheckpoint;
use kernels::backend::KvType;
use kernels::codec::lossless::{self, CellLayout};
use session_runtime::kv::chunk::{Chunk, cell_id, chunks};
use session_runtime::kv::codec::KvCodec;
use session_runtime::models;
use session_runtime::restore::plan::RestoreMode;
use session_runtime::scheduler::Speculation;
use session_runtime::session::spec::{Sampling, SessionSpec, TurnRequest};
use session_runtime::session::view::TurnStatus;
use session_runtime::{Config, Runtime};
use store::{Throttle, TierFault};

const CASES: u64 = 500;
/// Cases that use one data directory, one after the other.
const CASES_A_DIRECTORY: u64 = 20;
/// A session with more tokens is not talked to any more: the checkpoints have a context of 1,024.
const TOKENS_MOST: u64 = 420;
/// Tokens that the device has room for: more than any session gets, and fewer than two of the long ones.
const DEVICE_TOKENS: usize = 760;
/// Tokens that a small host tier has room for: a few chunks.
const HOST_TOKENS: usize = 260;

/// SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// What was said to a session, its forefathers included.
#[derive(Clone, Debug)]
struct Life {
    id: String,
    turns: Vec<(String, u32)>,
    sampling: Sampling,
    codec: KvCodec,
}

fn text(random: &mut Random) -> String {
    let words = ["the sea ", "a lamp ", "at night ", "Day 7: ", "who counted ", "letters, ", "12.50 "];
    (0..3 + random.below(16)).map(|_| random.one_of(&words)).collect()
}

/// How a session begins: few beginnings, so that sessions have them in common, also with those of earlier cases.
fn opening(random: &mut Random) -> String {
    let keeper = random.one_of(&["The keeper of the harbour", "A reader in the library"]);
    let days: String =
        (1..6).map(|day| format!("{keeper} counted {} lamps on day {day}. ", day * 3)).collect();
    days + &text(random)
}

fn request(turn: &(String, u32)) -> TurnRequest {
    TurnRequest { input: turn.0.clone(), max_tokens: Some(turn.1), ..TurnRequest::default() }
}

async fn create(runtime: &Runtime, life: &Life, kv_codec: KvCodec) {
    let (id, sampling) = (Some(life.id.clone()), life.sampling.clone());
    let spec = SessionSpec { id, sampling, kv_codec, ..SessionSpec::default() };
    runtime.create_session(spec).await.unwrap();
}

/// Runs a turn of each session at the same time.
async fn say(runtime: &Runtime, turns: &[(&str, (String, u32))]) {
    let mut begun = Vec::new();
    for (id, turn) in turns {
        begun.push((*id, runtime.start_turn(id, request(turn)).await.unwrap().id));
    }
    for (id, turn) in begun {
        let view = runtime.wait_turn(id, &turn).await.unwrap();
        assert_eq!(view.status, TurnStatus::Completed, "{:?}", view.error);
    }
}

/// What has happened: a run that lacks some of it shows little.
#[derive(Debug, Default)]
struct Seen {
    from_host: u64,
    from_disk: u64,
    recomputed: u64,
    refused: u64,
    shared_pages: u64,
    shared_cells: u64,
    evicted: u64,
    /// Cells compared that had been packed without loss.
    packed: u64,
}

impl Seen {
    async fn look(&mut self, runtime: &Runtime, life: &Life) {
        let kv = runtime.kv(&life.id).await.unwrap();
        self.shared_pages += kv.shared_pages;
        if let Some(report) = kv.last_restore {
            self.from_host += report.from_host.cells;
            self.from_disk += report.from_disk.cells;
            self.recomputed += report.cells_recomputed;
            self.refused += report.cells_refused();
        }
        for (_, _, change) in runtime.transitions(&life.id).await.unwrap() {
            self.shared_cells += u64::from(change.reason == "shared");
            self.evicted += u64::from(change.reason == "pressure");
        }
    }

    fn is_enough(&self) -> bool {
        [
            self.from_host,
            self.from_disk,
            self.recomputed,
            self.refused,
            self.shared_pages,
            self.shared_cells,
            self.evicted,
            self.packed,
        ]
        .into_iter()
        .all(|count| count > 20)
    }
}

/// A checkpoint with a type of KV, and the runtime of its controls.
struct Subject {
    checkpoint: TinyCheckpoint,
    layers: u32,
    kv_heads: usize,
    head_dim: usize,
    token_bytes: usize,
    kv_type: KvType,
    controls: Runtime,
    _directory: tempfile::TempDir,
}

impl Subject {
    async fn new(name: &str, kv_type: KvType) -> Self {
        let checkpoint = TinyCheckpoint::new(name);
        let directory = tempfile::tempdir().unwrap();
        let config = Config {
            model: checkpoint.name(),
            kv_type,
            speculation: Speculation::Off,
            ..support::config(directory.path())
        };
        let controls = Runtime::open(config).await.unwrap();
        let model = models::open(&checkpoint.name()).unwrap().config;
        let (layers, token_bytes) = (model.layers as u32, model.kv_token_bytes(kv_type));
        let (kv_heads, head_dim) = (model.kv_heads, model.head_dim);
        Self { checkpoint, layers, kv_heads, head_dim, token_bytes, kv_type, controls, _directory: directory }
    }

    /// A runtime with little room.
    fn config(&self, directory: &std::path::Path, random: &mut Random) -> Config {
        Config {
            model: self.checkpoint.name(),
            kv_type: self.kv_type,
            device_budget_bytes: (DEVICE_TOKENS * self.token_bytes) as u64,
            host_budget_bytes: random.one_of(&[0, HOST_TOKENS * self.token_bytes, 64 << 20]) as u64,
            // Without room on disk, host memory alone keeps what leaves the device.
            disk_quota_bytes: random.one_of(&[0, 1 << 30, 1 << 30, 1 << 30]),
            threads: 1 + random.below(2),
            share_prefixes: random.below(2) == 0,
            save_when_idle: random.below(2) == 0,
            speculation: random.one_of(&[Speculation::Off, Speculation::Always, Speculation::Auto]),
            ..support::config(directory)
        }
    }

    /// Compares a life with its control.
    async fn check(&self, runtime: &Runtime, life: &Life, seen: &mut Seen) {
        create(&self.controls, life, KvCodec::Raw).await;
        for turn in &life.turns {
            say(&self.controls, &[(&life.id, turn.clone())]).await;
        }
        let tokens = runtime.tokens(&life.id).await.unwrap();
        assert_eq!(tokens, self.controls.tokens(&life.id).await.unwrap(), "{life:?}");
        // The control leaves memory only now, to be compared.
        for side in [runtime, &self.controls] {
            let _ = side.evict(&life.id).await;
        }
        let contract = self.controls.contract();
        let (raw, lossless) = (contract.digest(), contract.lossless().digest());
        let ours = if life.codec == KvCodec::Raw { raw } else { lossless };
        for (chunk, own) in chunks(&raw, &tokens).iter().zip(chunks(&ours, &tokens)) {
            for layer in 0..self.layers {
                let Some(control) = cell(&self.controls, &raw, chunk, layer) else { continue };
                let Some(mut cell) = cell(runtime, &ours, &own, layer) else { continue };
                if life.codec == KvCodec::Lossless {
                    seen.packed += 1;
                    cell = lossless::unpack(&self.layout(chunk.tokens), &cell).unwrap();
                }
                assert!(cell == control, "chunk at {} of layer {layer}: {life:?}", chunk.start);
            }
        }
        self.controls.delete_session(&life.id).await.unwrap();
    }

    fn layout(&self, tokens: usize) -> CellLayout {
        let Self { kv_heads, head_dim, kv_type, .. } = *self;
        CellLayout { kv_heads, tokens, head_dim, kv_type }
    }
}

/// A cell as the disk has it.
fn cell(of: &Runtime, contract: &[u8; 32], chunk: &Chunk, layer: u32) -> Option<Vec<u8>> {
    of.store().cells().get(&cell_id(&chunk.id, layer), contract).ok()
}

/// One case: a few sessions and what happens to them.
async fn case(subject: &Subject, directory: &std::path::Path, number: u64, seen: &mut Seen) {
    let mut random = Random(number);
    let mut runtime = Runtime::open(subject.config(directory, &mut random)).await.unwrap();
    let mut lives: Vec<Life> = Vec::new();
    for index in 0..2 + random.below(2) {
        let temperature = random.one_of(&[None, None, Some(0.9)]);
        let sampling = Sampling { temperature, seed: Some(number), ..Sampling::default() };
        let codec = random.one_of(&[KvCodec::Raw, KvCodec::Lossless]);
        let life = Life { id: format!("c{number}-{index}"), turns: Vec::new(), sampling, codec };
        create(&runtime, &life, codec).await;
        lives.push(life);
    }
    for _ in 0..6 + random.below(8) {
        let index = random.below(lives.len());
        let id = lives[index].id.clone();
        match random.below(12) {
            0..5 => {
                let mut turns = Vec::new();
                for index in [index, (index + 1) % lives.len()].into_iter().take(1 + random.below(2)) {
                    if runtime.kv(&lives[index].id).await.unwrap().tokens > TOKENS_MOST {
                        continue;
                    }
                    let first = lives[index].turns.is_empty();
                    let said = if first { opening(&mut random) } else { text(&mut random) };
                    let turn = (said, 1 + random.below(20) as u32);
                    lives[index].turns.push(turn.clone());
                    turns.push((lives[index].id.clone(), turn));
                }
                let turns: Vec<(&str, (String, u32))> =
                    turns.iter().map(|(id, turn)| (id.as_str(), turn.clone())).collect();
                say(&runtime, &turns).await;
            }
            5 if lives.len() < 5 => {
                let fork = Life { id: format!("c{number}-f{}", lives.len()), ..lives[index].clone() };
                runtime.fork_session(&id, Some(fork.id.clone()), None).await.unwrap();
                lives.push(fork);
            }
            // It may be that there is nothing to evict or to restore.
            5..8 => drop(runtime.evict(&id).await),
            8 | 9 => {
                let cut = RestoreMode::Cut(random.below(4) as u32);
                let modes = [
                    RestoreMode::Load,
                    RestoreMode::Recompute,
                    RestoreMode::Alternate,
                    RestoreMode::Planned,
                    cut,
                ];
                let _ = runtime.restore(&id, random.one_of(&modes)).await;
            }
            10 => {
                let cells = runtime.store().cells();
                let faults = [
                    TierFault::None,
                    TierFault::DropReads,
                    TierFault::FlipBit,
                    TierFault::Tear,
                    TierFault::Stale,
                ];
                let mut throttle = || {
                    let bytes_per_s = random.one_of(&[None, Some(200_000), Some(5_000_000)]);
                    Throttle { bytes_per_s, latency: Duration::ZERO }
                };
                cells.set_throttle(throttle());
                runtime.host_control().set_throttle(throttle());
                cells.set_fault(random.one_of(&faults));
                runtime.host_control().set_fault(random.one_of(&faults));
            }
            _ => {
                runtime.shutdown().await.unwrap();
                runtime = Runtime::open(subject.config(directory, &mut random)).await.unwrap();
            }
        }
    }
    runtime.store().cells().set_fault(TierFault::None);
    runtime.store().cells().set_throttle(Throttle::default());
    for life in &lives {
        seen.look(&runtime, life).await;
    }
    for life in &lives {
        subject.check(&runtime, life, seen).await;
    }
    for life in &lives {
        runtime.delete_session(&life.id).await.unwrap();
    }
    let device = runtime.info().await.unwrap().device;
    assert_eq!(device.pages_free, device.pages_total, "every page is free again");
    runtime.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::print_stdout, reason = "a failed run tells its case")]
async fn i1_any_life_of_a_session_gives_the_tokens_and_bits_of_one_that_never_left() {
    let number =
        |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |value| value.parse().unwrap());
    let (first, cases) = (number("ORACLE_SEED", 1), number("ORACLE_CASES", CASES));
    let mut subjects = Vec::new();
    for name in ["qwen2", "gemma3", "llama"] {
        for kv_type in [KvType::F16, KvType::F32, KvType::Int8] {
            subjects.push(Subject::new(name, kv_type).await);
        }
    }
    let mut seen = Seen::default();
    let mut directory = tempfile::tempdir().unwrap();
    for number in first..first + cases {
        let round = (number - first) / CASES_A_DIRECTORY;
        if (number - first).is_multiple_of(CASES_A_DIRECTORY) {
            directory = tempfile::tempdir().unwrap();
        }
        // Told when a case fails.
        println!("case {number}");
        case(&subjects[round as usize % subjects.len()], directory.path(), number, &mut seen).await;
    }
    println!("{seen:?}");
    assert!(cases < CASES || seen.is_enough(), "{seen:?}");
}
