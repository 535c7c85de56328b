//! The index in sled 0.34.7: one database, one tree, one writer thread, batches only.
//!
//! Owns sled's directory while it is open. sled is used inside the narrow limits in which it was measured to hold:
//! small values, no transactions, no merge operators, the background flusher on (it is the garbage collector), and
//! a real fsync of its own after every flush, which sled does not do on Linux.

use std::fs;
use std::io;
use std::ops::Bound;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{CasOutcome, MetaEntry, MetaError, MetaStore, Op, check, check_key, check_value, envelope};
use crate::disk::{Disk, RealDisk};
use crate::limits::MAX_SCAN;
use crate::open::META_DIR;
use crate::sync::lock;

/// Requests that may wait for the writer thread.
const QUEUE: usize = 256;
/// How long an open waits for sled's own lock: it is not always free at once after a close.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// How sled is opened.
#[derive(Debug, Clone, Copy)]
pub struct SledOptions {
    /// Bytes of page cache.
    pub cache_bytes: u64,
    /// Milliseconds between background flushes.
    pub flush_every_ms: u64,
}

impl Default for SledOptions {
    fn default() -> Self {
        Self { cache_bytes: 64 << 20, flush_every_ms: 500 }
    }
}

type Reply<T> = SyncSender<Result<T, MetaError>>;

enum Work {
    Batch(Vec<Op>, Reply<()>),
    Cas { key: Vec<u8>, expected: Option<Vec<u8>>, new: Option<Vec<u8>>, reply: Reply<CasOutcome> },
    Flush(Reply<()>),
}

/// sled as a [`MetaStore`].
pub struct SledMeta {
    db: Arc<Engine>,
    work: Mutex<Option<SyncSender<Work>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

struct Engine {
    db: sled::Db,
    dir: PathBuf,
    disk: Arc<dyn Disk>,
    sequence: AtomicU64,
    suspect: AtomicBool,
}

/// Takes a key, a value and the value's sequence.
type Visit<'a> = &'a mut dyn FnMut(&[u8], &[u8], u64);

/// Runs sled code; a panic inside it becomes an error.
fn guarded<T>(work: impl FnOnce() -> Result<T, sled::Error>) -> Result<T, MetaError> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(MetaError::Engine(e.to_string())),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Err(MetaError::Engine(format!("sled panicked: {text}")))
        }
    }
}

impl Engine {
    fn open(dir: &Path, disk: Arc<dyn Disk>, options: SledOptions) -> Result<Self, MetaError> {
        let config = sled::Config::new()
            .path(dir)
            .cache_capacity(options.cache_bytes)
            .flush_every_ms(Some(options.flush_every_ms));
        let give_up = Instant::now() + LOCK_WAIT;
        let db = loop {
            match guarded(|| config.open()) {
                Err(MetaError::Engine(e)) if e.contains("could not acquire lock") => {
                    if Instant::now() >= give_up {
                        return Err(MetaError::Busy);
                    }
                    thread::sleep(Duration::from_millis(20));
                }
                other => break other?,
            }
        };
        let (sequence, suspect) = (AtomicU64::new(1), AtomicBool::new(false));
        Ok(Self { db, dir: dir.to_path_buf(), disk, sequence, suspect })
    }

    /// Remembers that the index cannot be trusted, for the next open.
    fn doubt(&self, error: MetaError) -> MetaError {
        if !self.suspect.swap(true, Ordering::Relaxed) {
            tracing::error!(%error, "metadata index damaged: it is rebuilt at the next open");
            let note = self.disk.create(&self.dir.join(SUSPECT_FILE)).and_then(|file| file.sync_data());
            if let Err(e) = note {
                tracing::error!(error = %e, "could not leave a note about the damaged index");
            }
        }
        error
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, MetaError> {
        let Some(bytes) = guarded(|| self.db.get(key)).map_err(|e| self.doubt(e))? else { return Ok(None) };
        let (value, _) = envelope::open(key, &bytes).map_err(|e| self.doubt(e))?;
        Ok(Some(value.to_vec()))
    }

    fn apply(&self, ops: &[Op]) -> Result<(), MetaError> {
        let mut batch = sled::Batch::default();
        for op in ops {
            match op {
                Op::Put { key, value } => {
                    let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
                    batch.insert(key.as_slice(), envelope::seal(key, value, sequence));
                }
                Op::Delete { key } => batch.remove(key.as_slice()),
            }
        }
        guarded(|| self.db.apply_batch(batch)).map_err(|e| self.doubt(e))
    }

    fn cas(
        &self,
        key: Vec<u8>,
        expected: Option<&[u8]>,
        new: Option<Vec<u8>>,
    ) -> Result<CasOutcome, MetaError> {
        let current = self.get(&key)?;
        if current.as_deref() != expected {
            return Ok(CasOutcome::Conflict { current });
        }
        self.apply(&[match new {
            Some(value) => Op::Put { key, value },
            None => Op::Delete { key },
        }])?;
        Ok(CasOutcome::Done)
    }

    fn run(&self, work: &Receiver<Work>) {
        // A caller that stopped waiting for its reply is no failure.
        while let Ok(request) = work.recv() {
            match request {
                Work::Batch(ops, reply) => drop(reply.send(self.apply(&ops))),
                Work::Cas { key, expected, new, reply } => {
                    drop(reply.send(self.cas(key, expected.as_deref(), new)));
                }
                Work::Flush(reply) => drop(reply.send(guarded(|| self.db.flush()).map(drop))),
            }
        }
    }

    fn scan(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
        visit: Visit<'_>,
    ) -> Result<(), MetaError> {
        let start = match after {
            Some(after) if after >= prefix => Bound::Excluded(after.to_vec()),
            _ => Bound::Included(prefix.to_vec()),
        };
        let mut entries =
            guarded(|| Ok(self.db.range((start, Bound::<Vec<u8>>::Unbounded)))).map_err(|e| self.doubt(e))?;
        for _ in 0..limit {
            let next = guarded(|| entries.next().transpose()).map_err(|e| self.doubt(e))?;
            let Some((key, bytes)) = next.filter(|(key, _)| key.starts_with(prefix)) else { break };
            let (value, sequence) = envelope::open(&key, &bytes).map_err(|e| self.doubt(e))?;
            visit(&key, value, sequence);
        }
        Ok(())
    }
}

/// Left in sled's directory when a read found damage.
pub(crate) const SUSPECT_FILE: &str = "suspect";

impl SledMeta {
    /// Opens or makes the database in `dir`, verifies every entry, and starts the writer thread.
    ///
    /// sled reads and writes `dir` itself; `disk` must be the file system that holds it (it is used to fsync sled's
    /// file).
    ///
    /// # Errors
    /// [`MetaError`]: sled refused or panicked, or an entry is damaged.
    pub fn open(dir: &Path, disk: Arc<dyn Disk>, options: SledOptions) -> Result<Self, MetaError> {
        let engine = Engine::open(dir, disk, options)?;
        engine.verify()?;
        restrict(dir).map_err(|e| MetaError::Engine(format!("cannot restrict {}: {e}", dir.display())))?;
        let engine = Arc::new(engine);
        let (work, inbox) = mpsc::sync_channel(QUEUE);
        let for_thread = Arc::clone(&engine);
        let writer = thread::Builder::new()
            .name("store-meta".to_owned())
            .spawn(move || for_thread.run(&inbox))
            .map_err(|e| MetaError::Engine(format!("cannot start the writer thread: {e}")))?;
        Ok(Self { db: engine, work: Mutex::new(Some(work)), writer: Mutex::new(Some(writer)) })
    }

