//! A simulated disk in memory that can lose everything that was not synced.
//!
//! Each file holds its durable bytes and the list of changes since its last sync; names work the same way. A power
//! cut ([`SimDisk::crash`]) keeps a random part of the unsynced changes: for files any subset of 4 KiB pieces, for
//! names a prefix in order, as a journaling file system does. Directories themselves are durable at once.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::{Disk, DiskEntry, DiskFile, DiskLock};
use crate::sync::lock;

const PIECE: usize = 4096;

#[derive(Clone)]
enum Change {
    Write(u64, Vec<u8>),
    Truncate(u64),
    Punch(u64, u64),
}

#[derive(Default, Clone)]
struct Content {
    durable: Vec<u8>,
    current: Vec<u8>,
    unsynced: Vec<Change>,
}

struct SimFile {
    content: Mutex<Content>,
    space: Arc<Mutex<Space>>,
}

/// Bytes that may still be written.
struct Space {
    left: Option<u64>,
}

#[derive(Clone)]
enum NameChange {
    Link(PathBuf, Arc<SimFile>),
    Unlink(PathBuf),
    Rename(PathBuf, PathBuf),
}

#[derive(Default, Clone)]
struct Names {
    files: BTreeMap<PathBuf, Arc<SimFile>>,
    dirs: BTreeSet<PathBuf>,
}

#[derive(Default)]
struct Tree {
    current: Names,
    durable: Names,
    unsynced: Vec<NameChange>,
    locked: BTreeSet<PathBuf>,
}

/// A disk in memory. Cloning shares it.
#[derive(Clone)]
pub struct SimDisk {
    tree: Arc<Mutex<Tree>>,
    space: Arc<Mutex<Space>>,
}

struct SimLock {
    tree: Arc<Mutex<Tree>>,
    path: PathBuf,
    content: Arc<SimFile>,
}

/// SplitMix64 (Steele, Lea and Flood, 2014): enough randomness to choose what a power cut keeps.
struct Dice(u64);

impl Dice {
    fn coin(&mut self) -> bool {
        self.roll() & 1 == 0
    }

    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Default for SimDisk {
    fn default() -> Self {
        Self::new()
    }
}

impl SimDisk {
    /// An empty disk with no limit on space.
    pub fn new() -> Self {
        Self { tree: Arc::default(), space: Arc::new(Mutex::new(Space { left: None })) }
    }

    /// Lets `bytes` more bytes be written; then writes fail with ENOSPC.
    pub fn set_space_left(&self, bytes: Option<u64>) {
        lock(&self.space).left = bytes;
    }

    /// The disk as a power cut at this instant leaves it: synced bytes and names are there, of the rest a part chosen
    /// by `seed`. The old disk goes on separately, for a store that still holds it.
    pub fn crash(&self, seed: u64) -> SimDisk {
        let mut dice = Dice(seed);
        let tree = lock(&self.tree);
        let after = SimDisk::new();
        let mut names = tree.durable.clone();
        names.dirs.extend(tree.current.dirs.iter().cloned());
        let keep =
            if tree.unsynced.is_empty() { 0 } else { dice.roll() as usize % (tree.unsynced.len() + 1) };
        for change in &tree.unsynced[..keep] {
            names.apply(change);
        }
        // A file renamed twice must stay one file, so copies are made once for each original.
        let mut copies: Vec<(Arc<SimFile>, Arc<SimFile>)> = Vec::new();
        for file in names.files.values_mut() {
            if let Some((_, copy)) = copies.iter().find(|(original, _)| Arc::ptr_eq(original, file)) {
                *file = Arc::clone(copy);
                continue;
            }
            let bytes = lock(&file.content).after_crash(&mut dice);
            let content = Content { durable: bytes.clone(), current: bytes, unsynced: Vec::new() };
            let copy = Arc::new(SimFile { content: Mutex::new(content), space: Arc::clone(&after.space) });
            copies.push((Arc::clone(file), Arc::clone(&copy)));
            *file = copy;
        }
        {
            let mut new = lock(&after.tree);
            new.durable = names.clone();
            new.current = names;
        }
        after
    }

