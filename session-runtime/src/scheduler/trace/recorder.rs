//! What the scheduler tells its trace. Without one, nothing is done.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use store::Clock;

use super::file::{frame, head};
use super::pseudonyms::{Chain, Key};
use super::record::{Cause, Effect, HostSettings, Record, SessionNumber, Taken, Told, TraceHeader};
use super::writer::Writer;
use crate::error::Error;
use crate::kv::contract::{Contract, Place};
use crate::scheduler::host_control::HostControl;
use crate::scheduler::tier::TierAnswer;
use crate::scheduler::{Command, OpenSession, RestReason};

/// The scheduler's handle of its trace.
#[derive(Clone, Default)]
pub(in crate::scheduler) struct Recorder(Option<Arc<Mutex<Recording>>>);

struct Known {
    number: SessionNumber,
    chain: Chain,
}

/// A trace being written.
pub(super) struct Recording {
    /// Gone once the trace is over.
    writer: Option<Writer>,
    clock: Arc<dyn Clock>,
    contract: Contract,
    key: Key,
    sessions: HashMap<Arc<str>, Known>,
    next: SessionNumber,
    /// The session that the open record forgets.
    closing: Option<SessionNumber>,
    /// The record that is being made.
    open: Option<Record>,
    /// When it began, and the last time that was told in it; before the first record, when the trace began.
    at: Duration,
    told_at: Duration,
    begun: bool,
    /// What the disk was last said to be throttled to, and whether the open record has asked.
    disk_limit: Option<u64>,
    limit_asked: bool,
    /// The host tier's control as everyone sees it, and as the scheduler does: the second changes between records only.
    host_control: HostControl,
    seen_control: HostControl,
    host: HostSettings,
}

impl Recorder {
    /// Begins a trace: what is written so far is its header.
    pub(super) fn start(
        mut writer: Writer,
        header: &TraceHeader,
        clock: Arc<dyn Clock>,
        contract: Contract,
        host_control: HostControl,
    ) -> Result<Self, Error> {
        writer.gathered().extend(head());
        frame(header, writer.gathered())?;
        let seen_control = HostControl::default();
        let host = HostSettings::of(&seen_control);
        let at = Duration::from_nanos(header.began_ns);
        Ok(Self(Some(Arc::new(Mutex::new(Recording {
            writer: Some(writer),
            clock,
            contract,
            key: Key::fresh(),
            sessions: HashMap::new(),
            next: 0,
            closing: None,
            open: None,
            at,
            told_at: at,
            begun: false,
            disk_limit: None,
            limit_asked: false,
            host_control,
            seen_control,
            host,
        })))))
    }

