//! The record of a turn that runs again: what it was told before, given back call by call.

use std::collections::VecDeque;

use super::event::SessionEvent;
use crate::error::{Error, ErrorKind};

/// What is left of a turn's record, and how far its calls have come. Calls are numbered from 1; the ones
/// that are on record carry their number, so that nothing is ever given to another call.
pub(super) struct Replay {
    turn: String,
    events: VecDeque<SessionEvent>,
    calls: u64,
}

impl Replay {
    pub(super) fn new(turn: &str, events: VecDeque<SessionEvent>) -> Self {
        Self { turn: turn.to_owned(), events, calls: 0 }
    }

    /// Whether the turn has got past its record: what it does from here on is new.
    pub(super) fn is_over(&self) -> bool {
        self.events.is_empty()
    }

    /// The number of the call that begins.
    pub(super) fn begin_call(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }

    /// Where the next message on record begins in the history.
    pub(super) fn next_start(&self) -> Option<u64> {
        self.events.iter().find_map(|event| match event {
            SessionEvent::SegmentAppended { start, .. } | SessionEvent::GenerationStarted { start, .. } => {
                Some(*start)
            }
            _ => None,
        })
    }

    /// What is on record of call `call`; nothing when the record is over. A call that was refused is
    /// refused again, whatever has changed since.
    ///
    /// # Errors
    /// The recorded refusal, or `replay_divergence`.
    pub(super) fn take(&mut self, call: u64, doing: &str) -> Result<Option<SessionEvent>, Error> {
        match self.events.pop_front() {
            None => Ok(None),
            Some(SessionEvent::CallRefused { call: recorded, name, error, .. })
                if recorded == call && name == doing =>
            {
                Err(*error)
            }
            Some(SessionEvent::CallRefused { .. }) => Err(self.diverged(doing)),
            Some(event) if event.call() == Some(call) => Ok(Some(event)),
            Some(_) => Err(self.diverged(doing)),
        }
    }

    /// The next event, if it tells how message `segment` went on.
    pub(super) fn take_of_message(&mut self, segment: &str) -> Option<SessionEvent> {
        let event = self.events.pop_front_if(|event| match event {
            SessionEvent::GenerationTokens { segment: of, .. }
            | SessionEvent::GenerationFinished { segment: of, .. } => of == segment,
            _ => false,
        })?;
        self.calls = event.call().unwrap_or(self.calls);
        Some(event)
    }

    /// Whether the next event is the end of message `segment`.
    pub(super) fn ends_message(&self, segment: &str) -> bool {
        matches!(self.events.front(), Some(SessionEvent::GenerationFinished { segment: of, .. }) if of == segment)
    }

    /// Gives up the record: its events so far unused.
    pub(super) fn give_up(&mut self) -> VecDeque<SessionEvent> {
        let events = std::mem::take(&mut self.events);
        self.calls = events.iter().filter_map(SessionEvent::call).fold(self.calls, u64::max);
        events
    }

    /// The error of a turn that does other things on replay than it did.
    pub(super) fn diverged(&self, doing: &str) -> Error {
        Error::new(
            ErrorKind::Conflict,
            "replay_divergence",
            format!(
                "turn {} did something else before the interruption than {doing} (call {}): the agent is not \
                 deterministic or was changed; start a new turn",
                self.turn, self.calls
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(call: u64, name: &str) -> SessionEvent {
        let error = Error::not_found("segment_not_found", "there is no segment 'x'");
        SessionEvent::CallRefused { call, turn: "t".into(), name: name.into(), error: Box::new(error) }
    }

    fn state(call: u64) -> SessionEvent {
        SessionEvent::StateSet { call, turn: "t".into(), key: "k".into(), value: None }
    }

    #[test]
    fn each_call_gets_its_own_event_and_a_refusal_again() {
        let mut replay = Replay::new("t", [state(1), refused(2, "append"), state(3)].into());
        for call in 1..=4 {
            assert_eq!(replay.begin_call(), call);
            match replay.take(call, "append") {
                Ok(Some(event)) => assert_eq!(event.call(), Some(call)),
                Ok(None) => assert_eq!(call, 4, "past the record"),
                Err(error) => assert_eq!((call, &*error.code), (2, "segment_not_found")),
            }
        }
    }

    #[test]
    fn an_event_of_another_call_is_a_divergence() {
        for (event, call) in
            [(state(2), 1), (state(1), 2), (refused(2, "append"), 1), (refused(1, "other"), 1)]
        {
            let error = Replay::new("t", [event].into()).take(call, "append").unwrap_err();
            assert_eq!(error.code, "replay_divergence");
        }
    }

    #[test]
    fn a_refusal_is_read_back_as_it_was_written() {
        let (kind, payload) = refused(7, "append").encode().unwrap();
        assert_eq!(kind, "call.refused");
        let Ok(SessionEvent::CallRefused { call: 7, error, .. }) = SessionEvent::decode(&kind, &payload)
        else {
            panic!("another event");
        };
        assert_eq!(*error, Error::not_found("segment_not_found", "there is no segment 'x'"));
    }
}
