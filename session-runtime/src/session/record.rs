//! A session as its events make it: the fold of the journal.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::event::SessionEvent;
use super::spec::{Finish, Retention, Role, SegmentKind, SessionSpec, TurnRequest};
use super::view::{KvTransition, SessionStatus, TurnError, TurnStatus, Usage};
use crate::kv::contract::Contract;
use crate::restore::report::RestoreReport;

/// Transitions kept in memory for each session; the journal has all.
const TRANSITIONS_KEPT: usize = 256;

/// A labelled range of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentRecord {
    /// Id.
    pub id: String,
    /// Who speaks.
    pub role: Role,
    /// What it holds.
    pub kind: SegmentKind,
    /// How long it is kept.
    pub retention: Retention,
    /// First token index, frame included.
    pub start: u64,
    /// One past the last token index, frame included.
    pub end: u64,
    /// Its text, without the frame.
    pub text: String,
    /// When it was written, milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// The turn it belongs to.
    pub turn: Option<String>,
}

/// A turn.
#[derive(Clone, Debug)]
pub struct TurnRecord {
    /// Id.
    pub id: String,
    /// From 1; 0 while queued.
    pub number: u32,
    /// How it stands.
    pub status: TurnStatus,
    /// As asked.
    pub request: TurnRequest,
    /// The answer's text so far.
    pub output_text: String,
    /// Why the last message ended.
    pub finish: Option<Finish>,
    /// Counts.
    pub usage: Usage,
    /// What went wrong.
    pub error: Option<TurnError>,
    /// Its first event.
    pub first_event: u64,
    /// Restores it caused.
    pub restores: Vec<RestoreReport>,
    /// Events that record its calls and its sampled tokens, while it runs: what a replay is fed.
    pub calls: Vec<SessionEvent>,
    /// The agent's state when it began.
    pub state_before: BTreeMap<String, String>,
    /// Whether the agent's `start` had run when it began.
    pub agent_started_before: bool,
}

/// A session.
#[derive(Clone, Debug)]
pub struct SessionRecord {
    /// As created.
    pub spec: SessionSpec,
    /// Alias or path of the model.
    pub model: String,
    /// What its saved KV may be used under.
    pub contract: Contract,
    /// The session it was forked from.
    pub parent: Option<String>,
    /// First event.
    pub created_ms: u64,
    /// Last event.
    pub updated_ms: u64,
    /// Sequence number of the last event.
    pub last_event: u64,
    /// The history.
    pub tokens: Vec<u32>,
    /// Its segments, in order.
    pub segments: Vec<SegmentRecord>,
    /// Its turns, in order.
    pub turns: Vec<TurnRecord>,
    /// Turns of the parent before the fork.
    pub turns_before: u32,
    /// Sums over turns.
    pub usage: Usage,
    /// The agent's state.
    pub state: BTreeMap<String, String>,
    /// Whether the agent's `start` ran.
    pub agent_started: bool,
    /// Recent transitions: sequence number, time, transition.
    pub transitions: Vec<(u64, u64, KvTransition)>,
    /// What the last restore did.
    pub last_restore: Option<RestoreReport>,
}

