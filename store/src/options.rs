//! How a store is opened.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Clock, SystemClock};
use crate::disk::{Disk, RealDisk};
use crate::error::OpenError;
use crate::failpoint::Failpoints;
use crate::meta::{MetaKind, SledOptions};

/// How a store is opened. `..Default::default()` gives the rest.
#[derive(Clone)]
pub struct StoreOptions {
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
    /// Where files are. sled itself always uses the machine's file system, so [`MetaKind::Sled`] needs a disk that
    /// is [`RealDisk`] or wraps it.
    pub disk: Arc<dyn Disk>,
    /// Bytes after which a new journal file is started (64 MiB).
    pub journal_file_bytes: u64,
    /// Records made durable together at most (64).
    pub group_records: usize,
    /// How long a group waits at most for others to join, while several come at a time (5 ms).
    pub group_window: Duration,
    /// Bytes that packs may take on disk (16 GiB).
    pub cell_quota_bytes: u64,
    /// Bytes after which a new pack is started (256 MiB).
    pub pack_bytes: u64,
    /// What holds the metadata index.
    pub meta: MetaKind,
    /// How sled is opened.
    pub sled: SledOptions,
    /// Bytes of metadata changes after which a new export is written (16 MiB).
    pub metalog_bytes: u64,
    /// The command that opens the metadata in a child process before this one does: a program that calls
    /// [`crate::probe_metadata`] and exits with success if that did. `None` skips the probe.
    pub probe: Option<Vec<OsString>>,
    /// How long the probe may take (60 s).
    pub probe_timeout: Duration,
    /// Armed fail points. `None` reads the environment.
    pub failpoints: Option<Failpoints>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock::new()),
            disk: Arc::new(RealDisk),
            journal_file_bytes: 64 << 20,
            group_records: 64,
            group_window: Duration::from_millis(5),
            cell_quota_bytes: 16 << 30,
            pack_bytes: 256 << 20,
            meta: MetaKind::Sled,
            sled: SledOptions::default(),
            metalog_bytes: 16 << 20,
            probe: None,
            probe_timeout: Duration::from_secs(60),
            failpoints: None,
        }
    }
}

impl StoreOptions {
    pub(crate) fn check(&self) -> Result<(), OpenError> {
        let bad = |name, detail: &str| Err(OpenError::Option { name, detail: detail.to_owned() });
        if self.group_records == 0 {
            return bad("group_records", "it must be at least 1");
        }
        if self.group_window > Duration::from_secs(1) {
            return bad("group_window", "it must be at most one second");
        }
        if self.journal_file_bytes < 4096 {
            return bad("journal_file_bytes", "it must be at least 4096");
        }
        if self.pack_bytes < 8192 {
            return bad("pack_bytes", "it must be at least 8192");
        }
        if self.probe.as_ref().is_some_and(Vec::is_empty) {
            return bad("probe", "the command is empty: name a program or use None");
        }
        Ok(())
    }
}
