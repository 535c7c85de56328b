//! The open protocol: lock, format, metadata (doubted, tried, verified), logs, packs, threads.
//!
//! The metadata index is only ever trusted as far as the watermark and its own checks go. On any doubt its directory
//! is renamed and the index rebuilt from the metadata log, the journal and the headers of packs.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};
use std::thread;

use crate::checkpoint::{Checkpoint, Checkpointer};
use crate::disk::Disk;
use crate::error::OpenError;
use crate::failpoint::{Failpoints, point};
use crate::format::Format;
use crate::framed::{LogDir, LogPos, LogTail};
use crate::journal::{
    Committer, Indexer, JOURNAL_KIND, JOURNAL_POINTS, Journal, Loaded, METALOG_KIND, Metalog, Progress,
    Queue, Replay, ReplayError,
};
use crate::leases::LeaseStore;
use crate::lock::DirLock;
use crate::meta::watermark::{Watermark, WatermarkFile};
use crate::meta::{DurableMeta, MemoryMeta, MetaError, MetaKind, MetaStore, SledMeta, for_each};
use crate::options::StoreOptions;
use crate::packs::{CellError, LoadedCells, PackParts, PackStore};
use crate::poison::Poison;
use crate::probe;
use crate::quarantine::Quarantine;
use crate::recovery::RecoveryReport;
use crate::segments::SegmentStore;
use crate::store::{Inner, Store};
use crate::sync::read;

/// sled's directory inside the data directory.
pub(crate) const META_DIR: &str = "meta";

/// What the open works with, step by step.
struct Opening {
    dir: PathBuf,
    options: StoreOptions,
    disk: Arc<dyn Disk>,
    failpoints: Failpoints,
    quarantine: Quarantine,
    format: Format,
    journal_dir: Arc<LogDir>,
    metalog_dir: Arc<LogDir>,
    report: RecoveryReport,
}

/// An index and what was read from it.
struct Index {
    raw: Arc<dyn MetaStore>,
    journal: Loaded,
    cells: LoadedCells,
    covered: Watermark,
}

/// Why an index that is there was not opened.
enum Doubt {
    /// It cannot be trusted: it is rebuilt.
    Distrust(String),
    /// It is not this open's to judge.
    Refuse(OpenError),
}

impl From<String> for Doubt {
    fn from(reason: String) -> Self {
        Self::Distrust(reason)
    }
}

/// A recovered index and the ends of the logs.
struct Recovered {
    raw: Arc<dyn MetaStore>,
    cells: LoadedCells,
    state: Arc<RwLock<crate::journal::State>>,
    indexer: Arc<Indexer>,
    journal_end: LogPos,
    metalog_end: LogPos,
    commit: u64,
}

pub(crate) fn open(dir: &Path, options: StoreOptions) -> Result<Store, OpenError> {
    let started = options.clock.monotonic_ms();
    options.check()?;
    let disk = Arc::clone(&options.disk);
    let failpoints = match &options.failpoints {
        Some(points) => points.clone(),
        None => Failpoints::from_env()?,
    };
    disk.create_dir(dir).map_err(|e| OpenError::io("make the data directory", dir, e))?;
    let lock = Arc::new(DirLock::take(&*disk, dir)?);
    let created = !disk.exists(&dir.join(crate::format::FORMAT_FILE));
    let format = Format::open(&*disk, dir)?;
    let in_dir = |name: &str| dir.join(name);
    let io = |action, path: &Path| {
        let path = path.to_path_buf();
        move |e| OpenError::io(action, &path, e)
    };
    let log = |name: &str, kind| {
        LogDir::new(Arc::clone(&disk), in_dir(name), kind, format.store_id)
            .map(Arc::new)
            .map_err(io("make", &in_dir(name)))
    };
    let mut opening = Opening {
        journal_dir: log("journal", JOURNAL_KIND)?,
        metalog_dir: log("metalog", METALOG_KIND)?,
        quarantine: Quarantine::new(Arc::clone(&disk), Arc::clone(&options.clock), in_dir("quarantine"))
            .map_err(io("make", &in_dir("quarantine")))?,
        report: RecoveryReport { created, ..RecoveryReport::default() },
        dir: dir.to_path_buf(),
        disk,
        failpoints,
        format,
        options,
    };
    let packs = in_dir("packs");
    opening.disk.create_dir(&packs).map_err(io("make", &packs))?;
    opening.disk.sync_dir(dir).map_err(io("sync", dir))?;
    let (watermark_file, watermark) =
        WatermarkFile::open(&*opening.disk, dir).map_err(io("open the watermark in", dir))?;
    let index = opening.index(watermark)?;
    let recovered = opening.recover(index)?;
    opening.assemble(recovered, watermark_file, lock, started)
}

