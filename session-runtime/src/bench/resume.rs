//! A session that is brought back from the plain disk and reads a new message, beside a peer that loads a session it saved.
//!
//! Both have as many tokens of history (ours grows by a short message a run) and read as many new ones until the first token is
//! known. What the system keeps of the files in memory is dropped before every run, where it allows that.

use std::path::Path;
use std::time::Instant;

use super::peer::Peer;
use super::{Figure, median};
use crate::error::Error;
use crate::models::catalog;
use crate::runtime::Runtime;
use crate::session::spec::TurnRequest;

const RUNS: usize = 5;
/// Tokens of the context beside the history: the new message's.
const BESIDE: usize = 256;

/// The session that comes back.
pub(super) struct Subject<'a> {
    pub(super) runtime: &'a Runtime,
    pub(super) session: &'a str,
    /// What recomputing its KV takes.
    pub(super) recompute_ms: f64,
}

/// One run of ours.
struct Resumed {
    ms: f64,
    /// Tokens whose KV came back.
    known: usize,
    /// Tokens that were read after them.
    new: usize,
}

impl Subject<'_> {
    /// Brings the session back with a short message, up to the answer's first token.
    async fn resume(&self) -> Result<Resumed, Error> {
        self.runtime.evict(self.session).await?;
        drop_cached_files();
        let request =
            TurnRequest { input: "Go on.".to_owned(), max_tokens: Some(1), ..TurnRequest::default() };
        let begun = Instant::now();
        let turn = self.runtime.start_turn(self.session, request).await?;
        let turn = self.runtime.wait_turn(self.session, &turn.id).await?;
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let known = turn.restores.iter().map(|report| report.tokens as usize).sum();
        let new = (turn.usage.input_tokens as usize).saturating_sub(known).max(1);
        Ok(Resumed { ms, known, new })
    }
}

/// Measures both in turns.
pub(super) async fn beside(
    program: &Path,
    subject: &Subject<'_>,
    case: &str,
    tell: &mut (dyn FnMut(Figure) + Send),
) -> Result<(), Error> {
    let first = subject.resume().await?;
    let config = subject.runtime.config();
    let path = catalog::resolve(&config.model)?.path;
    let mut peer = Peer::start(program, &path, config.thread_count(), first.known + BESIDE, 1)?;
    let file = config.data_dir.join("peer.slot");
    let file = file.display();
    peer.ask(&format!("slot {} {file}", first.known))?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let resumed = subject.resume().await?;
        ours.push(resumed.ms);
        drop_cached_files();
        let seconds = peer.ask(&format!("resume {} {} {file}", first.known, resumed.new))?;
        theirs.extend(seconds.into_iter().map(|seconds| seconds * 1e3));
    }
    let (ours, theirs) = (median(ours), median(theirs));
    let figure = |metric, value, unit, against, ratio| Figure {
        bench: "restore",
        case: case.to_owned(),
        metric,
        value,
        unit,
        against: Some(against),
        ratio: Some(ratio),
        n: RUNS,
    };
    tell(figure("resume_ms", ours, "ms", "llama.cpp", ours / theirs));
    let faster = subject.recompute_ms / ours;
    tell(figure("recompute_over_resume", faster, "ratio", "recompute", faster));
    Ok(())
}

/// Asks the system to forget what it holds of files; only its administrator may.
fn drop_cached_files() {
    if let Err(error) = std::fs::write("/proc/sys/vm/drop_caches", "1") {
        tracing::info!(%error, "files stay cached");
    }
}