impl SessionRecord {
    /// The record that a first event makes; `None` when it is not a first event.
    pub fn begin(event: &SessionEvent) -> Option<Self> {
        let empty = |spec: &SessionSpec, model: &str, contract: &Contract| Self {
            spec: spec.clone(),
            model: model.to_owned(),
            contract: contract.clone(),
            parent: None,
            created_ms: 0,
            updated_ms: 0,
            last_event: 0,
            tokens: Vec::new(),
            segments: Vec::new(),
            turns: Vec::new(),
            turns_before: 0,
            usage: Usage::default(),
            state: BTreeMap::new(),
            agent_started: false,
            transitions: Vec::new(),
            last_restore: None,
        };
        match event {
            SessionEvent::Created { spec, model, contract } => Some(empty(spec, model, contract)),
            SessionEvent::Forked {
                parent,
                spec,
                model,
                contract,
                tokens,
                segments,
                state,
                agent_started,
                turns,
            } => {
                let mut record = empty(spec, model, contract);
                record.parent = Some(parent.clone());
                record.tokens.clone_from(tokens);
                record.segments.clone_from(segments);
                record.state = state
                    .iter()
                    .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())))
                    .collect();
                record.agent_started = *agent_started;
                record.turns_before = *turns;
                Some(record)
            }
            _ => None,
        }
    }

    /// Where the session stands.
    pub fn status(&self) -> SessionStatus {
        let status = |wanted: TurnStatus| self.turns.iter().any(|turn| turn.status == wanted);
        if status(TurnStatus::Running) {
            SessionStatus::Running
        } else if self.turns.last().is_some_and(|turn| turn.status == TurnStatus::RequiresAction) {
            SessionStatus::RequiresAction
        } else {
            SessionStatus::Idle
        }
    }

    /// A turn by its id.
    pub fn turn(&self, id: &str) -> Option<&TurnRecord> {
        self.turns.iter().find(|turn| turn.id == id)
    }

    fn turn_mut(&mut self, id: &str) -> Option<&mut TurnRecord> {
        self.turns.iter_mut().rev().find(|turn| turn.id == id)
    }

    fn running_mut(&mut self) -> Option<&mut TurnRecord> {
        self.turns.iter_mut().rev().find(|turn| turn.status == TurnStatus::Running)
    }

    /// Number of the last turn begun.
    pub fn turn_number(&self) -> u32 {
        self.turns_before + self.turns.iter().filter(|turn| turn.number > 0).count() as u32
    }

    /// A segment by its id.
    pub fn segment(&self, id: &str) -> Option<&SegmentRecord> {
        self.segments.iter().find(|segment| segment.id == id)
    }

    /// The segments that a running turn made, and those it has decided to keep differently.
    pub fn segments_of(&self, turn: &str) -> Vec<SegmentRecord> {
        let calls = self.turn(turn).map_or(&[][..], |turn| &turn.calls);
        let changed = |id: &str| {
            calls
                .iter()
                .any(|call| matches!(call, SessionEvent::SegmentRetention { segment, .. } if segment == id))
        };
        let of = |segment: &&SegmentRecord| segment.turn.as_deref() == Some(turn) || changed(&segment.id);
        self.segments.iter().filter(of).cloned().collect()
    }

    /// Takes in one event.
    pub fn apply(&mut self, seq: u64, time_ms: u64, event: SessionEvent) {
        self.last_event = seq;
        self.updated_ms = time_ms;
        if seq == 1 {
            self.created_ms = time_ms;
        }
        if event.call().is_some() || matches!(event, SessionEvent::GenerationTokens { .. }) {
            let recorded = event.clone();
            if let Some(turn) = self.running_mut() {
                turn.calls.push(recorded);
            }
        }
        match event {
            SessionEvent::TurnQueued { turn, request } => {
                self.push_turn(turn, 0, TurnStatus::Queued, *request, seq);
            }
            SessionEvent::TurnStarted { turn, number, request, .. } => {
                if self.turn(&turn).is_none() {
                    self.push_turn(turn.clone(), number, TurnStatus::Running, *request, seq);
                }
                let (state, started) = (self.state.clone(), self.agent_started);
                if let Some(begun) = self.turn_mut(&turn) {
                    begun.status = TurnStatus::Running;
                    begun.number = number;
                    begun.state_before = state;
                    begun.agent_started_before = started;
                }
            }
            SessionEvent::TurnFinished { turn, status, error, usage, .. } => {
                self.finish_turn(&turn, status, error, usage);
            }
            SessionEvent::KvTransition(change) => {
                if self.transitions.len() == TRANSITIONS_KEPT {
                    self.transitions.remove(0);
                }
                self.transitions.push((seq, time_ms, change));
            }
            SessionEvent::KvRestore(report) => {
                if let Some(turn) = self.running_mut() {
                    turn.restores.push((*report).clone());
                }
                self.last_restore = Some(*report);
            }
            SessionEvent::ContractChanged { contract, model } => {
                self.contract = *contract;
                self.model = model.unwrap_or_else(|| std::mem::take(&mut self.model));
            }
            SessionEvent::StateSet { key, value, .. } => match value {
                Some(value) => {
                    self.state.insert(key, value);
                }
                None => {
                    self.state.remove(&key);
                }
            },
            SessionEvent::AgentStarted { .. } => self.agent_started = true,
            other => self.apply_tokens(time_ms, other),
        }
    }

    /// Takes in an event that changes the history.
    fn apply_tokens(&mut self, time_ms: u64, event: SessionEvent) {
        match event {
            SessionEvent::SegmentAppended {
                turn, segment, role, kind, retention, start, ids, text, ..
            } => {
                self.tokens.extend(ids);
                let end = self.tokens.len() as u64;
                self.segments.push(SegmentRecord {
                    id: segment,
                    role,
                    kind,
                    retention,
                    start,
                    end,
                    text,
                    created_ms: time_ms,
                    turn,
                });
            }
            SessionEvent::GenerationStarted { turn, segment, kind, retention, start, ids, text, .. } => {
                self.tokens.extend(ids);
                let end = self.tokens.len() as u64;
                if kind == SegmentKind::Answer
                    && let Some(turn) = self.turn_mut(&turn)
                {
                    turn.output_text.push_str(&text);
                }
                self.segments.push(SegmentRecord {
                    id: segment,
                    role: Role::Assistant,
                    kind,
                    retention,
                    start,
                    end,
                    text,
                    created_ms: time_ms,
                    turn: Some(turn),
                });
            }
            SessionEvent::GenerationTokens { turn, segment, kind, ids, text } => {
                self.extend_segment(&segment, &ids, &text);
                if kind == SegmentKind::Answer
                    && let Some(turn) = self.turn_mut(&turn)
                {
                    turn.output_text.push_str(&text);
                }
            }
            SessionEvent::GenerationFinished { turn, segment, finish, ids, usage, .. } => {
                self.extend_segment(&segment, &ids, "");
                if let Some(turn) = self.turn_mut(&turn) {
                    turn.finish = Some(finish);
                    turn.usage.add(&usage);
                }
            }
            SessionEvent::SegmentRetention { segment, retention, .. } => {
                if let Some(found) = self.segments.iter_mut().find(|found| found.id == segment) {
                    found.retention = retention;
                }
            }
            SessionEvent::SegmentCut { segment, start, end, .. } => self.cut(&segment, start, end),
            _ => {}
        }
    }

    fn extend_segment(&mut self, id: &str, ids: &[u32], text: &str) {
        self.tokens.extend_from_slice(ids);
        let end = self.tokens.len() as u64;
        if let Some(segment) = self.segments.iter_mut().rev().find(|segment| segment.id == id) {
            segment.end = end;
            segment.text.push_str(text);
        }
    }

    fn cut(&mut self, id: &str, start: u64, end: u64) {
        let (first, last) = (start as usize, (end as usize).min(self.tokens.len()));
        if first < last {
            self.tokens.drain(first..last);
        }
        self.segments.retain(|segment| segment.id != id);
        let length = end - start;
        for segment in &mut self.segments {
            if segment.start >= end {
                segment.start -= length;
                segment.end -= length;
            }
        }
    }

    fn push_turn(&mut self, id: String, number: u32, status: TurnStatus, request: TurnRequest, seq: u64) {
        self.turns.push(TurnRecord {
            id,
            number,
            status,
            request,
            output_text: String::new(),
            finish: None,
            usage: Usage::default(),
            error: None,
            first_event: seq,
            restores: Vec::new(),
            calls: Vec::new(),
            state_before: BTreeMap::new(),
            agent_started_before: false,
        });
    }

    fn finish_turn(&mut self, id: &str, status: TurnStatus, error: Option<TurnError>, usage: Usage) {
        if let Some(turn) = self.turn_mut(id) {
            turn.status = status;
            turn.error = error;
            turn.usage = usage;
            // Kept for a person's decision, else of no further use.
            if status != TurnStatus::RequiresAction {
                turn.calls = Vec::new();
            }
        }
        self.usage.add(&usage);
    }
}