    /// Turns over one bit of a file, on the medium itself.
    ///
    /// # Errors
    /// `NotFound`, or `InvalidInput` if the file is shorter.
    pub fn flip_bit(&self, path: &Path, bit: u64) -> io::Result<()> {
        let file = self.find(path)?;
        let mut content = lock(&file.content);
        let at = usize::try_from(bit / 8).map_err(io::Error::other)?;
        let mask = 1 << (bit % 8);
        if at >= content.current.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        content.current[at] ^= mask;
        if let Some(byte) = content.durable.get_mut(at) {
            *byte ^= mask;
        }
        Ok(())
    }

    fn find(&self, path: &Path) -> io::Result<Arc<SimFile>> {
        lock(&self.tree).current.files.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn change(tree: &mut Tree, change: NameChange) {
        tree.current.apply(&change);
        tree.unsynced.push(change);
    }
}

impl Names {
    fn apply(&mut self, change: &NameChange) {
        match change {
            NameChange::Link(path, file) => {
                self.files.insert(path.clone(), Arc::clone(file));
            }
            NameChange::Unlink(path) => {
                self.files.remove(path);
            }
            NameChange::Rename(from, to) => {
                if let Some(file) = self.files.remove(from) {
                    self.files.insert(to.clone(), file);
                    return;
                }
                let moved: Vec<PathBuf> =
                    self.files.keys().filter(|p| p.starts_with(from)).cloned().collect();
                for old in moved {
                    if let (Some(file), Ok(rest)) = (self.files.remove(&old), old.strip_prefix(from)) {
                        self.files.insert(to.join(rest), file);
                    }
                }
                let dirs: Vec<PathBuf> = self.dirs.iter().filter(|p| p.starts_with(from)).cloned().collect();
                for old in dirs {
                    self.dirs.remove(&old);
                    if let Ok(rest) = old.strip_prefix(from) {
                        let new = if rest.as_os_str().is_empty() { to.clone() } else { to.join(rest) };
                        self.dirs.insert(new);
                    }
                }
            }
        }
    }
}

impl NameChange {
    fn touches(&self, dir: &Path) -> bool {
        match self {
            Self::Link(path, _) | Self::Unlink(path) => path.parent() == Some(dir),
            Self::Rename(from, to) => from.parent() == Some(dir) || to.parent() == Some(dir),
        }
    }
}

fn put(bytes: &mut Vec<u8>, offset: usize, data: &[u8]) {
    if bytes.len() < offset + data.len() {
        bytes.resize(offset + data.len(), 0);
    }
    bytes[offset..offset + data.len()].copy_from_slice(data);
}

fn zero(bytes: &mut [u8], offset: u64, len: u64) {
    let start = (offset as usize).min(bytes.len());
    let end = (offset.saturating_add(len) as usize).min(bytes.len());
    bytes[start..end].fill(0);
}

impl Content {
    fn after_crash(&self, dice: &mut Dice) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        for change in &self.unsynced {
            match change {
                Change::Write(offset, data) => {
                    for (i, piece) in data.chunks(PIECE).enumerate() {
                        if dice.coin() {
                            put(&mut bytes, *offset as usize + i * PIECE, piece);
                        }
                    }
                }
                Change::Truncate(len) if dice.coin() => bytes.resize(*len as usize, 0),
                Change::Punch(offset, len) if dice.coin() => zero(&mut bytes, *offset, *len),
                Change::Truncate(_) | Change::Punch(..) => {}
            }
        }
        bytes
    }
}

impl Disk for SimDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut tree = lock(&self.tree);
        for dir in path.ancestors() {
            tree.current.dirs.insert(dir.to_path_buf());
            tree.durable.dirs.insert(dir.to_path_buf());
        }
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let mut tree = lock(&self.tree);
        if tree.current.files.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if path.parent().is_some_and(|p| !tree.current.dirs.contains(p)) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let file = Arc::new(SimFile { content: Mutex::default(), space: Arc::clone(&self.space) });
        Self::change(&mut tree, NameChange::Link(path.to_path_buf(), Arc::clone(&file)));
        Ok(file)
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.find(path)?)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        if !self.exists(from) {
            return Err(io::ErrorKind::NotFound.into());
        }
        Self::change(&mut lock(&self.tree), NameChange::Rename(from.to_path_buf(), to.to_path_buf()));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.find(path)?;
        Self::change(&mut lock(&self.tree), NameChange::Unlink(path.to_path_buf()));
        Ok(())
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        let mut tree = lock(&self.tree);
        if !tree.current.dirs.contains(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let inside: Vec<PathBuf> =
            tree.current.files.keys().filter(|p| p.starts_with(path)).cloned().collect();
        for file in inside {
            Self::change(&mut tree, NameChange::Unlink(file));
        }
        tree.current.dirs.retain(|p| !p.starts_with(path));
        tree.durable.dirs.retain(|p| !p.starts_with(path));
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<DiskEntry>> {
        let tree = lock(&self.tree);
        if !tree.current.dirs.contains(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let name = |p: &Path| p.file_name().and_then(|n| n.to_str()).map(str::to_owned);
        let mut entries = Vec::new();
        for (file, inode) in tree.current.files.iter().filter(|(p, _)| p.parent() == Some(path)) {
            if let Some(name) = name(file) {
                entries.push(DiskEntry {
                    name,
                    len: lock(&inode.content).current.len() as u64,
                    is_dir: false,
                });
            }
        }
        for dir in tree.current.dirs.iter().filter(|p| p.parent() == Some(path)) {
            if let Some(name) = name(dir) {
                entries.push(DiskEntry { name, len: 0, is_dir: true });
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut tree = lock(&self.tree);
        let (synced, rest) = std::mem::take(&mut tree.unsynced).into_iter().partition(|c| c.touches(path));
        tree.unsynced = rest;
        let synced: Vec<NameChange> = synced;
        for change in &synced {
            tree.durable.apply(change);
        }
        Ok(())
    }

    fn exists(&self, path: &Path) -> bool {
        let tree = lock(&self.tree);
        tree.current.files.contains_key(path) || tree.current.dirs.contains(path)
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn DiskLock>> {
        let mut tree = lock(&self.tree);
        if !tree.locked.insert(path.to_path_buf()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let file = match tree.current.files.get(path) {
            Some(file) => Arc::clone(file),
            None => {
                let file = Arc::new(SimFile { content: Mutex::default(), space: Arc::clone(&self.space) });
                Self::change(&mut tree, NameChange::Link(path.to_path_buf(), Arc::clone(&file)));
                file
            }
        };
        Ok(Box::new(SimLock { tree: Arc::clone(&self.tree), path: path.to_path_buf(), content: file }))
    }
}

impl DiskFile for SimFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        {
            let mut space = lock(&self.space);
            if let Some(left) = space.left {
                space.left = Some(
                    left.checked_sub(bytes.len() as u64).ok_or_else(|| io::Error::from_raw_os_error(28))?,
                );
            }
        }
        let mut content = lock(&self.content);
        put(&mut content.current, usize::try_from(offset).map_err(io::Error::other)?, bytes);
        content.unsynced.push(Change::Write(offset, bytes.to_vec()));
        Ok(())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let content = lock(&self.content);
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(content.current.len());
        let got = buf.len().min(content.current.len() - start);
        buf[..got].copy_from_slice(&content.current[start..start + got]);
        Ok(got)
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut content = lock(&self.content);
        let content = &mut *content;
        for change in content.unsynced.drain(..) {
            match change {
                Change::Write(offset, data) => put(&mut content.durable, offset as usize, &data),
                Change::Truncate(len) => content.durable.resize(len as usize, 0),
                Change::Punch(offset, len) => zero(&mut content.durable, offset, len),
            }
        }
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(lock(&self.content).current.len() as u64)
    }

    fn allocated(&self) -> io::Result<u64> {
        // A piece of zeros counts as a hole.
        let content = lock(&self.content);
        let pieces = content.current.chunks(PIECE).filter(|piece| piece.iter().any(|b| *b != 0)).count();
        Ok((pieces * PIECE) as u64)
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        let mut content = lock(&self.content);
        content.current.resize(usize::try_from(len).map_err(io::Error::other)?, 0);
        content.unsynced.push(Change::Truncate(len));
        Ok(())
    }

    fn punch(&self, offset: u64, len: u64) -> io::Result<bool> {
        let mut content = lock(&self.content);
        zero(&mut content.current, offset, len);
        content.unsynced.push(Change::Punch(offset, len));
        Ok(true)
    }
}

impl DiskLock for SimLock {
    fn set_content(&self, bytes: &[u8]) -> io::Result<()> {
        self.content.truncate(0)?;
        self.content.write_at(0, bytes)?;
        self.content.sync_data()
    }
}

impl Drop for SimLock {
    fn drop(&mut self) {
        lock(&self.tree).locked.remove(&self.path);
    }
}
