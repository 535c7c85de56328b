//! The disk seam: every file access of the crate outside sled goes through [`Disk`].
//!
//! [`RealDisk`] is the machine's file system, [`SimDisk`] an in-memory one that can lose everything not synced,
//! [`FaultyDisk`] wraps either and fails on command. Knows nothing of what the bytes mean.

mod faulty;
mod real;
mod sim;

pub use faulty::{DiskFault, DiskOp, FaultEffect, FaultyDisk};
pub use real::RealDisk;
pub use sim::SimDisk;

use std::io;
use std::path::Path;
use std::sync::Arc;

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskEntry {
    /// The name inside the directory.
    pub name: String,
    /// Length in bytes (zero for a directory).
    pub len: u64,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// A file system. Directories are made 0700 and files 0600.
///
/// Nothing is durable before the matching `sync`: a file's bytes need [`DiskFile::sync_data`], a created, renamed or
/// removed name needs [`Disk::sync_dir`] of its directory. All methods return the operating system's errors.
pub trait Disk: Send + Sync {
    /// Makes a directory and its parents; fine if it exists.
    ///
    /// # Errors
    /// As the operating system says.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes a new, empty file.
    ///
    /// # Errors
    /// `AlreadyExists` if the name is taken.
    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>>;
    /// Opens an existing file for reading and writing.
    ///
    /// # Errors
    /// `NotFound` if it does not exist.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>>;
    /// Renames a file or a directory, replacing a file of the new name.
    ///
    /// # Errors
    /// As the operating system says.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    ///
    /// # Errors
    /// `NotFound` if it does not exist.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory and what it holds.
    ///
    /// # Errors
    /// `NotFound` if it does not exist.
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
    /// The entries of a directory, in order of name.
    ///
    /// # Errors
    /// `NotFound` if it does not exist.
    fn list(&self, path: &Path) -> io::Result<Vec<DiskEntry>>;
    /// Makes the names in a directory durable.
    ///
    /// # Errors
    /// As the operating system says.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Whether the name exists.
    fn exists(&self, path: &Path) -> bool;
    /// Takes an exclusive lock held until the returned value is dropped or the process ends.
    ///
    /// # Errors
    /// `WouldBlock` if another holder has it.
    fn lock(&self, path: &Path) -> io::Result<Box<dyn DiskLock>>;
}

/// An open file. Methods take `&self`: the file's position is never used.
pub trait DiskFile: Send + Sync {
    /// Writes all of `bytes` at `offset`, extending the file where needed.
    ///
    /// # Errors
    /// As the operating system says; part of the bytes may have been written.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Reads up to `buf.len()` bytes at `offset`; fewer only at the end of the file.
    ///
    /// # Errors
    /// As the operating system says.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
    /// Makes the file's bytes and length durable.
    ///
    /// # Errors
    /// As the operating system says. After an error the state of the bytes is unknown.
    fn sync_data(&self) -> io::Result<()>;
    /// Length in bytes.
    ///
    /// # Errors
    /// As the operating system says.
    fn len(&self) -> io::Result<u64>;
    /// Whether the file has no bytes.
    ///
    /// # Errors
    /// As the operating system says.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Bytes the file takes on the medium: less than its length where ranges were punched out.
    ///
    /// # Errors
    /// As the operating system says.
    fn allocated(&self) -> io::Result<u64>;
    /// Cuts or extends the file to `len`.
    ///
    /// # Errors
    /// As the operating system says.
    fn truncate(&self, len: u64) -> io::Result<()>;
    /// Gives the range's blocks back to the file system; it reads as zeros afterwards. `false` if the file system
    /// cannot.
    ///
    /// # Errors
    /// As the operating system says.
    fn punch(&self, offset: u64, len: u64) -> io::Result<bool>;
}

/// A held lock file, whose content tells others who holds it.
pub trait DiskLock: Send + Sync {
    /// Replaces the lock file's content.
    ///
    /// # Errors
    /// As the operating system says.
    fn set_content(&self, bytes: &[u8]) -> io::Result<()>;
}

/// Reads a whole file of at most `limit` bytes.
pub(crate) fn read_all(disk: &dyn Disk, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = disk.open(path)?;
    let len = file.len()?;
    if len > limit {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} has {len} bytes, at most {limit} are expected", path.display()),
        ));
    }
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    let got = file.read_at(0, &mut bytes)?;
    bytes.truncate(got);
    Ok(bytes)
}

/// Replaces a small file atomically and durably.
pub(crate) fn replace_file(disk: &dyn Disk, dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = dir.join(format!("{name}.new"));
    if disk.exists(&temporary) {
        disk.remove(&temporary)?;
    }
    let file = disk.create(&temporary)?;
    file.write_at(0, bytes)?;
    file.sync_data()?;
    disk.rename(&temporary, &dir.join(name))?;
    disk.sync_dir(dir)
}

/// Copies a file, durably, through a bounded buffer.
pub(crate) fn copy_file(disk: &dyn Disk, from: &Path, to: &Path) -> io::Result<()> {
    let source = disk.open(from)?;
    let target = disk.create(to)?;
    let mut buf = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        let got = source.read_at(at, &mut buf)?;
        if got == 0 {
            break;
        }
        target.write_at(at, &buf[..got])?;
        at += got as u64;
    }
    target.sync_data()?;
    if let Some(dir) = to.parent() {
        disk.sync_dir(dir)?;
    }
    Ok(())
}
