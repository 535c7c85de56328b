//! What a running turn may do. Everything it does is in the journal before it returns; after a crash
//! the turn runs again and is told what it was told before, then goes on live.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tokio::sync::watch;

use super::event::SessionEvent;
use super::live::{Session, expires_ms};
use super::record::SegmentRecord;
use super::replay::Replay;
use super::spec::{Retention, Role, SegmentKind, SessionSpec, TurnRequest};
use super::tool::{Effect, ToolOutcome, ToolStart};
use super::view::{KvView, SegmentView};
use super::writing::Writing;
use crate::error::{Error, ErrorKind};
use crate::ids;
use crate::scheduler::RestReason;

/// Log lines an agent may write in one turn, and the longest.
const LOG_LINES: u32 = 256;
const LOG_BYTES: usize = 4096;

/// A segment's place in the history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentRange {
    /// Id.
    pub id: String,
    /// First token index.
    pub start: u64,
    /// One past the last token index.
    pub end: u64,
}

/// A running turn's hold on its session. There is at most one (I5).
pub struct TurnScope {
    pub(super) session: Arc<Session>,
    pub(super) turn: String,
    number: u32,
    spec: SessionSpec,
    request: TurnRequest,
    pub(super) replay: Replay,
    state: BTreeMap<String, String>,
    agent_started: bool,
    pub(super) writing: Option<Writing>,
    pub(super) written: Option<SegmentRange>,
    pub(super) cancel: watch::Receiver<bool>,
    /// The tool that runs.
    tool: String,
    log_lines: u32,
}

impl TurnScope {
    /// The scope of a turn that is on record as running.
    pub(super) fn new(session: Arc<Session>, turn: &str, cancel: watch::Receiver<bool>) -> Option<Self> {
        let record = session.record();
        let found = record.turn(turn)?;
        let scope = Self {
            turn: found.id.clone(),
            number: found.number,
            spec: record.spec.clone(),
            request: found.request.clone(),
            replay: Replay::new(&found.id, found.calls.iter().cloned().collect()),
            state: found.state_before.clone(),
            agent_started: found.agent_started_before,
            writing: None,
            written: None,
            cancel,
            tool: String::new(),
            log_lines: 0,
            session: Arc::clone(&session),
        };
        drop(record);
        Some(scope)
    }

    /// The session's id.
    pub fn session_id(&self) -> &str {
        &self.session.id
    }

    /// The turn's id.
    pub fn turn_id(&self) -> &str {
        &self.turn
    }

    /// The turn's number, from 1.
    pub fn turn_number(&self) -> u32 {
        self.number
    }

    /// The session as created.
    pub fn spec(&self) -> &SessionSpec {
        &self.spec
    }

    /// The turn as asked.
    pub fn request(&self) -> &TurnRequest {
        &self.request
    }

    /// Most tokens one message may have when the driver does not say.
    pub fn max_tokens(&self) -> u32 {
        self.request.max_tokens.unwrap_or(self.session.host.limits.default_max_tokens)
    }

    /// Whether the history is empty and nothing is left to replay into it.
    pub fn is_new(&self) -> bool {
        self.replay.next_start().map_or_else(|| self.session.record().tokens.is_empty(), |start| start == 0)
    }

    /// Whether someone asked the turn to stop.
    pub fn is_cancelled(&self) -> bool {
        *self.cancel.borrow()
    }

