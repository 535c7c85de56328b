//! Facts of the session and the turn.

use crate::sys;

/// The session's id.
pub fn id() -> String {
    sys::session_id()
}

/// The session's parameters, a JSON object as text.
pub fn params() -> String {
    sys::session_params()
}

/// Number of this turn, from 1.
pub fn turn() -> u32 {
    sys::session_turn()
}

/// Whether someone asked this turn to stop.
pub fn cancelled() -> bool {
    sys::session_cancelled()
}
