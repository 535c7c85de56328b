//! Files inside the directories the operator granted, named by their grant.

use crate::{Error, sys};

/// A directory the tool may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Name it is known by.
    pub name: String,
    /// Whether it may be written to.
    pub writable: bool,
}

/// One entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name within its directory.
    pub name: String,
    /// Whether it is a directory itself.
    pub is_directory: bool,
    /// Bytes, 0 for a directory.
    pub size: u64,
}

/// The directories this tool may use.
pub fn grants() -> Vec<Grant> {
    sys::files_grants()
}

/// Entries of a directory in name order; an empty `path` is the granted directory itself.
///
/// # Errors
/// [`crate::ErrorKind::NotFound`], [`crate::ErrorKind::Denied`] for a path that leaves the grant, and
/// [`crate::ErrorKind::Limit`] for a directory with too many entries.
pub fn list_directory(grant: &str, path: &str) -> Result<Vec<Entry>, Error> {
    sys::files_list(grant, path)
}

/// At most `length` bytes from `offset`; fewer at the end of the file, none after it.
///
/// # Errors
/// [`crate::ErrorKind::NotFound`], [`crate::ErrorKind::Denied`] for a path that leaves the grant, and
/// [`crate::ErrorKind::Limit`] for a `length` the host does not give at once.
pub fn read(grant: &str, path: &str, offset: u64, length: u32) -> Result<Vec<u8>, Error> {
    sys::files_read(grant, path, offset, length)
}
