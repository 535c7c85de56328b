//! The numbered files of one log: names, opening, and a small cache of read handles.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::{FILE_HEADER, Salt, file_header, header_is_good};
use crate::disk::{Disk, DiskFile};
use crate::format::FORMAT_VERSION;
use crate::sync::lock;

/// Read handles kept open at once.
const OPEN_FILES: usize = 64;

/// A place in a log. Later places compare greater.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub(crate) struct LogPos {
    /// File number, from 1.
    pub(crate) file: u64,
    /// Byte offset.
    pub(crate) offset: u64,
}

/// A directory of numbered log files.
pub(crate) struct LogDir {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    kind: u8,
    store_id: u128,
    handles: Mutex<HashMap<u64, Arc<dyn DiskFile>>>,
}

impl LogDir {
    /// Makes the directory if needed. `kind` is the letter in the files' names.
    pub(crate) fn new(disk: Arc<dyn Disk>, dir: PathBuf, kind: u8, store_id: u128) -> io::Result<Self> {
        disk.create_dir(&dir)?;
        Ok(Self { disk, dir, kind, store_id, handles: Mutex::default() })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn path(&self, number: u64) -> PathBuf {
        self.dir.join(format!("{}-{number:010}.log", char::from(self.kind)))
    }

    pub(crate) fn salt(&self, number: u64) -> Salt {
        Salt::new(self.store_id, self.kind, number)
    }

    /// Numbers and lengths of the files, ascending.
    pub(crate) fn list(&self) -> io::Result<Vec<(u64, u64)>> {
        let prefix = format!("{}-", char::from(self.kind));
        let mut files: Vec<(u64, u64)> = self
            .disk
            .list(&self.dir)?
            .into_iter()
            .filter_map(|entry| {
                let number = entry.name.strip_prefix(&prefix)?.strip_suffix(".log")?.parse().ok()?;
                Some((number, entry.len))
            })
            .collect();
        files.sort_unstable();
        Ok(files)
    }

    /// Makes file `number` with its header, both durable.
    pub(crate) fn create(&self, number: u64, now_ms: u64) -> io::Result<Arc<dyn DiskFile>> {
        let file = self.disk.create(&self.path(number))?;
        file.write_at(0, &file_header(&self.salt(number), FORMAT_VERSION, number, now_ms))?;
        file.sync_data()?;
        self.disk.sync_dir(&self.dir)?;
        lock(&self.handles).insert(number, Arc::clone(&file));
        Ok(file)
    }

    /// A handle of file `number`.
    pub(crate) fn open(&self, number: u64) -> io::Result<Arc<dyn DiskFile>> {
        let mut handles = lock(&self.handles);
        if let Some(file) = handles.get(&number) {
            return Ok(Arc::clone(file));
        }
        let file = self.disk.open(&self.path(number))?;
        if handles.len() >= OPEN_FILES {
            handles.clear();
        }
        handles.insert(number, Arc::clone(&file));
        Ok(file)
    }

    /// Whether file `number` starts with its own good header.
    pub(crate) fn has_good_header(&self, number: u64) -> io::Result<bool> {
        let mut header = [0; FILE_HEADER as usize];
        let got = self.open(number)?.read_at(0, &mut header)?;
        Ok(header_is_good(&self.salt(number), &header[..got]))
    }

    /// Removes file `number`, durably.
    pub(crate) fn remove(&self, number: u64) -> io::Result<()> {
        lock(&self.handles).remove(&number);
        self.disk.remove(&self.path(number))?;
        self.disk.sync_dir(&self.dir)
    }
}
