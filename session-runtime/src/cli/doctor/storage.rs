//! Checks of files: the model, the data directory, the disk.

use std::path::Path;

use store::{Store, StoreOptions};

use super::Check;
use crate::cli::bytes::Bytes;
use crate::cli::failure::Outcome;
use crate::cli::options::Options;
use crate::models::catalog::{self, CatalogError};
use crate::models::digest_of;
use crate::models::progress::Terminal;

/// Whether the model's file is there and is the one the catalog names.
pub(super) fn model(options: &Options) -> Option<Check> {
    let name = options.model_name();
    let file = match catalog::resolve(name) {
        Ok(file) => file,
        Err(error @ CatalogError::NotDownloaded { alias, .. }) => {
            let fix = format!("run `session-runtime model pull {alias}`");
            return Some(Check::problem("model", error.to_string(), fix));
        }
        Err(error) => {
            let fix = "name one of `session-runtime model ls`, a .gguf file or the directory of a checkpoint, with --model";
            return Some(Check::problem("model", error.to_string(), fix));
        }
    };
    let digest = match digest_of(&file.path, &Terminal::new()) {
        Ok(digest) => digest,
        Err(error) => {
            return Some(Check::problem(
                "model",
                error.to_string(),
                "make the file readable, or pull it again",
            ));
        }
    };
    let expected = file.alias.and_then(catalog::entry).map(catalog::Entry::digest);
    let place = file.path.display();
    Some(match expected {
        Some(expected) if expected != digest => Check::problem(
            "model",
            format!("{place} has SHA-256 {digest}, but {name} has {expected}"),
            format!("run `session-runtime model rm {name}` and `session-runtime model pull {name}`"),
        ),
        Some(_) => Check::ok("model", format!("{name} at {place}, SHA-256 {digest} as published")),
        None => Check::ok("model", format!("{place}, SHA-256 {digest}")),
    })
}

/// Whether the data directory can be used.
pub(super) fn data_directory(options: &Options) -> Outcome<Check> {
    let dir = options.data_dir()?;
    let place = dir.display();
    if let Some(holder) = store::holder(&dir) {
        let at = holder.address.map_or_else(String::new, |address| format!(" at {address}"));
        let found = format!("{place} is in use by process {}{at}: commands talk to it", holder.pid);
        return Ok(Check::ok("data directory", found));
    }
    let is_empty = std::fs::read_dir(&dir).map(|mut entries| entries.next().is_none());
    Ok(match is_empty {
        Ok(false) => existing(&dir),
        Ok(true) => writable(&dir, &format!("{place} is empty")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            writable(&dir, &format!("{place} will be made at the first start"))
        }
        Err(error) => {
            let fix = "choose a directory of your own with --data-dir";
            Check::problem("data directory", format!("{place}: {error}"), fix)
        }
    })
}

/// The file every store has. Without it the directory is not opened: opening leaves a lock file behind.
const MARK: &str = "FORMAT";

/// Opens the store as a start would, and says what that mended.
fn existing(dir: &Path) -> Check {
    let fix = "choose another directory with --data-dir, or bring back a copy of this one";
    if !dir.join(MARK).exists() {
        let found = format!("{} holds files that are not this program's", dir.display());
        return Check::problem("data directory", found, "choose an empty or new directory with --data-dir");
    }
    match Store::open(dir, StoreOptions::default()) {
        Ok(store) => {
            let mended = crate::runtime::recovery_lines(store.recovery());
            let place = dir.display();
            let found = match mended.len() {
                0 => format!("{place} is sound (format {})", store::FORMAT_VERSION),
                _ => format!("{place} was mended: {}", mended.join("; ")),
            };
            match store.close() {
                Ok(()) => Check::ok("data directory", found),
                Err(error) => {
                    Check::problem("data directory", format!("{found}; closing it failed: {error}"), fix)
                }
            }
        }
        Err(error) => Check::problem("data directory", error.to_string(), fix),
    }
}

/// Whether files can be made in `dir`, or in the nearest directory above it that exists.
fn writable(dir: &Path, found: &str) -> Check {
    let there = dir.ancestors().find(|above| above.is_dir()).unwrap_or(Path::new("."));
    match rustix::fs::access(there, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK) {
        Ok(()) => Check::ok("data directory", found),
        Err(error) => {
            let found = format!("{found}, but {} cannot be written: {error}", there.display());
            Check::problem("data directory", found, "choose a directory of your own with --data-dir")
        }
    }
}

/// Whether saved KV fits on the disk.
pub(super) fn disk_space(options: &Options) -> Outcome<Check> {
    let dir = options.data_dir()?;
    let there = dir.ancestors().find(|above| above.is_dir()).unwrap_or(Path::new("."));
    let free = match rustix::fs::statvfs(there) {
        Ok(disk) => disk.f_bavail.saturating_mul(disk.f_frsize),
        Err(error) => return Ok(Check::ok("disk space", format!("not known: {error}"))),
    };
    let quota = options.config()?.disk_quota_bytes;
    let found = format!("{} free, saved KV may take {}", Bytes(free), Bytes(quota));
    if free < quota {
        let fix = "make room, or set a smaller --disk-quota; without room KV is recomputed instead of loaded";
        return Ok(Check::warning("disk space", found, fix));
    }
    Ok(Check::ok("disk space", found))
}
