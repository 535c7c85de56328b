//! Compiled kernels on disk, found by a digest of everything that makes them what they are.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::DeviceError;
use super::nvrtc::Compiler;
use super::sources::{HEADERS, OPTIONS, Source};

/// Length of a digest in hex.
const HEX: usize = 64;
/// Ending of the files.
const ENDING: &str = "ptx";

/// A folder of compiled kernels in front of a compiler.
///
/// A file begins with the digest of what follows. One that does not fit it is compiled again and replaced; a folder that
/// cannot be written to is no error, only slow. Nothing is ever deleted: a version of the kernels takes less than two
/// megabytes.
///
/// The compiler's version is part of a file's name, because a driver refuses code of a compiler that is newer than itself:
/// whoever puts an older one in its place gets code of that. Where there is no compiler, code of any version is taken: all
/// give the same numbers.
pub struct Cache {
    folder: Option<PathBuf>,
    compiler: Box<dyn Compiler>,
}

impl Cache {
    /// Without a folder everything is compiled when it is first used.
    pub fn new(folder: Option<PathBuf>, compiler: Box<dyn Compiler>) -> Self {
        Self { folder, compiler }
    }

    /// PTX of a file.
    ///
    /// # Errors
    /// It is not in the cache and does not compile.
    pub fn code(&self, source: &Source, capability: (u32, u32)) -> Result<String, DeviceError> {
        let key = key(source, capability);
        let version = match self.compiler.version() {
            Ok(version) => version,
            Err(missing) => return self.of_any_version(&key).ok_or(missing),
        };
        let path = self.folder.as_ref().map(|folder| folder.join(file_name(&key, version)));
        if let Some(code) = path.as_deref().and_then(read) {
            return Ok(code);
        }
        let code = self.compiler.compile(source, capability)?;
        if let Some(path) = path {
            write(&path, &code);
        }
        Ok(code)
    }

    /// Code that some compiler made before.
    fn of_any_version(&self, key: &str) -> Option<String> {
        let entries = fs::read_dir(self.folder.as_ref()?).ok()?;
        let mut files: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|ending| ending == ENDING))
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(key)))
            .collect();
        // The same one at every start.
        files.sort();
        files.iter().find_map(|path| read(path))
    }
}

/// A file's name: what the code is of, and whose it is.
fn file_name(key: &str, (major, minor): (u32, u32)) -> String {
    format!("{key}-nvrtc{major}.{minor}.{ENDING}")
}

/// Name, architecture, and the digest of a source, its headers and the options.
fn key(source: &Source, (major, minor): (u32, u32)) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    };
    add(source.text);
    HEADERS.iter().for_each(|(name, text)| {
        add(name);
        add(text);
    });
    OPTIONS.iter().for_each(|option| add(option));
    let stem = source.file.trim_end_matches(".cu");
    format!("{stem}-compute_{major}{minor}-{}", &hasher.finalize().to_hex()[..32])
}

fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let (digest, code) = text.split_at_checked(HEX)?;
    let code = code.strip_prefix('\n')?;
    (blake3::hash(code.as_bytes()).to_hex().as_str() == digest).then(|| code.to_string())
}

/// Writes beside and renames, so that no one reads half a file.
fn write(path: &Path, code: &str) {
    let Some(folder) = path.parent() else { return };
    let beside = path.with_extension(format!("{}.part", std::process::id()));
    let text = format!("{}\n{code}", blake3::hash(code.as_bytes()).to_hex());
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&beside, text));
    if written.and_then(|()| fs::rename(&beside, path)).is_err() {
        // A cache that is not there costs the next start some seconds, no more.
        let _ = fs::remove_file(&beside);
    }
}

#[cfg(test)]
mod tests;
