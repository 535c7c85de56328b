//! Checkpoints: the index is made durable and the watermark moved, which bounds what the next open has to read.
//!
//! Owns the checkpoint thread and the watermark file. Also removes what a checkpoint makes superfluous: dead journal
//! files and older metadata log files. Between checkpoints it compacts journal files and packs.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::failpoint::{Failpoints, point};
use crate::framed::LogDir;
use crate::journal::{Journal, JournalError, Progress, ReclaimError, Stuck};
use crate::meta::MetaStore;
use crate::meta::watermark::{Watermark, WatermarkFile};
use crate::packs::CellStoreImpl;
use crate::poison::Poison;
use crate::sync::{lock, wait_for};

/// Time between checkpoints.
const EVERY: Duration = Duration::from_secs(30);
/// Bytes of journal between checkpoints.
const EVERY_BYTES: u64 = 16 << 20;

/// What a checkpoint works with.
pub(crate) struct Checkpoint {
    pub(crate) raw: Arc<dyn MetaStore>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) cells: Arc<CellStoreImpl>,
    pub(crate) metalog_dir: Arc<LogDir>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) held: Mutex<Kept>,
    pub(crate) poison: Poison,
    pub(crate) failpoints: Failpoints,
}

/// What is kept from one checkpoint to the next.
pub(crate) struct Kept {
    /// The watermark file; none if the index is in memory.
    file: Option<WatermarkFile>,
    /// The mark it holds.
    mark: Watermark,
    stuck: Stuck,
}

impl Kept {
    pub(crate) fn new(file: Option<WatermarkFile>) -> Self {
        Self { file, mark: Watermark::default(), stuck: Stuck::default() }
    }
}

impl Checkpoint {
    /// Makes everything applied so far durable in the index and moves the watermark. A failure poisons the store.
    pub(crate) fn run(&self) -> Result<(), String> {
        let mut held = lock(&self.held);
        if let Some(reason) = self.poison.get() {
            return Err(reason.to_owned());
        }
        let mark = *lock(&self.progress.applied);
        self.make_durable(&mut held, &mark).map_err(|reason| self.poison.set(reason))?;
        self.clean(&mark);
        Ok(())
    }

    /// Writes one mostly dead journal file and one mostly dead pack anew, if there are such; the next checkpoint deletes
    /// the journal file. Returns whether there was one.
    pub(crate) fn compact(&self) -> Result<bool, JournalError> {
        let pack = self.cells.compact().unwrap_or_else(|error| {
            tracing::warn!(%error, "a mostly dead pack stays");
            false
        });
        Ok(self.compact_journal()? || pack)
    }

    fn compact_journal(&self) -> Result<bool, JournalError> {
        let mut held = lock(&self.held);
        let before = held.mark.journal.file;
        match self.journal.compact_one(before, &mut held.stuck) {
            Ok(None) => Ok(false),
            Ok(Some(file)) => {
                tracing::info!(file, "journal file compacted");
                Ok(true)
            }
            Err(ReclaimError::Journal(error)) => Err(error),
            Err(error) => {
                tracing::warn!(%error, "a mostly dead journal file stays");
                Ok(false)
            }
        }
    }

    fn make_durable(&self, held: &mut Kept, mark: &Watermark) -> Result<(), String> {
        if let Some(file) = &mut held.file
            && held.mark != *mark
        {
            let point = |name| self.failpoints.hit(name).map_err(|e| e.to_string());
            point(point::CHECKPOINT_BEFORE_FLUSH)?;
            self.raw.flush().map_err(|e| format!("flushing the metadata index failed: {e}"))?;
            point(point::CHECKPOINT_BEFORE_WATERMARK)?;
            file.write(mark).map_err(|e| format!("writing {} failed: {e}", file.path().display()))?;
            point(point::CHECKPOINT_AFTER_WATERMARK)?;
        }
        held.mark = *mark;
        Ok(())
    }

    /// Removes files that the next open will not read. A failure leaves them for the next time.
    fn clean(&self, mark: &Watermark) {
        match self.metalog_dir.list() {
            Ok(files) => {
                for (number, _) in files.into_iter().filter(|(n, _)| *n < mark.metalog.file) {
                    if let Err(error) = self.metalog_dir.remove(number) {
                        tracing::warn!(%error, number, "an old metadata log file stays");
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "old metadata log files stay"),
        }
        match self.journal.delete_dead_files(mark.journal.file) {
            Ok(0) => {}
            Ok(deleted) => tracing::info!(deleted, "dead journal files deleted"),
            Err(error) => tracing::warn!(%error, "dead journal files stay"),
        }
    }
}

#[derive(Default)]
struct Signal {
    stop: bool,
    due: bool,
}

/// The thread that runs checkpoints.
pub(crate) struct Checkpointer {
    signal: Arc<(Mutex<Signal>, Condvar)>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Wakes the checkpointer when enough has been written.
pub(crate) struct Nudge(Arc<(Mutex<Signal>, Condvar)>, Mutex<u64>);

impl Nudge {
    /// Told after each group how many bytes were written since the open.
    pub(crate) fn written(&self, bytes: u64) {
        let mut last = lock(&self.1);
        if bytes.saturating_sub(*last) >= EVERY_BYTES {
            *last = bytes;
            lock(&self.0.0).due = true;
            self.0.1.notify_all();
        }
    }
}

impl Checkpointer {
    /// A checkpointer without a thread, and what wakes it.
    pub(crate) fn new() -> (Self, Nudge) {
        let signal: Arc<(Mutex<Signal>, Condvar)> = Arc::default();
        let nudge = Nudge(Arc::clone(&signal), Mutex::new(0));
        (Self { signal, thread: Mutex::new(None) }, nudge)
    }

    /// Starts the thread.
    pub(crate) fn start(&self, checkpoint: Arc<Checkpoint>) -> std::io::Result<()> {
        let signal = Arc::clone(&self.signal);
        let thread = thread::Builder::new().name("store-checkpoint".to_owned()).spawn(move || {
            loop {
                let end = Instant::now() + EVERY;
                let mut state = lock(&signal.0);
                while !state.stop && !state.due {
                    let left = end.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    state = wait_for(&signal.1, state, left);
                }
                if state.stop {
                    return;
                }
                state.due = false;
                drop(state);
                tracing::trace!(bytes = checkpoint.progress.bytes.load(Ordering::Relaxed), "checkpoint");
                // A failure has poisoned the store, which says why to everyone who asks.
                if checkpoint.run().is_err() {
                    return;
                }
                if let Err(error) = checkpoint.compact() {
                    tracing::warn!(%error, "nothing compacted");
                }
            }
        })?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&self) {
        lock(&self.signal.0).stop = true;
        self.signal.1.notify_all();
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("the checkpoint thread panicked");
        }
    }
}