    fn ask<T>(&self, request: impl FnOnce(Reply<T>) -> Work) -> Result<T, MetaError> {
        let (reply, answer) = mpsc::sync_channel(1);
        let work = lock(&self.work).clone().ok_or(MetaError::Closed)?;
        work.send(request(reply)).map_err(|_| MetaError::Closed)?;
        answer.recv().unwrap_or(Err(MetaError::Closed))
    }
}

impl Engine {
    /// Reads every entry, checks its envelope, and takes up the sequence where it stopped.
    fn verify(&self) -> Result<(), MetaError> {
        let mut highest = 0;
        self.scan(&[], None, usize::MAX, &mut |_, _, sequence| highest = highest.max(sequence))?;
        self.sequence.store(highest + 1, Ordering::Relaxed);
        Ok(())
    }
}

/// sled makes its files with the process's default mode; ours are private.
fn restrict(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        match entry.metadata() {
            Ok(meta) => {
                let mode = if meta.is_dir() { 0o700 } else { 0o600 };
                fs::set_permissions(entry.path(), fs::Permissions::from_mode(mode))?;
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Opens the metadata of the data directory `dir` the way a store would, reads all of it and closes it again.
///
/// Meant for a child process (see `StoreOptions::probe`): a panic, hang or abort inside sled then ends the child
/// and not the server.
///
/// # Errors
/// [`MetaError`] if the metadata cannot be trusted.
pub fn probe_metadata(dir: &Path) -> Result<(), MetaError> {
    Engine::open(&dir.join(META_DIR), Arc::new(RealDisk), SledOptions::default())?.verify()
}

impl MetaStore for SledMeta {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, MetaError> {
        check_key(key)?;
        self.db.get(key)
    }

    fn compare_and_set(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<CasOutcome, MetaError> {
        check_key(key)?;
        check_value(new.unwrap_or_default())?;
        let (key, expected, new) = (key.to_vec(), expected.map(<[u8]>::to_vec), new.map(<[u8]>::to_vec));
        self.ask(|reply| Work::Cas { key, expected, new, reply })
    }

    fn batch(&self, ops: Vec<Op>) -> Result<(), MetaError> {
        check(&ops)?;
        self.ask(|reply| Work::Batch(ops, reply))
    }

    fn scan_prefix(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<MetaEntry>, MetaError> {
        let mut found = Vec::new();
        self.db.scan(prefix, after, limit.min(MAX_SCAN), &mut |key, value, _| {
            found.push((key.to_vec(), value.to_vec()));
        })?;
        Ok(found)
    }

    fn flush(&self) -> Result<(), MetaError> {
        self.ask(Work::Flush)?;
        let dir = &self.db.dir;
        // sled's flush ends in sync_file_range; this is the fsync it leaves out.
        let fsync = || {
            self.db.disk.open(&dir.join("db"))?.sync_data()?;
            self.db.disk.sync_dir(dir)
        };
        fsync().map_err(|e| MetaError::Engine(format!("fsync of {}: {e}", dir.display())))?;
        if self.db.disk.list(&dir.join("blobs")).is_ok_and(|blobs| !blobs.is_empty()) {
            tracing::warn!(dir = %dir.display(), "sled wrote blobs, which it never removes");
        }
        Ok(())
    }
}

impl Drop for SledMeta {
    fn drop(&mut self) {
        lock(&self.work).take();
        if let Some(writer) = lock(&self.writer).take()
            && writer.join().is_err()
        {
            tracing::error!("the metadata writer thread panicked");
        }
    }
}
