//! The data directory's lock: one process at a time, and a note of who it is.
//!
//! Owns the `LOCK` file: exclusively locked while a store is open, holding the process id and, once known, the
//! address at which that process answers. Knows nothing of what the directory holds.

use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::disk::{Disk, DiskLock, RealDisk, read_all};
use crate::error::OpenError;
use crate::sync::lock;

/// The lock file's name inside the data directory.
pub(crate) const LOCK_FILE: &str = "LOCK";

/// Who holds, or last held, a data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Process id.
    pub pid: u32,
    /// Where the process answers, for example `http://127.0.0.1:8080`, if it said so.
    pub address: Option<String>,
}

/// The process that holds `dir` now; `None` if nobody does.
pub fn holder(dir: &Path) -> Option<Holder> {
    let path = dir.join(LOCK_FILE);
    if !RealDisk.exists(&path) {
        return None;
    }
    match RealDisk.lock(&path) {
        // Taken and released at once: the note is one of the past.
        Ok(_) => None,
        Err(_) => read_note(&RealDisk, &path),
    }
}

/// How long a lock is waited for: a child that another thread is starting holds a copy of every open file for a
/// moment, and with it a lock that was released.
const PATIENCE: Duration = Duration::from_millis(300);

fn patiently(disk: &dyn Disk, path: &Path) -> io::Result<Box<dyn DiskLock>> {
    let end = Instant::now() + PATIENCE;
    loop {
        match disk.lock(path) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return other,
        }
    }
}

fn read_note(disk: &dyn Disk, path: &Path) -> Option<Holder> {
    let text = String::from_utf8(read_all(disk, path, 4096).ok()?).ok()?;
    let mut lines = text.lines();
    let pid = lines.next()?.trim().parse().ok()?;
    let address = lines.next().map(str::trim).filter(|a| !a.is_empty()).map(str::to_owned);
    Some(Holder { pid, address })
}

/// The held lock.
pub(crate) struct DirLock {
    file: Mutex<Box<dyn DiskLock>>,
}

impl DirLock {
    /// Takes the lock of `dir`, which must exist.
    pub(crate) fn take(disk: &dyn Disk, dir: &Path) -> Result<Self, OpenError> {
        let path = dir.join(LOCK_FILE);
        let file = match patiently(disk, &path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let note = read_note(disk, &path);
                return Err(OpenError::InUse {
                    dir: dir.to_path_buf(),
                    pid: note.as_ref().map(|n| n.pid),
                    address: note.and_then(|n| n.address),
                });
            }
            Err(e) => return Err(OpenError::io("lock the data directory", &path, e)),
        };
        let held = Self { file: Mutex::new(file) };
        held.note(None).map_err(|e| OpenError::io("write the lock file", &path, e))?;
        Ok(held)
    }

    /// Tells other processes where this one answers.
    pub(crate) fn note(&self, address: Option<&str>) -> io::Result<()> {
        let text = format!("{}\n{}\n", std::process::id(), address.unwrap_or_default());
        lock(&self.file).set_content(text.as_bytes())
    }
}
