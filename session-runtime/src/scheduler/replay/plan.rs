//! What sessions did, apart from when the scheduler let them: each act with the time after the one before it, or after the
//! message before it had ended. On other policies or budgets the messages take other times and the pauses between them the
//! same.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::scheduler::trace::{Cause, Record, SessionNumber, Taken};

/// One act of a session.
#[derive(Clone)]
pub(super) struct Act {
    /// Since the act or message before it; of a session's first one, since the trace began or since its fork.
    pub after: Duration,
    /// What it is.
    pub cause: Cause,
    /// The tokens of the message that it begins.
    pub tokens: Vec<Taken>,
}

/// A session's acts.
#[derive(Clone, Default)]
pub(super) struct Acts {
    /// The session it is a fork of, which begins it.
    pub forked_from: Option<SessionNumber>,
    /// In order.
    pub acts: VecDeque<Act>,
}

/// What every session did, by number.
#[derive(Clone, Default)]
pub(super) struct Plan {
    pub sessions: Vec<Acts>,
    /// When each last acted or got a token.
    last: HashMap<SessionNumber, Duration>,
}

impl Plan {
    /// Learns from a record that began at a time since the trace began, and ended at another.
    pub(super) fn learn(&mut self, record: Record, began: Duration, ended: Duration) {
        for (session, taken) in record.told.tokens {
            self.last.insert(session, ended);
            let acts = self.sessions.get_mut(session as usize).map(|session| &mut session.acts);
            let message = acts.and_then(|acts| acts.iter_mut().rfind(|act| is_message(&act.cause)));
            if let Some(message) = message {
                message.tokens.push(taken);
            }
        }
        let number = self.sessions.len() as SessionNumber;
        let session = match &record.cause {
            Cause::Open { .. } => {
                self.sessions.push(Acts::default());
                number
            }
            Cause::Fork { source, .. } => {
                self.sessions.push(Acts { forked_from: Some(*source), ..Acts::default() });
                self.last.insert(number, ended);
                *source
            }
            Cause::Append { session, .. }
            | Cause::Generate { session, .. }
            | Cause::Rest { session, .. }
            | Cause::Evict { session }
            | Cause::Restore { session, .. }
            | Cause::Cut { session, .. }
            | Cause::Close { session } => *session,
            // A message that was cancelled has the tokens that it had.
            Cause::Cancel { .. } | Cause::Turn | Cause::Saved { .. } | Cause::Loaded { .. } | Cause::Stop => {
                return;
            }
        };
        let after = began.saturating_sub(self.last.get(&session).copied().unwrap_or_default());
        self.last.insert(session, ended);
        if let Some(acts) = self.sessions.get_mut(session as usize) {
            acts.acts.push_back(Act { after, cause: record.cause, tokens: Vec::new() });
        }
    }
}

fn is_message(cause: &Cause) -> bool {
    matches!(cause, Cause::Generate { .. })
}
