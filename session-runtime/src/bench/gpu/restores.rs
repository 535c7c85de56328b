//! The oracle of I1 on a GPU: sessions that leave before each turn and come back by any mix of loading and recomputing go on
//! with exactly the tokens of sessions that stayed.

use std::path::Path;

use super::checkpoint::CHECKPOINTS;
use crate::config::{Config, Device};
use crate::error::Error;
use crate::restore::plan::RestoreMode;
use crate::runtime::Runtime;
use crate::session::spec::{Sampling, SessionSpec, TurnRequest};
use crate::session::view::TurnStatus;

/// What is said first, by session.
const OPENINGS: [&str; 3] = [
    "The keeper of the harbour counted 3 lamps on day 1, 6 on day 2 and 9 on day 3, and wrote 12 letters.",
    "A reader in the library asked which of the 40 books was read at night, and by whom, and on which day.",
    "Day 7: the sea. Day 8: a lamp at night. Day 9: letters, 12.50 each, to the keeper who counted them all.",
];
/// How KV comes back before each later turn.
const MODES: [RestoreMode; 6] = [
    RestoreMode::Load,
    RestoreMode::Cut(1),
    RestoreMode::Recompute,
    RestoreMode::Planned,
    RestoreMode::Alternate,
    RestoreMode::Cut(2),
];
/// Tokens of an answer.
const ANSWER: u32 = 12;

/// Cells that were seen to come back.
#[derive(Default)]
struct Seen {
    loaded: u64,
    recomputed: u64,
}

/// Runs every checkpoint; what was seen, in words.
///
/// # Errors
/// Tokens that differ, or what the runtime fails with.
pub(super) async fn run(config: &Config, device: usize, folder: &Path) -> Result<String, Error> {
    let mut seen = Seen::default();
    for checkpoint in CHECKPOINTS {
        let config = Config {
            model: checkpoint.unpack(folder)?.to_string_lossy().into_owned(),
            data_dir: folder.join(format!("{}-data", checkpoint.name)),
            device: Device::Cuda(device),
            device_budget_bytes: 16 << 20,
            share_prefixes: false,
            guests: Vec::new(),
            components: Vec::new(),
            ..config.clone()
        };
        let runtime = Runtime::open(config).await?;
        for number in 0..OPENINGS.len() {
            session(&runtime, number, &mut seen).await?;
        }
        runtime.shutdown().await?;
    }
    if seen.loaded == 0 || seen.recomputed == 0 {
        return Err(Error::internal("restores did not both load and recompute: nothing was shown"));
    }
    Ok(format!(
        "{} sessions of two checkpoints with the tokens of those that stayed; {} cells loaded, {} recomputed",
        2 * OPENINGS.len(),
        seen.loaded,
        seen.recomputed
    ))
}

/// One session that stays, and one that leaves.
async fn session(runtime: &Runtime, number: usize, seen: &mut Seen) -> Result<(), Error> {
    let ids = [format!("stays-{number}"), format!("leaves-{number}")];
    for (id, leaves) in ids.iter().zip([false, true]) {
        let temperature = (number > 0).then_some(0.9);
        let sampling = Sampling { temperature, seed: Some(number as u64), ..Sampling::default() };
        let spec = SessionSpec { id: Some(id.clone()), sampling, ..SessionSpec::default() };
        runtime.create_session(spec).await?;
        say(runtime, id, OPENINGS[number]).await?;
        for mode in MODES {
            if leaves {
                runtime.evict(id).await?;
                let report = runtime.restore(id, mode).await?;
                seen.loaded += report.cells_loaded;
                seen.recomputed += report.cells_recomputed;
            }
            say(runtime, id, "And then?").await?;
        }
    }
    let [stays, leaves] = [runtime.tokens(&ids[0]).await?, runtime.tokens(&ids[1]).await?];
    let same = stays.iter().zip(&leaves).take_while(|(a, b)| a == b).count();
    if stays == leaves {
        return Ok(());
    }
    Err(Error::internal(format!(
        "session {number}: token {same} differs from that of the session that stayed"
    )))
}

async fn say(runtime: &Runtime, id: &str, input: &str) -> Result<(), Error> {
    let request = TurnRequest { input: input.to_owned(), max_tokens: Some(ANSWER), ..TurnRequest::default() };
    let turn = runtime.start_turn(id, request).await?;
    let turn = runtime.wait_turn(id, &turn.id).await?;
    match (turn.status, turn.error) {
        (TurnStatus::Completed, _) => Ok(()),
        (status, error) => Err(Error::internal(format!("a turn ended as {status:?}: {error:?}"))),
    }
}
