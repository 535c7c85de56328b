//! The session's labelled token ranges and how long they are kept.

use super::chat::{Retention, SegmentKind};
use crate::{Error, sys};

/// One segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Its id.
    pub id: String,
    /// What it is.
    pub kind: SegmentKind,
    /// First token.
    pub start: u32,
    /// One past the last token.
    pub end: u32,
    /// How long it is kept.
    pub retention: Retention,
}

/// The segments in token order.
pub fn list() -> Vec<Info> {
    sys::segments_list()
}

/// Changes how long a segment is kept.
///
/// # Errors
/// [`crate::ErrorKind::NotFound`] when there is no such segment.
pub fn set_retention(id: &str, retention: Retention) -> Result<(), Error> {
    sys::segments_set_retention(id, retention)
}
