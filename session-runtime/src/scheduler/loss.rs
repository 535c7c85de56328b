//! A device that stops working in the middle of something: its KV is gone, the tokens are not. Nothing runs on it again in
//! this process, and everyone who would need it is told so.

use std::sync::Arc;

use kernels::backend::Backend;

use super::worker::Worker;
use crate::error::{DEVICE_LOST, Error};
use crate::kv::state::KvEvent;

impl<B: Backend> Worker<B> {
    /// Looks at what a piece of work failed with.
    pub(super) fn notice_loss(&self, error: &Error) {
        if error.code == DEVICE_LOST && self.lost.set(error.clone()).is_ok() {
            tracing::error!(%error, "the device is lost");
        }
    }

    /// Why nothing runs on the device any more, if it is lost.
    pub(super) fn loss(&self) -> Option<Error> {
        self.lost.get().cloned()
    }

    /// Where the device is lost, ends every job, and lets go of every page: no copy of what they held can be taken any more.
    pub(super) fn settle_loss(&mut self) {
        let Some(error) = self.loss() else { return };
        while let Some(last) = self.jobs.len().checked_sub(1) {
            self.fail_job(last, error.clone());
        }
        let holding = self.sequences.values().filter(|sequence| !sequence.table.is_empty());
        let holding: Vec<Arc<str>> = holding.map(|sequence| Arc::clone(&sequence.id)).collect();
        for session in holding {
            let Some(sequence) = self.sequences.get_mut(&session) else { continue };
            sequence.known = sequence.known.max(sequence.computed);
            sequence.computed = 0;
            sequence.table.truncate(&mut self.pool, 0);
            if sequence.state.is_resident() {
                let event = if sequence.saved_tokens() > 0 { KvEvent::Evict } else { KvEvent::Drop };
                self.change(&session, event, DEVICE_LOST, 0, 0.0);
            }
        }
    }
}
