//! The quarantine folder: damaged files and doubtful directories, kept for inspection, bounded in number.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::clock::Clock;
use crate::disk::{Disk, copy_file};
use crate::limits::MAX_QUARANTINED;

/// The folder.
#[derive(Clone)]
pub(crate) struct Quarantine {
    disk: Arc<dyn Disk>,
    clock: Arc<dyn Clock>,
    dir: PathBuf,
}

impl Quarantine {
    pub(crate) fn new(disk: Arc<dyn Disk>, clock: Arc<dyn Clock>, dir: PathBuf) -> io::Result<Self> {
        disk.create_dir(&dir)?;
        Ok(Self { disk, clock, dir })
    }

    /// Copies a file into the folder.
    pub(crate) fn copy_file(&self, path: &Path) -> io::Result<PathBuf> {
        let target = self.target(path)?;
        copy_file(&*self.disk, path, &target)?;
        Ok(target)
    }

    /// Moves a file or a directory into the folder, durably.
    pub(crate) fn take(&self, path: &Path) -> io::Result<PathBuf> {
        let target = self.target(path)?;
        self.disk.rename(path, &target)?;
        self.disk.sync_dir(&self.dir)?;
        if let Some(parent) = path.parent() {
            self.disk.sync_dir(parent)?;
        }
        Ok(target)
    }

    /// A free name, `quarantine-<time>-<name>`, after making room.
    fn target(&self, path: &Path) -> io::Result<PathBuf> {
        let mut held = self.disk.list(&self.dir)?;
        // Names start with the time, so the oldest come first.
        while held.len() >= MAX_QUARANTINED {
            let oldest = held.remove(0);
            let path = self.dir.join(&oldest.name);
            if oldest.is_dir { self.disk.remove_dir_all(&path)? } else { self.disk.remove(&path)? }
        }
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("file");
        let mut time = self.clock.now_ms();
        loop {
            let target = self.dir.join(format!("quarantine-{time:015}-{name}"));
            if !self.disk.exists(&target) {
                return Ok(target);
            }
            time += 1;
        }
    }
}
