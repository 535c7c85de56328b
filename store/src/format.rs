//! The `FORMAT` file: the version of everything in the data directory, and the store's random identity.
//!
//! The identity salts every checksum of the log files (see `framed`), so bytes of another store, or a payload that
//! imitates a frame, are never taken for a record.

use std::io;
use std::path::Path;

use crate::disk::{Disk, read_all, replace_file};
use crate::error::OpenError;

/// The on-disk format this build reads and writes.
pub const FORMAT_VERSION: u32 = 1;

/// The file's name inside the data directory.
pub(crate) const FORMAT_FILE: &str = "FORMAT";

const TITLE: &str = "session-runtime store";

/// What the file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    /// Random identity, made with the directory.
    pub(crate) store_id: u128,
}

impl Format {
    /// Reads the file, or writes it if the directory is new.
    pub(crate) fn open(disk: &dyn Disk, dir: &Path) -> Result<Self, OpenError> {
        let path = dir.join(FORMAT_FILE);
        match read_all(disk, &path, 4096) {
            Ok(bytes) => Self::parse(&bytes).map_err(|problem| problem.into_error(&path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Self::create(disk, dir),
            Err(e) => Err(OpenError::io("read", &path, e)),
        }
    }

    /// Refuses a directory that is somebody else's: files without a `FORMAT` are not ours to write among. To be
    /// called before anything is written there.
    pub(crate) fn refuse_foreign(disk: &dyn Disk, dir: &Path) -> Result<(), OpenError> {
        let format = dir.join(FORMAT_FILE);
        if !disk.exists(dir) || disk.exists(&format) {
            return Ok(());
        }
        let entries = disk.list(dir).map_err(|e| OpenError::io("list", dir, e))?;
        let ours = ["LOCK", "FORMAT.new", "lost+found"];
        let stranger = entries.iter().find(|e| !ours.contains(&e.name.as_str()));
        // Another process may have made the store meanwhile.
        if let Some(stranger) = stranger.filter(|_| !disk.exists(&format)) {
            return Err(OpenError::BadFormat {
                path: format,
                detail: format!(
                    "it is missing but the directory holds {:?}: choose an empty or new directory",
                    stranger.name
                ),
            });
        }
        Ok(())
    }

    fn create(disk: &dyn Disk, dir: &Path) -> Result<Self, OpenError> {
        let format = Self { store_id: uuid::Uuid::now_v7().as_u128() };
        replace_file(disk, dir, FORMAT_FILE, format.text().as_bytes())
            .map_err(|e| OpenError::io("write", &dir.join(FORMAT_FILE), e))?;
        Ok(format)
    }

    fn text(self) -> String {
        let body = format!("{TITLE}\nversion {FORMAT_VERSION}\nid {:032x}\n", self.store_id);
        let sum = crc32c::crc32c(body.as_bytes());
        format!("{body}crc {sum:08x}\n")
    }

    fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        let bad = |detail: &str| Problem::Bad(detail.to_owned());
        let text = std::str::from_utf8(bytes).map_err(|_| bad("it is not text"))?;
        let mut lines = text.lines();
        if lines.next() != Some(TITLE) {
            return Err(bad("its first line is not that of a store"));
        }
        let version =
            lines.next().and_then(|l| l.strip_prefix("version ")).and_then(|v| v.parse::<u32>().ok());
        match version {
            Some(FORMAT_VERSION) => {}
            // Checked before the rest: a later format may write the rest differently.
            Some(found) if found > FORMAT_VERSION => return Err(Problem::Newer(found)),
            _ => return Err(bad("its version line cannot be read")),
        }
        let store_id = lines
            .next()
            .and_then(|l| l.strip_prefix("id "))
            .and_then(|id| u128::from_str_radix(id, 16).ok())
            .ok_or_else(|| bad("its id line cannot be read"))?;
        let format = Self { store_id };
        if format.text() != text {
            return Err(bad("it is not as this version writes it"));
        }
        Ok(format)
    }
}

enum Problem {
    Newer(u32),
    Bad(String),
}

impl Problem {
    fn into_error(self, path: &Path) -> OpenError {
        match self {
            Self::Newer(found) => OpenError::NewerFormat { found, supported: FORMAT_VERSION },
            Self::Bad(detail) => OpenError::BadFormat { path: path.to_path_buf(), detail },
        }
    }
}