    /// Resolves when someone asks the turn to stop.
    pub async fn cancelled(&self) {
        let mut cancel = self.cancel.clone();
        // The sender lives as long as the turn; without it nobody can cancel any more.
        if cancel.wait_for(|cancelled| *cancelled).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Whether the agent's `start` had run when this turn began.
    pub fn agent_started(&self) -> bool {
        self.agent_started
    }

    /// Records that the agent's `start` ended well.
    ///
    /// # Errors
    /// The store (also for every method below).
    pub async fn mark_agent_started(&mut self) -> Result<(), Error> {
        self.agent_started = true;
        if self.session.record().agent_started {
            return Ok(());
        }
        self.session.write(SessionEvent::AgentStarted { turn: self.turn.clone() }).await?;
        Ok(())
    }

    /// Puts a refusal on record, so that a replay of the turn is refused alike. What ends the turn is not
    /// put there.
    pub(super) async fn keep_refusal<T>(
        &mut self,
        call: u64,
        name: &str,
        outcome: Result<T, Error>,
    ) -> Result<T, Error> {
        if let Err(error) = &outcome
            && !matches!(error.kind, ErrorKind::Internal | ErrorKind::Unavailable)
        {
            let event = SessionEvent::CallRefused {
                call,
                turn: self.turn.clone(),
                name: name.to_owned(),
                error: Box::new(error.clone()),
            };
            self.session.write(event).await?;
        }
        outcome
    }

    /// Appends a whole message.
    ///
    /// # Errors
    /// `context_length_exceeded`, `message_too_large`, `generation_in_progress`, or the store.
    pub async fn append(
        &mut self,
        role: Role,
        kind: SegmentKind,
        retention: Retention,
        text: &str,
    ) -> Result<SegmentRange, Error> {
        self.refuse_while_writing()?;
        let call = self.replay.begin_call();
        if let Some(recorded) = self.replay.take(call, "append")? {
            return match recorded {
                SessionEvent::SegmentAppended { segment, role: r, text: t, start, ids, .. }
                    if r == role && t == text =>
                {
                    Ok(SegmentRange { id: segment, start, end: start + ids.len() as u64 })
                }
                _ => Err(self.replay.diverged("append")),
            };
        }
        let placed = Placed { call: Some(call), turn: Some(self.turn.clone()), role, kind, retention };
        let appended = append_message(&self.session, placed, text).await;
        self.keep_refusal(call, "append", appended).await
    }

    pub(super) fn refuse_while_writing(&self) -> Result<(), Error> {
        if self.writing.is_none() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Conflict,
            "generation_in_progress",
            "the model is writing a message: read it to its end first",
        ))
    }

    /// Runs `live` and records its result, or gives the recorded one.
    ///
    /// # Errors
    /// What `live` fails with, `replay_divergence`, or the store.
    pub async fn record<F>(&mut self, name: &str, args: &Value, live: F) -> Result<Value, Error>
    where
        F: AsyncFnOnce() -> Result<Value, Error>,
    {
        let call = self.replay.begin_call();
        let args_digest = blake3::hash(args.to_string().as_bytes()).to_hex()[..16].to_owned();
        if let Some(recorded) = self.replay.take(call, name)? {
            return match recorded {
                SessionEvent::HostCall { name: n, args_digest: digest, result, .. }
                    if n == name && digest == args_digest =>
                {
                    Ok(result)
                }
                _ => Err(self.replay.diverged(name)),
            };
        }
        let outcome = live().await;
        let result = self.keep_refusal(call, name, outcome).await?;
        let event = SessionEvent::HostCall {
            call,
            turn: self.turn.clone(),
            name: name.to_owned(),
            args_digest,
            result: result.clone(),
        };
        self.session.write(event).await?;
        Ok(result)
    }

    /// Records the intent to call a tool and lets the KV rest while it runs, for as long as the tool declares.
    ///
    /// # Errors
    /// `outcome_unknown` when a tool with effects was interrupted, or the store.
    pub async fn begin_tool(
        &mut self,
        tool: &str,
        input: &str,
        effect: Effect,
        declared_ms: Option<u64>,
    ) -> Result<ToolStart, Error> {
        self.refuse_while_writing()?;
        let call = self.replay.begin_call();
        tool.clone_into(&mut self.tool);
        let reason = RestReason::ToolCall { tool: tool.into(), declared_ms };
        self.session.host.scheduler.rest(&self.session.id, reason)?;
        if let Some(recorded) = self.replay.take(call, "call a tool")? {
            return match recorded {
                SessionEvent::ToolStarted { call_id, tool: t, input: i, effect, .. }
                    if t == tool && i == input =>
                {
                    self.resume_tool(call_id, tool, effect)
                }
                _ => Err(self.replay.diverged("call this tool")),
            };
        }
        let call_id = ids::fresh("call");
        let event = SessionEvent::ToolStarted {
            call,
            turn: self.turn.clone(),
            call_id: call_id.clone(),
            tool: tool.to_owned(),
            input: input.to_owned(),
            effect,
        };
        self.session.write(event).await?;
        Ok(ToolStart::Run { call_id, again: false })
    }

    fn resume_tool(&mut self, call_id: String, tool: &str, effect: Effect) -> Result<ToolStart, Error> {
        if self.replay.is_over() && effect.may_run_again() {
            return Ok(ToolStart::Run { call_id, again: true });
        }
        let call = self.replay.begin_call();
        match self.replay.take(call, "wait for a tool")? {
            Some(SessionEvent::ToolFinished { ok, text, error, .. }) => {
                Ok(ToolStart::Recorded(match (ok, error) {
                    (false, Some(failure)) => Err(failure),
                    _ => Ok(text.unwrap_or_default()),
                }))
            }
            Some(_) => Err(self.replay.diverged("wait for a tool")),
            None => Err(Error::new(
                ErrorKind::Conflict,
                "outcome_unknown",
                format!(
                    "tool '{tool}' (call {call_id}) was interrupted and may or may not have had its effect: check, \
                     then start a new turn"
                ),
            )),
        }
    }

    /// Tells how far a tool is. Callers limit the rate.
    pub async fn tool_progress(&mut self, call_id: &str, done: u64, total: u64, message: &str) {
        let event = SessionEvent::ToolProgress {
            turn: self.turn.clone(),
            call_id: call_id.to_owned(),
            done,
            total,
            message: capped(message, LOG_BYTES),
        };
        if let Err(error) = self.session.write(event).await {
            tracing::warn!(session = %self.session.id, %error, "progress not journaled");
        }
    }

    /// Records how a tool ended.
    ///
    /// # Errors
    /// The store.
    pub async fn finish_tool(&mut self, call_id: &str, outcome: ToolOutcome) -> Result<(), Error> {
        let call = self.replay.begin_call();
        let (ok, text, error) = match outcome {
            Ok(text) => (true, Some(text), None),
            Err(failure) => (false, None, Some(failure)),
        };
        let event = SessionEvent::ToolFinished {
            call,
            turn: self.turn.clone(),
            call_id: call_id.to_owned(),
            tool: std::mem::take(&mut self.tool),
            ok,
            text,
            error,
        };
        self.session.write(event).await?;
        Ok(())
    }

    /// A value of the agent's state.
    pub fn state_get(&self, key: &str) -> Option<String> {
        self.state.get(key).cloned()
    }

    /// Sets a value of the agent's state.
    ///
    /// # Errors
    /// `state_limit`, or the store.
    pub async fn state_set(&mut self, key: &str, value: &str) -> Result<(), Error> {
        let limits = &self.session.host.limits;
        let new = !self.state.contains_key(key);
        if value.len() > limits.state_value_bytes
            || key.len() > 256
            || (new && self.state.len() >= limits.state_keys)
        {
            return Err(Error::new(
                ErrorKind::Limit,
                "state_limit",
                format!(
                    "state holds {} keys of up to 256 bytes with values of up to {} bytes",
                    limits.state_keys, limits.state_value_bytes
                ),
            ));
        }
        self.state.insert(key.to_owned(), value.to_owned());
        self.write_state(key, Some(value)).await
    }

    /// Removes a value of the agent's state.
    ///
    /// # Errors
    /// The store.
    pub async fn state_delete(&mut self, key: &str) -> Result<(), Error> {
        self.state.remove(key);
        self.write_state(key, None).await
    }

    async fn write_state(&mut self, key: &str, value: Option<&str>) -> Result<(), Error> {
        let call = self.replay.begin_call();
        let value = value.map(str::to_owned);
        if let Some(recorded) = self.replay.take(call, "change the state")? {
            return match recorded {
                SessionEvent::StateSet { key: k, value: v, .. } if k == key && v == value => Ok(()),
                _ => Err(self.replay.diverged("change the state")),
            };
        }
        let event = SessionEvent::StateSet { call, turn: self.turn.clone(), key: key.to_owned(), value };
        self.session.write(event).await?;
        Ok(())
    }

    /// Where the session's KV is.
    ///
    /// # Errors
    /// The scheduler has stopped.
    pub async fn kv(&self) -> Result<KvView, Error> {
        self.session.host.scheduler.view(&self.session.id).await
    }

    /// Most tokens of the session.
    pub fn context_length(&self) -> u64 {
        self.session.host.context_length as u64
    }

    /// The session's segments.
    pub fn segments(&self) -> Vec<SegmentView> {
        self.session.record().segments.iter().map(segment_view).collect()
    }

    /// Keeps a segment differently from now on.
    ///
    /// # Errors
    /// `segment_not_found`, or the store.
    pub async fn set_retention(&mut self, segment: &str, retention: Retention) -> Result<(), Error> {
        let call = self.replay.begin_call();
        let doing = "change a segment's retention";
        if let Some(recorded) = self.replay.take(call, doing)? {
            return match recorded {
                SessionEvent::SegmentRetention { segment: s, retention: r, .. }
                    if s == segment && r == retention =>
                {
                    Ok(())
                }
                _ => Err(self.replay.diverged(doing)),
            };
        }
        if self.session.record().segment(segment).is_none() {
            let missing = Error::not_found("segment_not_found", format!("there is no segment '{segment}'"));
            return self.keep_refusal(call, doing, Err(missing)).await;
        }
        let event = SessionEvent::SegmentRetention {
            call,
            turn: self.turn.clone(),
            segment: segment.to_owned(),
            retention,
        };
        self.session.write(event).await?;
        Ok(())
    }

    /// Writes a line to the operator's log and the journal; lines over the limit are dropped.
    pub async fn log(&mut self, level: &str, message: &str) {
        self.log_lines += 1;
        if self.log_lines > LOG_LINES || !self.replay.is_over() {
            return;
        }
        let message = capped(message, LOG_BYTES);
        tracing::info!(session = %self.session.id, level, message, "agent");
        let event = SessionEvent::AgentLog { turn: self.turn.clone(), level: level.to_owned(), message };
        if let Err(error) = self.session.write(event).await {
            tracing::warn!(session = %self.session.id, %error, "log line not journaled");
        }
    }
}