impl Opening {
    /// Opens the index, or starts an empty one after moving a doubtful one away.
    fn index(&mut self, watermark: Option<Watermark>) -> Result<Index, OpenError> {
        self.failpoints.hit(point::OPEN_BEFORE_META).map_err(|e| OpenError::io("open", &self.dir, e))?;
        if self.options.meta == MetaKind::Memory {
            return Ok(empty(Arc::new(MemoryMeta::new())));
        }
        let has_meta = self.disk.exists(&self.dir.join(META_DIR).join("db"));
        if !has_meta && watermark.is_none_or(|mark| mark == Watermark::default()) {
            return self.fresh();
        }
        match self.try_index(watermark.unwrap_or_default(), has_meta) {
            Ok(index) => Ok(index),
            Err(Doubt::Distrust(reason)) => {
                self.distrust(reason)?;
                self.fresh()
            }
            Err(Doubt::Refuse(error)) => Err(error),
        }
    }

    /// Opens the index that is there; the error is the reason not to trust it.
    fn try_index(&mut self, mark: Watermark, has_meta: bool) -> Result<Index, Doubt> {
        let dir = self.dir.join(META_DIR);
        if !has_meta {
            return Err("the metadata directory is gone or empty".to_owned().into());
        }
        if self.disk.exists(&dir.join(crate::meta::SUSPECT_FILE)) {
            return Err("damage was found while it was in use".to_owned().into());
        }
        self.remove_half_snapshots(&dir).map_err(|e| format!("its snapshots could not be cleaned: {e}"))?;
        if let Some(command) = &self.options.probe {
            probe::run(command, self.options.probe_timeout)?;
        }
        let raw = SledMeta::open(&dir, Arc::clone(&self.disk), self.options.sled).map_err(|e| match e {
            MetaError::Busy => Doubt::Refuse(OpenError::Meta(e)),
            e => Doubt::Distrust(e.to_string()),
        })?;
        let (mut journal, mut cells) = (Loaded::default(), LoadedCells::default());
        for_each::<MetaError>(&raw, &[], &mut |key, value| {
            if journal.take(key, value).is_none() || cells.take(key, value).is_none() {
                let detail = "its fields cannot be read".to_owned();
                return Err(MetaError::Corrupt { key: key.escape_ascii().to_string(), detail });
            }
            Ok(())
        })
        .map_err(|e| e.to_string())?;
        let held = journal.commit.map_or(0, |c| c.commit);
        if held < mark.commit {
            return Err(
                format!("it went back to group {held}, group {} was checkpointed", mark.commit).into()
            );
        }
        journal.check()?;
        let has = |dir: &LogDir, number: u64| -> Result<bool, String> {
            let files = dir.list().map_err(|e| e.to_string())?;
            Ok(number == 0 || files.iter().any(|(n, _)| *n == number))
        };
        if !has(&self.journal_dir, mark.journal.file)? || !has(&self.metalog_dir, mark.metalog.file)? {
            return Err("log files that it builds on are gone".to_owned().into());
        }
        for (number, file) in &journal.state.files {
            if !file.live.is_empty() && !has(&self.journal_dir, *number)? {
                return Err(format!("journal file {number}, which it points to, is gone").into());
            }
        }
        Ok(Index { raw: Arc::new(raw), journal, cells, covered: mark })
    }

