//! The last step of an open: the parts are made from what was recovered, and the threads started.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread;

use crate::checkpoint::{Checkpoint, Checkpointer, Kept};
use crate::error::OpenError;
use crate::framed::LogTail;
use crate::journal::{Committer, JOURNAL_POINTS, Journal, Metalog, Progress, Queue};
use crate::leases::LeaseStore;
use crate::lock::DirLock;
use crate::meta::watermark::{Watermark, WatermarkFile};
use crate::meta::{DurableMeta, MetaKind};
use crate::open::{Opening, Recovered};
use crate::packs::{CellError, LoadedCells, PackParts, PackStore};
use crate::poison::Poison;
use crate::segments::SegmentStore;
use crate::store::{Inner, Store};
use crate::sync::{lock, read};

/// What the open holds besides the recovered index.
pub(crate) struct Held {
    pub(crate) watermark_file: WatermarkFile,
    pub(crate) lock: Arc<DirLock>,
    /// When the open started, in monotonic milliseconds.
    pub(crate) started: u64,
}

impl Opening {
    /// Opens the parts and starts the threads.
    pub(crate) fn assemble(mut self, recovered: Recovered, held: Held) -> Result<Store, OpenError> {
        let (tail, metalog) = self.logs(&recovered)?;
        let Recovered { raw, cells, state, indexer, commit, .. } = recovered;
        let clock = Arc::clone(&self.options.clock);
        let poison = Poison::default();
        let leases = LeaseStore::new(Arc::clone(&clock));
        let cells = Arc::new(self.packs(&raw, &leases, cells)?);
        let last = read(&state).sessions.iter().map(|(name, s)| (Arc::clone(name), s.last_seq)).collect();
        let queue = Arc::new(Queue::new(poison.clone(), last));
        let progress = Arc::new(Progress::default());
        *lock(&progress.applied) = Watermark { commit, journal: tail.end(), metalog: metalog.end() };
        let journal = Arc::new(Journal {
            queue: Arc::clone(&queue),
            state,
            raw: Arc::clone(&raw),
            dir: Arc::clone(&self.journal_dir),
            clock: Arc::clone(&clock),
            indexer: Arc::clone(&indexer),
            failpoints: self.failpoints.clone(),
        });
        let meta = Arc::new(DurableMeta::new(Arc::clone(&raw), Arc::clone(&queue), Arc::clone(&held.lock)));
        let segments = SegmentStore::open(Arc::clone(&meta), Arc::clone(&clock))?;
        let watermark_file = (self.options.meta == MetaKind::Sled).then_some(held.watermark_file);
        let checkpoint = Arc::new(Checkpoint {
            raw: Arc::clone(&raw),
            journal: Arc::clone(&journal),
            cells: Arc::clone(&cells),
            metalog_dir: Arc::clone(&self.metalog_dir),
            progress: Arc::clone(&progress),
            held: Mutex::new(Kept::new(watermark_file)),
            poison: poison.clone(),
            failpoints: self.failpoints.clone(),
        });
        // What was just replayed need not be replayed again.
        let io = |action, e| OpenError::io(action, &self.dir, e);
        checkpoint.run().map_err(|reason| io("checkpoint", io::Error::other(reason)))?;
        let (checkpointer, nudge) = Checkpointer::new();
        let committer = Committer {
            queue: Arc::clone(&queue),
            journal: tail,
            journal_dir: Arc::clone(&self.journal_dir),
            metalog,
            indexer,
            raw,
            progress,
            poison: poison.clone(),
            failpoints: self.failpoints.clone(),
            commit,
            group_records: self.options.group_records,
            group_window: self.options.group_window,
            nudge: Box::new(move |bytes| nudge.written(bytes)),
        };
        checkpointer.start(Arc::clone(&checkpoint)).map_err(|e| io("start a thread for", e))?;
        let commit_thread =
            thread::Builder::new().name("store-commit".to_owned()).spawn(move || committer.run());
        let commit_thread = commit_thread.map_err(|e| {
            checkpointer.stop();
            io("start a thread for", e)
        })?;
        self.report.ms = clock.monotonic_ms().saturating_sub(held.started);
        Ok(Store::new(Inner {
            journal,
            meta,
            segments,
            cells,
            leases,
            report: self.report.clone(),
            poison,
            queue,
            checkpoint,
            checkpointer,
            commit_thread: Mutex::new(Some(commit_thread)),
            lock: held.lock,
        }))
    }

    /// The ends of the two logs, ready to be written.
    fn logs(&self, recovered: &Recovered) -> Result<(LogTail, Metalog), OpenError> {
        let tail = LogTail::open(
            Arc::clone(&self.journal_dir),
            Arc::clone(&self.options.clock),
            self.failpoints.clone(),
            JOURNAL_POINTS,
            recovered.journal_end,
            self.options.journal_file_bytes,
        )
        .map_err(|e| OpenError::io("open the log in", self.journal_dir.dir(), e))?;
        let metalog = Metalog::open(
            Arc::clone(&self.metalog_dir),
            Arc::clone(&self.options.clock),
            self.failpoints.clone(),
            recovered.metalog_end,
            self.options.metalog_bytes,
            &*recovered.raw,
        )
        .map_err(|e| OpenError::io("open the log in", self.metalog_dir.dir(), io::Error::other(e)))?;
        Ok((tail, metalog))
    }

    fn packs(
        &mut self,
        raw: &Arc<dyn crate::meta::MetaStore>,
        leases: &LeaseStore,
        loaded: LoadedCells,
    ) -> Result<PackStore, OpenError> {
        let dir = self.dir.join("packs");
        let parts = PackParts {
            disk: Arc::clone(&self.disk),
            clock: Arc::clone(&self.options.clock),
            raw: Arc::clone(raw),
            leases: leases.clone(),
            quarantine: self.quarantine.clone(),
            failpoints: self.failpoints.clone(),
            dir: dir.clone(),
            store_id: self.format.store_id,
            quota: self.options.cell_quota_bytes,
            pack_bytes: self.options.pack_bytes,
        };
        PackStore::open(parts, loaded, &mut self.report).map_err(|e| match e {
            CellError::Meta(e) => OpenError::Meta(e),
            CellError::Io { detail, .. } => OpenError::io("read", &dir, io::Error::other(detail)),
        })
    }
}