/// Where an appended message belongs.
pub(super) struct Placed {
    pub call: Option<u64>,
    pub turn: Option<String>,
    pub role: Role,
    pub kind: SegmentKind,
    pub retention: Retention,
}

/// Journals a whole message, then tells the scheduler.
pub(super) async fn append_message(
    session: &Arc<Session>,
    placed: Placed,
    text: &str,
) -> Result<SegmentRange, Error> {
    let start = session.record().tokens.len();
    let ids = session.host.encode_message(placed.role, text, start == 0)?;
    session.host.check_context(start + ids.len())?;
    let id = ids::fresh("seg");
    let event = SessionEvent::SegmentAppended {
        call: placed.call,
        turn: placed.turn,
        segment: id.clone(),
        role: placed.role,
        kind: placed.kind,
        retention: placed.retention,
        start: start as u64,
        ids: ids.clone(),
        text: text.to_owned(),
    };
    session.write(event).await?;
    let end = start + ids.len();
    session.host.scheduler.append(&session.id, ids)?;
    Ok(SegmentRange { id, start: start as u64, end: end as u64 })
}

/// A segment as clients see it.
pub(super) fn segment_view(segment: &SegmentRecord) -> SegmentView {
    SegmentView {
        id: segment.id.clone(),
        kind: segment.kind,
        start: segment.start,
        end: segment.end,
        retention: segment.retention,
        expires_ms: expires_ms(segment),
        text: segment.text.clone(),
    }
}

/// At most `limit` bytes of a text, cut between characters.
fn capped(text: &str, limit: usize) -> String {
    let end = (0..=limit.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text[..end].to_owned()
}
