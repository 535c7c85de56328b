//! The open protocol: lock, format, metadata (doubted, tried, verified), logs, packs, threads.
//!
//! The metadata index is only ever trusted as far as the watermark and its own checks go. On any doubt its directory
//! is renamed and the index rebuilt from the metadata log, the journal and the headers of packs.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use crate::assemble::Held;
use crate::disk::Disk;
use crate::error::OpenError;
use crate::failpoint::{Failpoints, point};
use crate::format::Format;
use crate::framed::{LogDir, LogPos};
use crate::journal::{Indexer, JOURNAL_KIND, Loaded, METALOG_KIND, Replay, ReplayError, State};
use crate::lock::DirLock;
use crate::meta::watermark::{Watermark, WatermarkFile};
use crate::meta::{MemoryMeta, MetaError, MetaKind, MetaStore, SledMeta, for_each};
use crate::options::StoreOptions;
use crate::packs::LoadedCells;
use crate::probe;
use crate::quarantine::Quarantine;
use crate::recovery::RecoveryReport;
use crate::store::Store;
use crate::sync::read;

/// sled's directory inside the data directory.
pub(crate) const META_DIR: &str = "meta";

/// What the open works with, step by step.
pub(crate) struct Opening {
    pub(crate) dir: PathBuf,
    pub(crate) options: StoreOptions,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) failpoints: Failpoints,
    pub(crate) quarantine: Quarantine,
    pub(crate) format: Format,
    pub(crate) journal_dir: Arc<LogDir>,
    pub(crate) metalog_dir: Arc<LogDir>,
    pub(crate) report: RecoveryReport,
}

/// An index and what was read from it.
struct Index {
    raw: Arc<dyn MetaStore>,
    journal: Loaded,
    cells: LoadedCells,
    /// What the index holds for certain.
    covered: Watermark,
    /// What was durable in the logs for certain.
    known: Watermark,
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
pub(crate) struct Recovered {
    pub(crate) raw: Arc<dyn MetaStore>,
    pub(crate) cells: LoadedCells,
    pub(crate) state: Arc<RwLock<State>>,
    pub(crate) indexer: Arc<Indexer>,
    pub(crate) journal_end: LogPos,
    pub(crate) metalog_end: LogPos,
    pub(crate) commit: u64,
}

pub(crate) fn open(dir: &Path, options: StoreOptions) -> Result<Store, OpenError> {
    let started = options.clock.monotonic_ms();
    options.check()?;
    let disk = Arc::clone(&options.disk);
    let failpoints = match &options.failpoints {
        Some(points) => points.clone(),
        None => Failpoints::from_env()?,
    };
    Format::refuse_foreign(&*disk, dir)?;
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
    opening.assemble(recovered, Held { watermark_file, lock, started })
}

impl Opening {
    /// Opens the index, or starts an empty one after moving a doubtful one away.
    fn index(&mut self, watermark: Option<Watermark>) -> Result<Index, OpenError> {
        self.failpoints.hit(point::OPEN_BEFORE_META).map_err(|e| OpenError::io("open", &self.dir, e))?;
        let known = watermark.unwrap_or_default();
        if self.options.meta == MetaKind::Memory {
            return Ok(empty(Arc::new(MemoryMeta::new()), known));
        }
        let dir = self.dir.join(META_DIR);
        let is_new = known == Watermark::default()
            && (!self.disk.exists(&dir) || self.disk.list(&dir).is_ok_and(|entries| entries.is_empty()));
        if is_new {
            return self.fresh(known);
        }
        match self.try_index(known) {
            Ok(index) => Ok(index),
            Err(Doubt::Distrust(reason)) => {
                self.distrust(reason)?;
                self.fresh(known)
            }
            Err(Doubt::Refuse(error)) => Err(error),
        }
    }

    /// Opens the index that is there; the error is the reason not to trust it.
    fn try_index(&mut self, mark: Watermark) -> Result<Index, Doubt> {
        let dir = self.dir.join(META_DIR);
        if !self.disk.exists(&dir.join("db")) {
            return Err("its database file is gone".to_owned().into());
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
        let held = journal.commit.unwrap_or_default();
        let known = Watermark {
            commit: held.commit.max(mark.commit),
            journal: held.journal.max(mark.journal),
            metalog: held.metalog.max(mark.metalog),
        };
        Ok(Index { raw: Arc::new(raw), journal, cells, covered: mark, known })
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

    /// An empty index.
    fn fresh(&self, known: Watermark) -> Result<Index, OpenError> {
        let dir = self.dir.join(META_DIR);
        self.disk.create_dir(&dir).map_err(|e| OpenError::io("make", &dir, e))?;
        let raw = SledMeta::open(&dir, Arc::clone(&self.disk), self.options.sled)?;
        Ok(empty(Arc::new(raw), known))
    }

    /// Brings the index up to date; once more from scratch if it refuses.
    fn recover(&mut self, index: Index) -> Result<Recovered, OpenError> {
        self.failpoints.hit(point::OPEN_BEFORE_REPLAY).map_err(|e| OpenError::io("replay", &self.dir, e))?;
        let (scratch, known) = (index.covered == Watermark::default(), index.known);
        match self.replay(index) {
            Ok(recovered) => Ok(recovered),
            Err(ReplayError::Index(error)) if !scratch => {
                self.distrust(format!("it failed during recovery: {error}"))?;
                let index = self.fresh(known)?;
                self.replay(index).map_err(|e| OpenError::Journal(e.into()))
            }
            Err(error) => Err(OpenError::Journal(error.into())),
        }
    }

    fn replay(&mut self, index: Index) -> Result<Recovered, ReplayError> {
        let Index { raw, journal, cells, covered, known } = index;
        // Groups are numbered on from what the index holds.
        let commit = journal.commit.map_or(0, |c| c.commit).max(covered.commit);
        let covered = Watermark { commit, ..covered };
        let state = Arc::new(RwLock::new(journal.state));
        let indexer = Arc::new(Indexer::new(Arc::clone(&raw), Arc::clone(&state)));
        let mut replay = Replay {
            disk: &*self.disk,
            quarantine: &self.quarantine,
            report: &mut self.report,
            now_ms: self.options.clock.now_ms(),
        };
        let metalog_end = replay.metalog(&self.metalog_dir, covered, known.metalog, &raw)?;
        let journal_end = replay.journal(&self.journal_dir, covered, known.journal, &indexer)?;
        if known.journal > journal_end {
            indexer.forget_behind(journal_end)?;
        }
        self.report.missing_records =
            read(&state).sessions.values().map(|s| s.last_seq.saturating_sub(s.count)).sum();
        self.failpoints.hit(point::OPEN_AFTER_REPLAY)?;
        Ok(Recovered { raw, cells, state, indexer, journal_end, metalog_end, commit })
    }
}

fn empty(raw: Arc<dyn MetaStore>, known: Watermark) -> Index {
    let covered = Watermark::default();
    Index { raw, journal: Loaded::default(), cells: LoadedCells::default(), covered, known }
}