    /// A crash while sled opens leaves a half snapshot that it would take for its newest.
    fn remove_half_snapshots(&self, dir: &Path) -> io::Result<()> {
        for entry in self.disk.list(dir)? {
            if entry.name.starts_with("snap.") && entry.name.ends_with(".generating") {
                self.disk.remove(&dir.join(&entry.name))?;
            }
        }
        Ok(())
    }

    /// Moves the metadata directory away.
    fn distrust(&mut self, reason: String) -> Result<(), OpenError> {
        let dir = self.dir.join(META_DIR);
        let io = |e| OpenError::io("move away", &dir, e);
        tracing::warn!(%reason, "the metadata index is rebuilt");
        self.failpoints.hit(point::OPEN_BEFORE_QUARANTINE).map_err(io)?;
        if self.disk.exists(&dir) {
            let kept = self.quarantine.take(&dir).map_err(io)?;
            self.report.quarantined.push(kept.display().to_string());
        }
        self.report.rebuilt = Some(reason);
        self.failpoints.hit(point::OPEN_AFTER_QUARANTINE).map_err(io)
    }

    fn fresh(&self) -> Result<Index, OpenError> {
        let dir = self.dir.join(META_DIR);
        self.disk.create_dir(&dir).map_err(|e| OpenError::io("make", &dir, e))?;
        Ok(empty(Arc::new(SledMeta::open(&dir, Arc::clone(&self.disk), self.options.sled)?)))
    }

    /// Brings the index up to date; once more from scratch if it refuses.
    fn recover(&mut self, index: Index) -> Result<Recovered, OpenError> {
        self.failpoints.hit(point::OPEN_BEFORE_REPLAY).map_err(|e| OpenError::io("replay", &self.dir, e))?;
        let scratch = index.covered == Watermark::default();
        match self.replay(index) {
            Ok(recovered) => Ok(recovered),
            Err(ReplayError::Index(error)) if !scratch => {
                self.distrust(format!("it failed during recovery: {error}"))?;
                let index = self.fresh()?;
                self.replay(index).map_err(|e| OpenError::Journal(e.into()))
            }
            Err(error) => Err(OpenError::Journal(error.into())),
        }
    }

    fn replay(&mut self, index: Index) -> Result<Recovered, ReplayError> {
        let Index { raw, journal, cells, covered } = index;
        let known = journal.commit.unwrap_or_default();
        let covered = Watermark { commit: known.commit.max(covered.commit), ..covered };
        let state = Arc::new(RwLock::new(journal.state));
        let indexer = Arc::new(Indexer::new(Arc::clone(&raw), Arc::clone(&state)));
        let mut replay = Replay {
            disk: &*self.disk,
            quarantine: &self.quarantine,
            report: &mut self.report,
            now_ms: self.options.clock.now_ms(),
        };
        let metalog_known = known.metalog.max(covered.metalog);
        let metalog_end = replay.metalog(&self.metalog_dir, covered, metalog_known, &raw)?;
        let journal_known = known.journal.max(covered.journal);
        let journal_end = replay.journal(&self.journal_dir, covered, journal_known, &indexer)?;
        if journal_known > journal_end {
            indexer.forget_behind(journal_end)?;
        }
        self.report.missing_records =
            read(&state).sessions.values().map(|s| s.last_seq.saturating_sub(s.count)).sum();
        self.failpoints.hit(point::OPEN_AFTER_REPLAY)?;
        Ok(Recovered { raw, cells, state, indexer, journal_end, metalog_end, commit: covered.commit })
    }

