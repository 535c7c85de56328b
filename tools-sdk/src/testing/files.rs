//! Granted directories in memory.

use std::collections::{BTreeMap, BTreeSet};

use crate::tool::files::{Entry, Grant};
use crate::{Error, ErrorKind};

/// Files by grant and path.
#[derive(Default)]
pub(crate) struct Files {
    grants: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
}

impl Files {
    pub(crate) fn put(&mut self, grant: &str, path: &str, bytes: &[u8]) {
        self.grants.entry(grant.to_owned()).or_default().insert(path.to_owned(), bytes.to_vec());
    }

    pub(crate) fn grants(&self) -> Vec<Grant> {
        self.grants.keys().map(|name| Grant { name: name.clone(), writable: false }).collect()
    }

    pub(crate) fn list(&self, grant: &str, path: &str) -> Result<Vec<Entry>, Error> {
        let files = self.grant(grant)?;
        let path = normal(path)?;
        let prefix = if path.is_empty() { String::new() } else { format!("{path}/") };
        let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
        let mut directories = BTreeSet::new();
        for (name, bytes) in files {
            let Some(rest) = name.strip_prefix(&prefix) else { continue };
            match rest.split_once('/') {
                Some((directory, _)) => {
                    if directories.insert(directory) {
                        let entry = Entry { name: directory.to_owned(), is_directory: true, size: 0 };
                        entries.insert(directory.to_owned(), entry);
                    }
                }
                None => {
                    let size = bytes.len() as u64;
                    entries
                        .insert(rest.to_owned(), Entry { name: rest.to_owned(), is_directory: false, size });
                }
            }
        }
        if entries.is_empty() && !path.is_empty() {
            return Err(not_found(grant, &path));
        }
        Ok(entries.into_values().collect())
    }

    pub(crate) fn read(&self, grant: &str, path: &str, offset: u64, length: u32) -> Result<Vec<u8>, Error> {
        let path = normal(path)?;
        let bytes = self.grant(grant)?.get(&path).ok_or_else(|| not_found(grant, &path))?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let end = start.saturating_add(length as usize).min(bytes.len());
        Ok(bytes[start..end].to_vec())
    }

    fn grant(&self, grant: &str) -> Result<&BTreeMap<String, Vec<u8>>, Error> {
        self.grants.get(grant).ok_or_else(|| {
            Error::new(ErrorKind::Denied, "not_granted", format!("no directory is granted as {grant}"))
        })
    }
}

/// The path without empty and `.` parts; `..` is refused.
fn normal(path: &str) -> Result<String, Error> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") || path.starts_with('/') {
        return Err(Error::new(
            ErrorKind::Denied,
            "outside_grant",
            format!("{path} leaves the granted directory"),
        ));
    }
    Ok(parts.join("/"))
}

fn not_found(grant: &str, path: &str) -> Error {
    Error::not_found("no_such_file", format!("there is no {path} in {grant}"))
}
