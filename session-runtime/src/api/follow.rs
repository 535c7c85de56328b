//! Following a session's log: every durable event from a place on, each once, in order, then those to
//! come. The stream ends with the turn it follows, with the session, or when the server stops.

use std::collections::VecDeque;

use futures::Stream;

use super::context::App;
use super::problem::Problem;
use crate::session::view::Event;

/// Events read from the log at once.
const READ_AHEAD: usize = 256;

struct Follower {
    app: App,
    session: String,
    /// Last sequence number handed out or skipped.
    after: u64,
    /// Only this turn's events, up to its end.
    turn: Option<String>,
    ready: VecDeque<Event>,
    ended: bool,
}

/// The events of `session` with a sequence number above `after`; with `turn`, without those of other
/// turns and ending with that turn's `turn.finished`.
pub(super) fn follow(
    app: App,
    session: String,
    after: u64,
    turn: Option<String>,
) -> impl Stream<Item = Result<Event, Problem>> + Send + 'static {
    let start = Follower { app, session, after, turn, ready: VecDeque::new(), ended: false };
    futures::stream::unfold(start, |mut follower| async move {
        let item = follower.next().await?;
        Some((item, follower))
    })
}

impl Follower {
    async fn next(&mut self) -> Option<Result<Event, Problem>> {
        while !self.ended {
            if let Some(event) = self.ready.pop_front() {
                self.after = event.seq;
                if !self.concerns(&event) {
                    continue;
                }
                self.ended = self.is_last(&event);
                return Some(Ok(event));
            }
            if let Err(problem) = self.refill().await {
                self.ended = true;
                return Some(Err(problem));
            }
        }
        None
    }

    /// Reads what is there, or waits for more.
    async fn refill(&mut self) -> Result<(), Problem> {
        let runtime = &self.app.runtime;
        let events = runtime.events(&self.session, self.after, READ_AHEAD).await?;
        if events.is_empty() {
            tokio::select! {
                more = runtime.wait_events(&self.session, self.after) => more?,
                () = self.app.drained() => return Err(Problem::draining()),
            }
        }
        self.ready.extend(events);
        Ok(())
    }

    fn concerns(&self, event: &Event) -> bool {
        match (&self.turn, turn_of(event)) {
            (Some(followed), Some(turn)) => followed == turn,
            _ => true,
        }
    }

    fn is_last(&self, event: &Event) -> bool {
        match event.kind.as_str() {
            "session.deleted" => true,
            "turn.finished" => self.turn.is_some() && self.turn.as_deref() == turn_of(event),
            _ => false,
        }
    }
}

/// The turn an event belongs to.
pub(super) fn turn_of(event: &Event) -> Option<&str> {
    event.data.get("turn").and_then(serde_json::Value::as_str)
}
