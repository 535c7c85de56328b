//! A disk that fails on command: the n-th write, fsync, read or name change.
//!
//! Owns the counting and the planned faults; the bytes go to the wrapped disk.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{Disk, DiskEntry, DiskFile, DiskLock};
use crate::sync::lock;

/// The kinds of operation that are counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskOp {
    /// [`DiskFile::write_at`] and [`DiskFile::truncate`].
    Write,
    /// [`DiskFile::sync_data`] and [`Disk::sync_dir`].
    Sync,
    /// [`DiskFile::read_at`].
    Read,
    /// Creating, renaming and removing names.
    Name,
}

/// What happens at the chosen operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultEffect {
    /// The operation does nothing and returns this error number (5 is EIO, 28 is ENOSPC).
    Errno(i32),
    /// A write stores only the first `keep` bytes and then returns ENOSPC.
    Short {
        /// Bytes that reach the file.
        keep: usize,
    },
    /// A write stores only the first `keep` bytes and reports success, as a lying device does.
    Torn {
        /// Bytes that reach the file.
        keep: usize,
    },
    /// A read returns its data with bit `bit` (counted from the start of the buffer) turned over.
    FlipBit {
        /// Index of the bit; taken modulo the bits read.
        bit: usize,
    },
    /// The operation waits first, then happens.
    Delay(Duration),
}

/// One planned fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskFault {
    /// The kind of operation.
    pub on: DiskOp,
    /// Which one, counted from 1 since the disk was made.
    pub nth: u64,
    /// What happens.
    pub effect: FaultEffect,
    /// Whether every later operation of the kind fares the same.
    pub repeat: bool,
}

#[derive(Default)]
struct Plan {
    counts: [u64; 4],
    faults: Vec<DiskFault>,
}

/// A disk that wraps another and applies planned faults. Cloning shares plan and counters.
#[derive(Clone)]
pub struct FaultyDisk {
    inner: Arc<dyn Disk>,
    plan: Arc<Mutex<Plan>>,
}

struct FaultyFile {
    inner: Arc<dyn DiskFile>,
    plan: Arc<Mutex<Plan>>,
}

impl FaultyDisk {
    /// Wraps `inner`, with no fault planned.
    pub fn new(inner: Arc<dyn Disk>) -> Self {
        Self { inner, plan: Arc::default() }
    }

    /// Adds a fault.
    pub fn plan(&self, fault: DiskFault) {
        lock(&self.plan).faults.push(fault);
    }

    /// Forgets every planned fault.
    pub fn clear(&self) {
        lock(&self.plan).faults.clear();
    }

    /// Operations of a kind so far.
    pub fn count(&self, op: DiskOp) -> u64 {
        lock(&self.plan).counts[op as usize]
    }
}

/// Counts the operation and returns the effect planned for it, after any delay.
fn next(plan: &Mutex<Plan>, op: DiskOp) -> Option<FaultEffect> {
    let effect = {
        let mut plan = lock(plan);
        plan.counts[op as usize] += 1;
        let now = plan.counts[op as usize];
        plan.faults
            .iter()
            .find(|f| f.on == op && (f.nth == now || (f.repeat && now > f.nth)))
            .map(|f| f.effect)
    };
    if let Some(FaultEffect::Delay(time)) = effect {
        std::thread::sleep(time);
        return None;
    }
    effect
}

fn fail_only(effect: Option<FaultEffect>) -> io::Result<()> {
    match effect {
        Some(FaultEffect::Errno(code)) => Err(io::Error::from_raw_os_error(code)),
        _ => Ok(()),
    }
}

impl FaultyDisk {
    fn wrap(&self, inner: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(FaultyFile { inner, plan: Arc::clone(&self.plan) })
    }

    fn name_change(&self) -> io::Result<()> {
        fail_only(next(&self.plan, DiskOp::Name))
    }
}

impl Disk for FaultyDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.name_change()?;
        self.inner.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        self.name_change()?;
        Ok(self.wrap(self.inner.create(path)?))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.wrap(self.inner.open(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.name_change()?;
        self.inner.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.name_change()?;
        self.inner.remove(path)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.name_change()?;
        self.inner.remove_dir_all(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DiskEntry>> {
        self.inner.list(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        fail_only(next(&self.plan, DiskOp::Sync))?;
        self.inner.sync_dir(path)
    }

    fn exists(&self, path: &Path) -> bool {
        self.inner.exists(path)
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn DiskLock>> {
        self.inner.lock(path)
    }
}

impl DiskFile for FaultyFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match next(&self.plan, DiskOp::Write) {
            Some(FaultEffect::Errno(code)) => Err(io::Error::from_raw_os_error(code)),
            Some(FaultEffect::Short { keep }) => {
                self.inner.write_at(offset, &bytes[..keep.min(bytes.len())])?;
                Err(io::Error::from_raw_os_error(28))
            }
            Some(FaultEffect::Torn { keep }) => self.inner.write_at(offset, &bytes[..keep.min(bytes.len())]),
            _ => self.inner.write_at(offset, bytes),
        }
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let effect = next(&self.plan, DiskOp::Read);
        fail_only(effect)?;
        let got = self.inner.read_at(offset, buf)?;
        match effect {
            Some(FaultEffect::Short { keep } | FaultEffect::Torn { keep }) => Ok(got.min(keep)),
            Some(FaultEffect::FlipBit { bit }) if got > 0 => {
                let bit = bit % (got * 8);
                buf[bit / 8] ^= 1 << (bit % 8);
                Ok(got)
            }
            _ => Ok(got),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        fail_only(next(&self.plan, DiskOp::Sync))?;
        self.inner.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn allocated(&self) -> io::Result<u64> {
        self.inner.allocated()
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        fail_only(next(&self.plan, DiskOp::Write))?;
        self.inner.truncate(len)
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<bool> {
        fail_only(next(&self.plan, DiskOp::Write))?;
        self.inner.punch(offset, len)
    }
}
