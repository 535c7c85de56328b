//! Compiled components on disk, keyed by the component's digest and by everything that shapes the code.
//! Only files written and hashed here are deserialised.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use wasmtime::component::Component;

use super::engine::GuestEngine;

const MAGIC: &[u8; 16] = b"session-code-v1\n";
const HEADER: usize = 16 + 32;
const EXTENSION: &str = "cwasm";

/// The directory of compiled components.
pub(super) struct CodeCache {
    directory: PathBuf,
    quota: u64,
}

impl CodeCache {
    pub(super) fn new(directory: PathBuf, quota: u64) -> Self {
        Self { directory, quota }
    }

    /// Compiles `bytes`, or takes the code from an earlier time. A cache that cannot be read or written
    /// costs time, never correctness: it is logged.
    pub(super) fn compile(
        &self,
        engine: &GuestEngine,
        digest: &blake3::Hash,
        bytes: &[u8],
    ) -> wasmtime::Result<Component> {
        let path = self.path(engine, digest);
        if let Some(component) = load(engine, &path) {
            return Ok(component);
        }
        let component = Component::from_binary(engine.inner(), bytes)?;
        match component.serialize() {
            Ok(code) => {
                if let Err(error) = self.save(&path, &code) {
                    tracing::warn!(path = %path.display(), %error, "compiled component not cached");
                }
            }
            Err(error) => tracing::warn!(%error, "compiled component not serialised"),
        }
        Ok(component)
    }

    fn path(&self, engine: &GuestEngine, digest: &blake3::Hash) -> PathBuf {
        let mut hasher = DefaultHasher::new();
        engine.inner().precompile_compatibility_hash().hash(&mut hasher);
        self.directory.join(format!("{}-{:016x}.{EXTENSION}", digest.to_hex(), hasher.finish()))
    }

    fn save(&self, path: &Path, code: &[u8]) -> std::io::Result<()> {
        if code.len() as u64 > self.quota {
            return Ok(());
        }
        make_private(&self.directory)?;
        self.prune(code.len() as u64)?;
        // A reader sees the whole file or none.
        let part = path.with_extension(format!("part{}", std::process::id()));
        let mut file = fs::File::create(&part)?;
        file.write_all(MAGIC)?;
        file.write_all(blake3::hash(code).as_bytes())?;
        file.write_all(code)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&part, path)
    }

    /// Removes the files used longest ago until `coming` more bytes fit.
    fn prune(&self, coming: u64) -> std::io::Result<()> {
        let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_file() {
                files.push((meta.modified()?, meta.len(), entry.path()));
            }
        }
        files.sort();
        let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum::<u64>() + coming;
        for (_, bytes, path) in files {
            if total <= self.quota {
                break;
            }
            fs::remove_file(path)?;
            total -= bytes;
        }
        Ok(())
    }
}

// Machine code is taken from these files, so nobody else may write them.
fn make_private(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::create_dir_all(directory)?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700))
}

fn load(engine: &GuestEngine, path: &Path) -> Option<Component> {
    let file = fs::read(path).ok()?;
    let (header, code) = file.split_at_checked(HEADER)?;
    let (magic, digest) = header.split_at(MAGIC.len());
    if magic != MAGIC || digest != blake3::hash(code).as_bytes() {
        tracing::warn!(path = %path.display(), "compiled component is damaged and is made again");
        return None;
    }
    // SAFETY: the bytes carry the digest that `save` wrote, the directory is this user's alone, and
    // wasmtime checks that they were made by this version under this configuration.
    let component = unsafe { Component::deserialize(engine.inner(), code) };
    match component {
        Ok(component) => {
            // The time of use decides what is pruned; failing to note it changes nothing else.
            let _ = fs::File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
            Some(component)
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "compiled component is made again");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::limits::GuestLimits;

    const EMPTY_COMPONENT: &[u8] = &[0, b'a', b's', b'm', 0x0d, 0, 1, 0];

    fn engine() -> GuestEngine {
        GuestEngine::start(&GuestLimits::default()).unwrap().0
    }

    #[test]
    fn a_damaged_file_is_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CodeCache::new(directory.path().join("code"), 1 << 20);
        let engine = engine();
        let digest = blake3::hash(EMPTY_COMPONENT);
        cache.compile(&engine, &digest, EMPTY_COMPONENT).unwrap();
        let path = cache.path(&engine, &digest);
        let good = fs::read(&path).unwrap();
        assert!(load(&engine, &path).is_some());
        for at in [0, 20, HEADER + 100, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&path, &bad).unwrap();
            assert!(load(&engine, &path).is_none(), "byte {at}");
            cache.compile(&engine, &digest, EMPTY_COMPONENT).unwrap();
            assert_eq!(fs::read(&path).unwrap(), good);
        }
        fs::write(&path, &good[..HEADER - 1]).unwrap();
        assert!(load(&engine, &path).is_none());
    }

    #[test]
    fn i8_the_cache_keeps_its_quota() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CodeCache::new(directory.path().to_owned(), 1000);
        for name in ["a", "b", "c", "d"] {
            cache.save(&directory.path().join(name), &[7; 400]).unwrap();
            let total: u64 =
                fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
            assert!(total <= 1000 + HEADER as u64, "{total}");
            assert!(directory.path().join(name).exists());
        }
    }
}
