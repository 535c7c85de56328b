//! Named points at which a test, or an environment variable, can make the store fail, stop or wait.
//!
//! Compiled always; a disarmed registry costs one relaxed load per point. This file is the list of names.
//! Each store has its own registry, so stores in one process do not disturb each other.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::sync::lock;

/// The environment variable read by [`Failpoints::from_env`].
pub const FAILPOINTS_ENV: &str = "SESSION_STORE_FAILPOINTS";

macro_rules! names {
    ($($(#[$doc:meta])* $konst:ident = $name:literal;)*) => {
        /// The names, one constant a point.
        pub mod point {
            $($(#[$doc])* pub const $konst: &str = $name;)*
        }
        /// Every name a point can be armed by.
        pub const ALL_POINTS: &[&str] = &[$($name),*];
    };
}

names! {
    /// Before the metadata index is opened.
    OPEN_BEFORE_META = "open.before_meta";
    /// Before a doubtful metadata directory is renamed.
    OPEN_BEFORE_QUARANTINE = "open.before_quarantine";
    /// After the rename, before the rebuild.
    OPEN_AFTER_QUARANTINE = "open.after_quarantine";
    /// Before the metadata log and the journal are replayed.
    OPEN_BEFORE_REPLAY = "open.before_replay";
    /// After both were replayed.
    OPEN_AFTER_REPLAY = "open.after_replay";
    /// After a record got its number and was queued, before its writer has the receipt: it only waits here, or stops.
    JOURNAL_AFTER_APPEND = "journal.after_append";
    /// Before a group is written to the journal file.
    JOURNAL_BEFORE_WRITE = "journal.before_write";
    /// Between the write and the fsync of a group.
    JOURNAL_BEFORE_FSYNC = "journal.before_fsync";
    /// After the fsync, before the index knows.
    JOURNAL_AFTER_FSYNC = "journal.after_fsync";
    /// Before the index batch of a group.
    JOURNAL_BEFORE_INDEX = "journal.before_index";
    /// After the index batch, before tickets are completed.
    JOURNAL_AFTER_INDEX = "journal.after_index";
    /// Before a new journal file is created.
    JOURNAL_BEFORE_ROTATE = "journal.before_rotate";
    /// After a new journal file and its directory entry are durable.
    JOURNAL_AFTER_ROTATE = "journal.after_rotate";
    /// Before a dead journal file is removed.
    JOURNAL_BEFORE_DELETE = "journal.before_delete";
    /// Before a group is written to the metadata log.
    METALOG_BEFORE_WRITE = "metalog.before_write";
    /// Between the write and the fsync of the metadata log.
    METALOG_BEFORE_FSYNC = "metalog.before_fsync";
    /// After the fsync of the metadata log.
    METALOG_AFTER_FSYNC = "metalog.after_fsync";
    /// Before a new metadata log file is started with an export.
    METALOG_BEFORE_EXPORT = "metalog.before_export";
    /// After the export is durable, before the older file is removed.
    METALOG_AFTER_EXPORT = "metalog.after_export";
    /// Before the index is flushed by a checkpoint.
    CHECKPOINT_BEFORE_FLUSH = "checkpoint.before_flush";
    /// After the flush, before the watermark is written.
    CHECKPOINT_BEFORE_WATERMARK = "checkpoint.before_watermark";
    /// After the watermark is durable.
    CHECKPOINT_AFTER_WATERMARK = "checkpoint.after_watermark";
    /// Before cells are written to a pack.
    PACKS_BEFORE_WRITE = "packs.before_write";
    /// Between the write and the fsync of cells.
    PACKS_BEFORE_FSYNC = "packs.before_fsync";
    /// After the fsync, before cells are indexed.
    PACKS_BEFORE_INDEX = "packs.before_index";
    /// After cells are indexed.
    PACKS_AFTER_INDEX = "packs.after_index";
    /// After cells left the index, before their bytes are reclaimed.
    PACKS_BEFORE_RECLAIM = "packs.before_reclaim";
    /// Before cells of a mostly dead pack are written anew.
    PACKS_BEFORE_COMPACT = "packs.before_compact";
    /// After they are indexed where they are now, before their old places are wiped.
    PACKS_BEFORE_WIPE = "packs.before_wipe";
    /// Before a pack is moved to the quarantine folder.
    PACKS_BEFORE_QUARANTINE = "packs.before_quarantine";
}

/// What an armed point does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailAction {
    /// The operation fails as if the disk had.
    Error,
    /// The process ends at once, with no clean-up.
    Abort,
    /// The thread sleeps.
    Sleep(Duration),
}

/// An action and how many hits pass before it acts. It acts on every hit after those.
#[derive(Debug, Clone, Copy)]
struct Armed {
    action: FailAction,
    pass: u64,
    hits: u64,
}

/// A registry of armed points. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct Failpoints {
    any: Arc<AtomicBool>,
    armed: Arc<Mutex<HashMap<&'static str, Armed>>>,
}

/// Why a point could not be armed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FailpointError {
    /// No such point.
    #[error("there is no fail point named {0:?}: the names are in store/src/failpoint.rs")]
    Unknown(String),
    /// The text is not `name=action`.
    #[error("cannot read {0:?}: write name=error, name=abort or name=sleep:MS, with @N to let N hits pass")]
    Syntax(String),
}

impl Failpoints {
    /// A registry with the points that `SESSION_STORE_FAILPOINTS` arms, for example
    /// `journal.before_fsync=abort@3;checkpoint.before_flush=sleep:50`.
    ///
    /// # Errors
    /// An unknown name or unreadable text.
    pub fn from_env() -> Result<Self, FailpointError> {
        let points = Self::default();
        if let Ok(text) = std::env::var(FAILPOINTS_ENV) {
            points.arm_text(&text)?;
        }
        Ok(points)
    }

    /// Arms the points of a text in the form of [`Failpoints::from_env`].
    ///
    /// # Errors
    /// An unknown name or unreadable text.
    pub fn arm_text(&self, text: &str) -> Result<(), FailpointError> {
        for part in text.split(';').map(str::trim).filter(|p| !p.is_empty()) {
            let syntax = || FailpointError::Syntax(part.to_owned());
            let (name, rest) = part.split_once('=').ok_or_else(syntax)?;
            let (action, pass) = match rest.split_once('@') {
                Some((a, n)) => (a, n.parse().map_err(|_| syntax())?),
                None => (rest, 0),
            };
            let action = match action.split_once(':') {
                None if action == "error" => FailAction::Error,
                None if action == "abort" => FailAction::Abort,
                Some(("sleep", ms)) => {
                    FailAction::Sleep(Duration::from_millis(ms.parse().map_err(|_| syntax())?))
                }
                _ => return Err(syntax()),
            };
            self.arm(name.trim(), action, pass)?;
        }
        Ok(())
    }

    /// Arms one point: `pass` hits go by, every later one acts.
    ///
    /// # Errors
    /// An unknown name.
    pub fn arm(&self, name: &str, action: FailAction, pass: u64) -> Result<(), FailpointError> {
        let name = ALL_POINTS
            .iter()
            .find(|known| **known == name)
            .ok_or_else(|| FailpointError::Unknown(name.to_owned()))?;
        lock(&self.armed).insert(name, Armed { action, pass, hits: 0 });
        self.any.store(true, Ordering::Release);
        Ok(())
    }

    /// Disarms every point.
    pub fn disarm_all(&self) {
        self.any.store(false, Ordering::Release);
        lock(&self.armed).clear();
    }

    /// How often an armed point was reached.
    pub fn hits(&self, name: &str) -> u64 {
        lock(&self.armed).get(name).map_or(0, |a| a.hits)
    }

    /// Called at the point. Errors only when armed to.
    pub(crate) fn hit(&self, name: &'static str) -> io::Result<()> {
        if !self.any.load(Ordering::Relaxed) {
            return Ok(());
        }
        let action = {
            let mut armed = lock(&self.armed);
            let Some(entry) = armed.get_mut(name) else { return Ok(()) };
            entry.hits += 1;
            if entry.hits <= entry.pass {
                return Ok(());
            }
            entry.action
        };
        match action {
            FailAction::Error => Err(io::Error::other(format!("fail point {name}"))),
            FailAction::Abort => std::process::abort(),
            FailAction::Sleep(time) => {
                std::thread::sleep(time);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arms_by_text_counts_and_refuses_unknown_names() {
        let points = Failpoints::default();
        points.arm_text("journal.before_fsync=error@1; open.before_meta=sleep:0").unwrap();
        assert!(points.hit(point::JOURNAL_BEFORE_FSYNC).is_ok());
        assert!(points.hit(point::JOURNAL_BEFORE_FSYNC).is_err());
        assert!(points.hit(point::OPEN_BEFORE_META).is_ok());
        assert!(points.hit(point::PACKS_BEFORE_WRITE).is_ok());
        assert_eq!(points.hits(point::JOURNAL_BEFORE_FSYNC), 2);
        assert_eq!(points.arm_text("nowhere=error"), Err(FailpointError::Unknown("nowhere".into())));
        assert!(matches!(points.arm_text("open.before_meta=explode"), Err(FailpointError::Syntax(_))));
        points.disarm_all();
        assert!(points.hit(point::JOURNAL_BEFORE_FSYNC).is_ok());
    }
}
