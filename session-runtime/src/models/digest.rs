//! Digests that say which weights and which tokenizer a model is, whatever its file is called.
//!
//! The weights digest is the SHA-256 of the whole file. Computing it reads every byte, so it is
//! kept beside the file and used again while length, modification time and inode stay the same.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use sha2::{Digest as _, Sha256};

use super::progress::{Progress, Stage};

/// A SHA-256 digest; shown in hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Reads 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Digest> {
        let mut out = [0; 32];
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != out.len() || !rest.is_empty() {
            return None;
        }
        for (byte, pair) in out.iter_mut().zip(pairs) {
            let digit = |c: u8| char::from(c).to_digit(16);
            *byte = u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok()?;
        }
        Some(Digest(out))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// A model file could not be read for its digest.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path}: {source}")]
pub struct DigestError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub source: std::io::Error,
}

/// Bytes read at once, and between two progress events.
const PIECE_BYTES: usize = 1 << 20;
/// First field of the kept digest; another value means another format, which is computed anew.
const KEPT_FORMAT: &str = "sha256-1";

/// The digest of a file's content: the kept one if the file has not changed since, otherwise
/// computed (reported to `progress`) and kept. A folder that cannot be written only costs the reuse.
///
/// # Errors
/// [`DigestError`] when the file cannot be read.
pub fn weights_digest(path: &Path, progress: &dyn Progress) -> Result<Digest, DigestError> {
    let failed = |source| DigestError { path: path.to_path_buf(), source };
    let mut file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let identity = identity(&metadata);
    let kept = kept_path(path);
    if let Some(digest) = read_kept(&kept, &identity) {
        return Ok(digest);
    }
    let digest = hash(&mut file, metadata.len(), &path.display().to_string(), progress).map_err(failed)?;
    keep(path, digest);
    Ok(digest)
}

/// Keeps a digest that was computed while the file was made. Failing only costs the reuse.
pub(super) fn keep(path: &Path, digest: Digest) {
    if let Ok(metadata) = fs::metadata(path) {
        let kept = kept_path(path);
        if let Err(error) = write_kept(&kept, &identity(&metadata), digest) {
            tracing::debug!(path = %kept.display(), %error, "the weights digest is not kept");
        }
    }
}

/// Where the digest of `path` is kept.
pub(super) fn kept_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".digest");
    path.with_file_name(name)
}

/// Computes the digest of everything `file` still has to give.
pub(super) fn hash(
    file: &mut File,
    total: u64,
    source: &str,
    progress: &dyn Progress,
) -> std::io::Result<Digest> {
    let mut hash = Sha256::new();
    let mut piece = vec![0; PIECE_BYTES];
    let mut done = 0;
    loop {
        let count = file.read(&mut piece)?;
        if count == 0 {
            return Ok(Digest(hash.finalize().into()));
        }
        hash.update(&piece[..count]);
        done += count as u64;
        progress.bytes(source, Stage::Verifying, done, Some(total));
    }
}

/// What must stay the same for a kept digest to hold.
fn identity(metadata: &Metadata) -> String {
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let nanoseconds = modified.map_or(0, |time| time.as_nanos());
    format!("{} {nanoseconds} {}", metadata.len(), inode(metadata))
}

#[cfg(unix)]
fn inode(metadata: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

#[cfg(not(unix))]
fn inode(_: &Metadata) -> u64 {
    0
}

fn read_kept(kept: &Path, identity: &str) -> Option<Digest> {
    let mut text = String::new();
    File::open(kept).ok()?.take(4096).read_to_string(&mut text).ok()?;
    let (format, rest) = text.trim_end().split_once(' ')?;
    let (hex, kept_identity) = rest.split_once(' ')?;
    if format == KEPT_FORMAT && kept_identity == identity { Digest::from_hex(hex) } else { None }
}

fn write_kept(kept: &Path, identity: &str, digest: Digest) -> std::io::Result<()> {
    let mut name = kept.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}", std::process::id()));
    let new = kept.with_file_name(name);
    fs::write(&new, format!("{KEPT_FORMAT} {digest} {identity}\n"))?;
    fs::rename(&new, kept)
}

#[cfg(test)]
mod tests {
    use super::super::progress::Silent;
    use super::*;

    /// SHA-256 of "abc", from FIPS 180-4.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn digest_is_kept_until_the_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        fs::write(&path, "abc").unwrap();
        assert_eq!(weights_digest(&path, &Silent).unwrap().to_string(), ABC);
        // A kept digest of the same file is used as it is.
        let other = "11".repeat(32);
        let kept = fs::read_to_string(kept_path(&path)).unwrap().replace(ABC, &other);
        fs::write(kept_path(&path), kept).unwrap();
        assert_eq!(weights_digest(&path, &Silent).unwrap().to_string(), other);
        // Replacing the file makes it void.
        fs::write(folder.path().join("n"), "abc").unwrap();
        fs::rename(folder.path().join("n"), &path).unwrap();
        assert_eq!(weights_digest(&path, &Silent).unwrap().to_string(), ABC);
        // So does nonsense in the kept file.
        fs::write(kept_path(&path), "sha256-1 zz").unwrap();
        assert_eq!(weights_digest(&path, &Silent).unwrap().to_string(), ABC);
    }

    #[test]
    fn hex_is_strict() {
        assert_eq!(Digest::from_hex(ABC).unwrap().to_string(), ABC);
        for wrong in
            ["", "ab", &ABC[1..], &format!("{ABC}0"), &ABC.replace('b', "g"), &ABC.replace("ba", "+a")]
        {
            assert_eq!(Digest::from_hex(wrong), None);
        }
    }
}