    pub(super) fn recording(&self) -> Option<MutexGuard<'_, Recording>> {
        self.0.as_ref().map(|recording| recording.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The host tier's control as the scheduler sees it.
    pub(super) fn seen_control(&self) -> Option<HostControl> {
        self.recording().map(|recording| recording.seen_control.clone())
    }

    /// The scheduler's loop comes round.
    pub(in crate::scheduler) fn turn(&self) {
        if let Some(mut recording) = self.recording() {
            recording.begin(Cause::Turn);
        }
    }

    /// A command came. One on a session that there is not changes nothing and is not recorded, nor are questions.
    pub(in crate::scheduler) fn command(&self, command: &Command) {
        let Some(mut recording) = self.recording() else { return };
        if let Some(cause) = recording.cause(command) {
            recording.begin(cause);
        }
    }

    /// The disk answered.
    pub(in crate::scheduler) fn answer(&self, answer: &TierAnswer) {
        let Some(mut recording) = self.recording() else { return };
        match answer {
            TierAnswer::Saved { bytes, outcome, .. } => {
                recording.begin(Cause::Saved { refused: outcome.as_ref().err().cloned() });
                if outcome.is_ok() {
                    recording.effect(Effect::Saved { bytes: *bytes });
                }
            }
            TierAnswer::Loaded { cells, seconds, .. } => {
                let lengths = cells.iter().filter_map(|(_, cell)| Some(cell.as_ref().ok()?.len() as u64));
                let mut given: Vec<(u32, u64)> = Vec::new();
                for length in lengths {
                    match given.last_mut() {
                        Some((count, same)) if *same == length => *count += 1,
                        _ => given.push((1, length)),
                    }
                }
                let refused =
                    cells.iter().filter_map(|(layer, cell)| Some((*layer, cell.as_ref().err()?.clone())));
                recording.begin(Cause::Loaded { given, refused: refused.collect(), seconds: *seconds });
            }
        }
    }

    /// What came has been dealt with.
    pub(in crate::scheduler) fn end(&self) {
        if let Some(mut recording) = self.recording() {
            recording.end();
        }
    }

    /// What came was refused and changed nothing.
    pub(in crate::scheduler) fn discard(&self) {
        if let Some(mut recording) = self.recording() {
            recording.open = None;
        }
    }

    /// Tokens were taken out of a history, which is `tokens` now.
    pub(in crate::scheduler) fn cut(&self, session: &str, from: usize, tokens: &[u32]) {
        let Some(mut recording) = self.recording() else { return };
        let (names, chain) = recording.key.history(tokens, from);
        if let Some(known) = recording.sessions.get_mut(session) {
            known.chain = chain;
        }
        if let Some(Record { cause: Cause::Cut { tail, .. }, .. }) = &mut recording.open {
            *tail = Some(names);
        }
    }

    /// A token of a message, with what became of the message.
    pub(in crate::scheduler) fn token(&self, session: &str, token: u32, taken: fn(u32) -> Taken) {
        let Some(mut recording) = self.recording() else { return };
        let Recording { sessions, key, .. } = &mut *recording;
        let Some(known) = sessions.get_mut(session) else { return };
        let (number, name) = (known.number, known.chain.push(key, token));
        recording.told(|told| told.tokens.push((number, taken(name))));
    }

    /// A message ended without a further token.
    pub(in crate::scheduler) fn no_token(&self, session: &str, taken: Taken) {
        let Some(mut recording) = self.recording() else { return };
        let Some(number) = recording.number(session) else { return };
        recording.told(|told| told.tokens.push((number, taken)));
    }

    /// So many tokens of a message were guessed.
    pub(in crate::scheduler) fn guessed(&self, session: &str, tokens: usize) {
        let Some(mut recording) = self.recording() else { return };
        let Some(number) = recording.number(session) else { return };
        recording.told(|told| told.guess = Some((number, tokens as u32, 0)));
    }

    /// The next of them was right.
    pub(in crate::scheduler) fn guessed_right(&self) {
        if let Some(mut recording) = self.recording() {
            recording.told(|told| told.guess.iter_mut().for_each(|(_, _, right)| *right += 1));
        }
    }

    /// A cell was packed without loss.
    pub(in crate::scheduler) fn packed(&self, bytes: usize) {
        if let Some(mut recording) = self.recording() {
            recording.told(|told| told.packed.push(bytes as u32));
        }
    }

    /// Nobody waits for a session's restore any more.
    pub(in crate::scheduler) fn unwanted(&self, session: &str) {
        let Some(mut recording) = self.recording() else { return };
        let Some(number) = recording.number(session) else { return };
        recording.told(|told| told.unwanted.push(number));
    }

    /// The history before a message is on the device.
    pub(in crate::scheduler) fn started(&self, session: &str, input: u64, cached: u64) {
        let Some(mut recording) = self.recording() else { return };
        let Some(session) = recording.number(session) else { return };
        recording.effect(Effect::Started { session, input, cached });
    }
}

impl Recording {
    fn begin(&mut self, cause: Cause) {
        self.seen_control.follow(&self.host_control);
        if self.writer.is_none() {
            return;
        }
        let now = self.clock.monotonic();
        let mut told = Told::default();
        let host = HostSettings::of(&self.seen_control);
        if host != self.host {
            told.host = Some(host.clone());
            self.host = host;
        }
        let after_ns = nanos(now.saturating_sub(self.at));
        (self.at, self.told_at, self.begun, self.limit_asked) = (now, now, true, false);
        self.open = Some(Record { after_ns, cause, told, effects: Vec::new() });
    }

    fn end(&mut self) {
        let (Some(record), Some(writer)) = (self.open.take(), &mut self.writer) else { return };
        let framed = frame(&record, writer.gathered());
        if let Err(error) = &framed {
            tracing::warn!(%error, "the trace ends here");
        }
        if let Some(closed) = self.closing.take() {
            self.sessions.retain(|_, known| known.number != closed);
        }
        if framed.is_err() || !writer.pass_on(self.at) {
            self.writer = None;
            self.sessions = HashMap::new();
        }
    }

    fn told(&mut self, tell: impl FnOnce(&mut Told)) {
        if let Some(record) = &mut self.open {
            tell(&mut record.told);
        }
    }

