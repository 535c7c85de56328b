//! A disk whose packs fail on command; everything else of the data directory goes on.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex};

use store::{Disk, DiskEntry, DiskFile, DiskLock, RealDisk};

/// What goes wrong with packs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing.
    #[default]
    None,
    /// There is no room: what is there can be read.
    Full,
    /// Nothing may be opened, made or changed.
    Denied,
    /// The device gives errors.
    Broken,
}

impl Trouble {
    fn error(self) -> io::Error {
        match self {
            Self::Full => io::ErrorKind::StorageFull.into(),
            Self::Denied => io::ErrorKind::PermissionDenied.into(),
            Self::None | Self::Broken => io::Error::from_raw_os_error(5),
        }
    }
}

/// The machine's disk with trouble on demand. Cloning shares it.
#[derive(Clone, Default)]
pub struct TroubledDisk(Arc<Mutex<Trouble>>);

impl TroubledDisk {
    /// From now on.
    pub fn set(&self, trouble: Trouble) {
        *self.0.lock().unwrap() = trouble;
    }

    fn change(&self, path: &Path) -> io::Result<()> {
        let trouble = *self.0.lock().unwrap();
        if trouble == Trouble::None || !is_pack(path) { Ok(()) } else { Err(trouble.error()) }
    }

    fn read(&self, path: &Path) -> io::Result<()> {
        let trouble = *self.0.lock().unwrap();
        if trouble == Trouble::Full { Ok(()) } else { self.change(path) }
    }

    fn file(&self, path: &Path, inner: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(TroubledFile { disk: self.clone(), path: path.to_owned(), inner })
    }
}

fn is_pack(path: &Path) -> bool {
    path.components().any(|part| part == Component::Normal("packs".as_ref()))
}

impl Disk for TroubledDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.change(path)?;
        RealDisk.create_dir(path)
    }
    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        self.change(path)?;
        Ok(self.file(path, RealDisk.create(path)?))
    }
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        self.read(path)?;
        Ok(self.file(path, RealDisk.open(path)?))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(from)?;
        RealDisk.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.change(path)?;
        RealDisk.remove(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.change(path)?;
        RealDisk.remove_dir_all(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<DiskEntry>> {
        self.read(path)?;
        RealDisk.list(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.change(path)?;
        RealDisk.sync_dir(path)
    }
    fn exists(&self, path: &Path) -> bool {
        RealDisk.exists(path)
    }
    fn lock(&self, path: &Path) -> io::Result<Box<dyn DiskLock>> {
        RealDisk.lock(path)
    }
}

struct TroubledFile {
    disk: TroubledDisk,
    path: std::path::PathBuf,
    inner: Arc<dyn DiskFile>,
}

impl DiskFile for TroubledFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.disk.change(&self.path)?;
        self.inner.write_at(offset, bytes)
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.disk.read(&self.path)?;
        self.inner.read_at(offset, buf)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.disk.change(&self.path)?;
        self.inner.sync_data()
    }
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }
    fn allocated(&self) -> io::Result<u64> {
        self.inner.allocated()
    }
    fn truncate(&self, len: u64) -> io::Result<()> {
        self.disk.change(&self.path)?;
        self.inner.truncate(len)
    }
    fn punch(&self, offset: u64, len: u64) -> io::Result<bool> {
        self.disk.change(&self.path)?;
        self.inner.punch(offset, len)
    }
}
