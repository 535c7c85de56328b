//! Imports of the tool world.

use crate::Error;
use crate::bindings::tool::session_runtime::tool as imports;
use crate::tool::files::{Entry, Grant};

pub(crate) fn sleep_ms(duration: u64) -> Result<(), Error> {
    Ok(imports::clock::sleep_ms(duration)?)
}

pub(crate) fn progress(done: u64, total: u64, message: &str) {
    imports::progress::report(done, total, message);
}

pub(crate) fn files_grants() -> Vec<Grant> {
    let grants = imports::files::grants();
    grants.into_iter().map(|grant| Grant { name: grant.name, writable: grant.writable }).collect()
}

pub(crate) fn files_list(grant: &str, path: &str) -> Result<Vec<Entry>, Error> {
    let entries = imports::files::list_directory(grant, path)?;
    Ok(entries
        .into_iter()
        .map(|entry| Entry { name: entry.name, is_directory: entry.is_directory, size: entry.size })
        .collect())
}

pub(crate) fn files_read(grant: &str, path: &str, offset: u64, length: u32) -> Result<Vec<u8>, Error> {
    Ok(imports::files::read(grant, path, offset, length)?)
}