    pub(super) fn effect(&mut self, effect: Effect) {
        if let Some(record) = &mut self.open {
            record.effects.push(effect);
        }
    }

    pub(super) fn number(&self, session: &str) -> Option<SessionNumber> {
        self.sessions.get(session).map(|known| known.number)
    }

    /// A time the scheduler reads. Before the first record time stands still: what the scheduler is made with has no record.
    pub(super) fn time(&mut self, now: Duration) -> Duration {
        if !self.begun {
            return self.at;
        }
        let since = nanos(now.saturating_sub(self.told_at));
        if let Some(record) = &mut self.open {
            record.told.times_ns.push(since);
            self.told_at = now;
        }
        now
    }

    /// Whether the disk has a cell.
    pub(super) fn has(&mut self, has: bool) {
        self.told(|told| {
            let bit = told.asked % 8;
            if bit == 0 {
                told.has.push(0);
            }
            told.asked += 1;
            if let (true, Some(byte)) = (has, told.has.last_mut()) {
                *byte |= 1 << bit;
            }
        });
    }

    /// What the disk is throttled to: what it was when the open record first asked.
    pub(super) fn limit(&mut self, limit: Option<u64>) -> Option<u64> {
        if let Some(record) = &mut self.open
            && !self.limit_asked
        {
            self.limit_asked = true;
            if limit != self.disk_limit {
                record.told.disk_limit = Some(limit);
                self.disk_limit = limit;
            }
        }
        if self.limit_asked { self.disk_limit } else { limit }
    }

    fn known(&mut self, id: &Arc<str>, chain: Chain) {
        self.sessions.insert(Arc::clone(id), Known { number: self.next, chain });
        self.next += 1;
    }

    /// A command as a trace has it.
    fn cause(&mut self, command: &Command) -> Option<Cause> {
        Some(match command {
            Command::Open { session, opening } => {
                let OpenSession { tenant, tokens, saved_under, idle_ttl_ms, codec, reuse } = &**opening;
                let (names, chain) = self.key.history(tokens, 0);
                self.known(session, chain);
                Cause::Open {
                    id: session.to_string(),
                    tenant: tenant.name().map(str::to_owned),
                    tokens: names,
                    saved_under: saved_under.as_ref().map(|saved| {
                        let relation = self.contract.relation(saved, Place::Same, *reuse);
                        relation.fields().into_iter().map(str::to_owned).collect()
                    }),
                    idle_ttl_ms: *idle_ttl_ms,
                    codec: codec.name().to_owned(),
                    reuse: reuse.name().to_owned(),
                    layout: saved_under.as_ref().map(|saved| saved.kv_layout.clone()),
                }
            }
            Command::Append { session, tokens } => {
                let Self { sessions, key, .. } = self;
                let known = sessions.get_mut(session)?;
                let names = tokens.iter().map(|token| known.chain.push(key, *token)).collect();
                Cause::Append { session: known.number, tokens: names }
            }
            Command::Generate { session, request, .. } => {
                Cause::Generate { session: self.number(session)?, sampled: request.sampled.len() as u32 }
            }
            Command::Cancel { session } => Cause::Cancel { session: self.number(session)? },
            Command::Rest { session, reason } => {
                let tool = match reason {
                    RestReason::ToolCall { tool, declared_ms } => Some((tool.to_string(), *declared_ms)),
                    RestReason::EndOfTurn => None,
                };
                Cause::Rest { session: self.number(session)?, tool }
            }
            Command::Evict { session, .. } => Cause::Evict { session: self.number(session)? },
            Command::Restore { session, mode, .. } => {
                Cause::Restore { session: self.number(session)?, mode: mode.to_string() }
            }
            Command::Fork { source, target, .. } => {
                let known = self.sessions.get(source)?;
                let (number, chain) = (known.number, known.chain.clone());
                self.known(target, chain);
                Cause::Fork { source: number, id: target.to_string() }
            }
            Command::Cut { session, start, end, .. } => {
                let (start, end) = (*start as u64, *end as u64);
                Cause::Cut { session: self.number(session)?, start, end, tail: None }
            }
            Command::Close { session } => {
                let session = self.number(session)?;
                self.closing = Some(session);
                Cause::Close { session }
            }
            Command::View { .. }
            | Command::Device { .. }
            | Command::Host { .. }
            | Command::Tenants { .. }
            | Command::Settle { .. } => return None,
        })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.begin(Cause::Stop);
        self.end();
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
