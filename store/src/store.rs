//! The store as its users hold it: one value that gives access to every part.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::checkpoint::{Checkpoint, Checkpointer};
use crate::error::{OpenError, StoreError};
use crate::journal::{Journal, JournalError, Queue};
use crate::leases::LeaseStore;
use crate::lock::DirLock;
use crate::meta::{DurableMeta, MetaStore};
use crate::options::StoreOptions;
use crate::packs::CellStoreImpl;
use crate::poison::Poison;
use crate::recovery::RecoveryReport;
use crate::segments::SegmentStore;
use crate::sync::lock;

/// An open data directory. Cloning shares it; the last clone to go closes it.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
    /// The part of `inner` that is handed out as a trait object.
    meta: Arc<dyn MetaStore>,
}

pub(crate) struct Inner {
    pub(crate) journal: Arc<Journal>,
    pub(crate) meta: Arc<DurableMeta>,
    pub(crate) segments: SegmentStore,
    pub(crate) cells: Arc<CellStoreImpl>,
    pub(crate) leases: LeaseStore,
    pub(crate) report: RecoveryReport,
    pub(crate) poison: Poison,
    pub(crate) queue: Arc<Queue>,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) checkpointer: Checkpointer,
    pub(crate) commit_thread: Mutex<Option<JoinHandle<()>>>,
    pub(crate) lock: Arc<DirLock>,
}

impl Store {
    /// Opens the store in `dir`, making it if the directory is new or empty: takes the lock, checks the format,
    /// recovers what a crash left, and starts its threads.
    ///
    /// # Errors
    /// [`OpenError`], with what to do about it.
    pub fn open(dir: &Path, options: StoreOptions) -> Result<Store, OpenError> {
        crate::open::open(dir, options)
    }

    pub(crate) fn new(inner: Inner) -> Self {
        let meta = Arc::clone(&inner.meta) as Arc<dyn MetaStore>;
        Self { inner: Arc::new(inner), meta }
    }

    /// The journal.
    pub fn journal(&self) -> &Journal {
        &self.inner.journal
    }

    /// Small things by key, durable when a call returns.
    pub fn meta(&self) -> &Arc<dyn MetaStore> {
        &self.meta
    }

    /// The segments.
    pub fn segments(&self) -> &SegmentStore {
        &self.inner.segments
    }

    /// The saved cells.
    pub fn cells(&self) -> &CellStoreImpl {
        &self.inner.cells
    }

    /// The claims on cells.
    pub fn leases(&self) -> &LeaseStore {
        &self.inner.leases
    }

    /// What the open found and did.
    pub fn recovery(&self) -> &RecoveryReport {
        &self.inner.report
    }

    /// Why nothing more is acknowledged, if that is so. The process should say it and stop.
    pub fn poisoned(&self) -> Option<String> {
        self.inner.poison.get().map(str::to_owned)
    }

    /// Tells other processes that try to open the directory where this one answers.
    ///
    /// # Errors
    /// As the operating system says.
    pub fn set_address(&self, address: &str) -> io::Result<()> {
        self.inner.lock.note(Some(address))
    }

    /// Makes the index durable and moves the watermark, as happens by itself every 30 seconds or 16 MiB.
    ///
    /// # Errors
    /// [`StoreError::Checkpoint`]; the store is then poisoned.
    pub fn checkpoint(&self) -> Result<(), StoreError> {
        self.inner.checkpoint.run().map_err(StoreError::Checkpoint)
    }

    /// Writes what is live in one mostly dead journal file and in one mostly dead pack anew, where there are such, as
    /// happens by itself after a checkpoint. The journal file goes with the checkpoint after that, the pack at once.
    /// Returns whether there was one.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn compact(&self) -> Result<bool, JournalError> {
        self.inner.checkpoint.compact()
    }

    /// Whether anyone else holds this store, and with it the directory's lock.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }

    /// Finishes what is queued, makes a last checkpoint and stops the threads. Other clones then get `Closed` errors
    /// for changes; the directory's lock is released when the last clone goes, and the last clone of [`Store::meta`].
    ///
    /// # Errors
    /// [`StoreError`]; what was acknowledged is safe either way.
    pub fn close(self) -> Result<(), StoreError> {
        self.inner.stop()
    }
}

impl Inner {
    fn stop(&self) -> Result<(), StoreError> {
        self.checkpointer.stop();
        self.queue.close();
        // The last clone may go in a callback, on the commit thread itself.
        if let Some(thread) = lock(&self.commit_thread).take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            self.poison.set("the commit thread panicked".to_owned());
        }
        if let Some(reason) = self.poison.get() {
            return Err(StoreError::Poisoned(reason.to_owned()));
        }
        self.checkpoint.run().map_err(StoreError::Checkpoint)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // After a close there is nothing left to do here.
        if let Err(error) = self.stop() {
            tracing::error!(%error, "the store was not closed cleanly");
        }
    }
}
