//! The errors of opening and closing a store. Each part's own errors are with the part.

use std::io;
use std::path::{Path, PathBuf};

use crate::failpoint::FailpointError;
use crate::journal::JournalError;
use crate::meta::MetaError;

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process, or another part of this one, has it open.
    #[error("{}", in_use(dir, *pid, address.as_deref()))]
    InUse {
        /// The data directory.
        dir: PathBuf,
        /// The holder's process id, if it could be read.
        pid: Option<u32>,
        /// Where the holder answers, if it said so.
        address: Option<String>,
    },
    /// A later version of the program wrote it.
    #[error(
        "the data directory has format {found}, this build reads up to {supported}: use the newer build that wrote it"
    )]
    NewerFormat {
        /// The version found.
        found: u32,
        /// The version this build reads.
        supported: u32,
    },
    /// The directory is not a store, or its format file is damaged.
    #[error("{} cannot be used: {detail}", path.display())]
    BadFormat {
        /// The format file.
        path: PathBuf,
        /// What is wrong and what to do.
        detail: String,
    },
    /// An option cannot be used.
    #[error("store option {name}: {detail}")]
    Option {
        /// The option.
        name: &'static str,
        /// What is wrong and what to do.
        detail: String,
    },
    /// The operating system refused something.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// The metadata index could not be opened, nor rebuilt.
    #[error("cannot open the metadata index: {0}")]
    Meta(#[from] MetaError),
    /// The journal could not be recovered.
    #[error("cannot recover the journal: {0}")]
    Journal(#[from] JournalError),
    /// The environment arms a fail point that does not exist.
    #[error(transparent)]
    Failpoint(#[from] FailpointError),
}

impl OpenError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }
}

fn in_use(dir: &Path, pid: Option<u32>, address: Option<&str>) -> String {
    let who = pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
    let at = address.map_or_else(String::new, |a| format!(", which answers at {a}"));
    format!(
        "the data directory {} is in use by {who}{at}: talk to it there, stop it, or choose another directory",
        dir.display()
    )
}

/// Why a store could not be closed cleanly. What was acknowledged is safe either way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It had been poisoned before.
    #[error("the store was poisoned: {0}")]
    Poisoned(String),
    /// The last groups could not be written.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The last checkpoint failed.
    #[error("the last checkpoint failed: {0}")]
    Checkpoint(String),
}
