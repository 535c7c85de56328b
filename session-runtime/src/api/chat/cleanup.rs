//! The end of a session that lives for one request. It goes when its answer was sent; when the client
//! leaves earlier nobody could ever read the answer, so its turn is cancelled too.

use crate::runtime::Runtime;

/// Ends an ephemeral session when dropped; does nothing for a named one.
pub(super) struct Guard {
    runtime: Runtime,
    session: String,
    turn: String,
    ephemeral: bool,
    finished: bool,
}

impl Guard {
    pub(super) fn new(runtime: Runtime, session: String, ephemeral: bool) -> Self {
        Self { runtime, session, turn: String::new(), ephemeral, finished: false }
    }

    /// From now on the turn `turn` is cancelled too.
    pub(super) fn started(&mut self, turn: &str) {
        turn.clone_into(&mut self.turn);
    }

    /// The turn has ended by itself.
    pub(super) fn finished(&mut self) {
        self.finished = true;
    }

    pub(super) fn session(&self) -> &str {
        &self.session
    }

    pub(super) fn turn(&self) -> &str {
        &self.turn
    }

    pub(super) fn is_ephemeral(&self) -> bool {
        self.ephemeral
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.ephemeral {
            return;
        }
        let Ok(handle) = tokio::runtime::Handle::try_current() else { return };
        let (runtime, session, turn) = (self.runtime.clone(), self.session.clone(), self.turn.clone());
        let running = !self.finished && !turn.is_empty();
        handle.spawn(async move {
            if running && runtime.cancel_turn(&session, &turn).await.is_ok() {
                // Whatever its end: after it the session can go.
                let _ = runtime.wait_turn(&session, &turn).await;
            }
            if let Err(error) = runtime.delete_session(&session).await {
                tracing::debug!(%session, %error, "an ephemeral session was not deleted");
            }
        });
    }
}