    /// Opens the parts and starts the threads.
    fn assemble(
        mut self,
        recovered: Recovered,
        watermark_file: WatermarkFile,
        lock: Arc<DirLock>,
        started: u64,
    ) -> Result<Store, OpenError> {
        let Recovered { raw, cells, state, indexer, journal_end, metalog_end, commit } = recovered;
        let poison = Poison::default();
        let clock = Arc::clone(&self.options.clock);
        let log_error = |dir: &LogDir| {
            let path = dir.dir().to_path_buf();
            move |e: io::Error| OpenError::io("open the log in", &path, e)
        };
        let tail = LogTail::open(
            Arc::clone(&self.journal_dir),
            Arc::clone(&clock),
            self.failpoints.clone(),
            JOURNAL_POINTS,
            journal_end,
            self.options.journal_file_bytes,
        )
        .map_err(log_error(&self.journal_dir))?;
        let metalog = Metalog::open(
            Arc::clone(&self.metalog_dir),
            Arc::clone(&clock),
            self.failpoints.clone(),
            metalog_end,
            self.options.metalog_bytes,
            &*raw,
        )
        .map_err(|e| log_error(&self.metalog_dir)(io::Error::other(e)))?;
        let leases = LeaseStore::new(Arc::clone(&clock));
        let parts = PackParts {
            disk: Arc::clone(&self.disk),
            clock: Arc::clone(&clock),
            raw: Arc::clone(&raw),
            leases: leases.clone(),
            quarantine: self.quarantine.clone(),
            failpoints: self.failpoints.clone(),
            dir: self.dir.join("packs"),
            store_id: self.format.store_id,
            quota: self.options.cell_quota_bytes,
            pack_bytes: self.options.pack_bytes,
        };
        let packs = PackStore::open(parts, cells, &mut self.report).map_err(|e| match e {
            CellError::Meta(e) => OpenError::Meta(e),
            CellError::Io { detail, .. } => {
                OpenError::io("read", &self.dir.join("packs"), io::Error::other(detail))
            }
        })?;
        let last = read(&state).sessions.iter().map(|(name, s)| (Arc::clone(name), s.last_seq)).collect();
        let queue = Arc::new(Queue::new(poison.clone(), last));
        let progress = Arc::new(Progress::default());
        let covered = Watermark { commit, journal: tail.end(), metalog: metalog.end() };
        *crate::sync::lock(&progress.applied) = covered;
        let journal = Arc::new(Journal {
            queue: Arc::clone(&queue),
            state,
            raw: Arc::clone(&raw),
            dir: Arc::clone(&self.journal_dir),
            clock: Arc::clone(&clock),
            indexer: Arc::clone(&indexer),
            failpoints: self.failpoints.clone(),
        });
        let durable = Arc::new(DurableMeta::new(Arc::clone(&raw), Arc::clone(&queue), Arc::clone(&lock)));
        let segments = SegmentStore::open(Arc::clone(&durable), Arc::clone(&clock))?;
        let watermark_file = (self.options.meta == MetaKind::Sled).then_some(watermark_file);
        let checkpoint = Arc::new(Checkpoint {
            raw: Arc::clone(&raw),
            journal: Arc::clone(&journal),
            metalog_dir: Arc::clone(&self.metalog_dir),
            progress: Arc::clone(&progress),
            watermark: Mutex::new((watermark_file, Watermark::default())),
            poison: poison.clone(),
            failpoints: self.failpoints.clone(),
        });
        // What was just replayed need not be replayed again.
        checkpoint
            .run()
            .map_err(|reason| OpenError::io("checkpoint", &self.dir, io::Error::other(reason)))?;
        let (checkpointer, nudge) = Checkpointer::new();
        let committer = Committer {
            queue: Arc::clone(&queue),
            journal: tail,
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
        let thread_error = |e| OpenError::io("start a thread for", &self.dir, e);
        let commit_thread = thread::Builder::new()
            .name("store-commit".to_owned())
            .spawn(move || committer.run())
            .map_err(thread_error)?;
        self.report.ms = clock.monotonic_ms().saturating_sub(started);
        let inner = Inner {
            journal,
            meta: durable,
            segments,
            cells: packs,
            leases,
            report: self.report.clone(),
            poison,
            queue,
            checkpoint: Arc::clone(&checkpoint),
            checkpointer,
            commit_thread: Mutex::new(Some(commit_thread)),
            lock,
        };
        inner
            .checkpointer
            .start(checkpoint)
            .map_err(|e| OpenError::io("start a thread for", &self.dir, e))?;
        Ok(Store::new(inner))
    }
}

fn empty(raw: Arc<dyn MetaStore>) -> Index {
    Index { raw, journal: Loaded::default(), cells: LoadedCells::default(), covered: Watermark::default() }
}
