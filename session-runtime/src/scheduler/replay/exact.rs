//! The replay of what was: the scheduler is given what came to it, and is told what it was told, in the recorded order. What it
//! makes of that has to be what was recorded.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::oneshot::{self, error::TryRecvError};

use super::counts::Counter;
use super::feed::Feed;
use super::script::Script;
use super::{Divergence, invalid, setting};
use crate::error::Error;
use crate::kv::contract::Contract;
use crate::restore::cost::Costs;
use crate::restore::report::RestoreReport;
use crate::scheduler::simulation::{SimulatedDevice, contract};
use crate::scheduler::tenants::Tenant;
use crate::scheduler::trace::{
    Cause, Effect, Record, Recorder, Restored, SessionNumber, Surroundings, Told, TraceHeader,
};
use crate::scheduler::worker::Worker;
use crate::scheduler::{
    Command, GenerationEvent, HostControl, KvObserver, KvTransition, OpenSession, Relocation, RestReason,
};

/// Sessions by the numbers of a trace.
#[derive(Default)]
pub(super) struct Sessions {
    ids: HashMap<SessionNumber, Arc<str>>,
    numbers: HashMap<Arc<str>, SessionNumber>,
}

impl Sessions {
    /// A session becomes known.
    fn add(&mut self, number: SessionNumber, id: &str) -> Arc<str> {
        let id: Arc<str> = id.into();
        self.numbers.insert(Arc::clone(&id), number);
        self.ids.insert(number, Arc::clone(&id));
        id
    }

    /// The number of the next session of a trace.
    fn next(&self) -> SessionNumber {
        self.ids.len() as SessionNumber
    }

    /// A session's id.
    ///
    /// # Errors
    /// A number that no session has.
    pub(super) fn id(&self, number: SessionNumber) -> Result<Arc<str>, Error> {
        self.ids.get(&number).cloned().ok_or_else(|| invalid("it names a session that it did not open"))
    }

    fn number(&self, id: &str) -> SessionNumber {
        self.numbers.get(id).copied().unwrap_or(SessionNumber::MAX)
    }
}

/// What an observer heard, with the ids of sessions.
#[derive(Clone)]
pub(super) enum Heard {
    Moved(Arc<str>, KvTransition),
    Restored(Arc<str>, Restored),
    Relocated(Arc<str>, Relocation),
}

impl Heard {
    /// As a trace has it.
    pub(super) fn effect(self, sessions: &Sessions) -> Effect {
        match self {
            Self::Moved(session, change) => Effect::Moved {
                session: sessions.number(&session),
                from: change.from.as_str().to_owned(),
                to: change.to.as_str().to_owned(),
                reason: change.reason,
                tokens: change.tokens,
                bytes: change.bytes,
            },
            Self::Restored(session, restored) => {
                Effect::Restored { session: sessions.number(&session), restored }
            }
            Self::Relocated(session, Relocation { start, cut, tokens, .. }) => {
                Effect::Relocated { session: sessions.number(&session), start, cut, tokens }
            }
        }
    }
}

/// An observer that keeps what it hears until it is asked.
#[derive(Clone, Default)]
pub(super) struct Listener(Arc<Mutex<Vec<Heard>>>);

impl Listener {
    /// What was heard since this was last asked.
    pub(super) fn take(&self) -> Vec<Heard> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn hear(&self, heard: Heard) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(heard);
    }
}

impl KvObserver for Listener {
    fn transition(&self, session: &str, transition: &KvTransition) {
        self.hear(Heard::Moved(session.into(), transition.clone()));
    }

    fn restored(&self, session: &str, report: &RestoreReport) {
        self.hear(Heard::Restored(session.into(), Restored::of(report)));
    }

    fn relocated(&self, session: &str, relocation: &Relocation) {
        self.hear(Heard::Relocated(session.into(), relocation.clone()));
    }
}

/// The scheduler, fed from a trace.
pub(super) struct Exact {
    worker: Worker<SimulatedDevice>,
    feed: Feed,
    listener: Listener,
    control: HostControl,
    sessions: Sessions,
    scripts: HashMap<SessionNumber, Script>,
    restores: HashMap<SessionNumber, oneshot::Receiver<Result<RestoreReport, Error>>>,
    counter: Counter,
    records: u64,
}

impl Exact {
    /// The scheduler as it was before the first record.
    ///
    /// # Errors
    /// A header that is of no scheduler.
    pub(super) fn new(header: &TraceHeader) -> Result<Self, Error> {
        let feed = Feed::new(Duration::from_nanos(header.began_ns));
        let (listener, options) = (Listener::default(), setting::options(header)?);
        let control = options.host_control.clone();
        let surroundings = Surroundings {
            tier: Box::new(feed.clone()),
            contract: contract(),
            options,
            clock: Arc::new(feed.clone()),
            observer: Box::new(listener.clone()),
        };
        let mut worker = Worker::new(
            setting::timeless(header)?,
            surroundings,
            Recorder::default(),
            Arc::new(AtomicBool::new(false)),
        );
        // They belong to the device of the trace, not to the one that stands in for it.
        let kept = header.costs.as_deref().and_then(|costs| serde_json::from_slice(costs).ok());
        worker.costs = Costs::on(header.device.clone(), kept);
        Ok(Self {
            worker,
            feed,
            listener,
            control,
            sessions: Sessions::default(),
            scripts: HashMap::new(),
            restores: HashMap::new(),
            counter: Counter::default(),
            records: 0,
        })
    }

    /// Does what a record says at a time; how that differs from what it says became of it.
    pub(super) fn apply(&mut self, record: &Record, at: Duration) -> Option<Divergence> {
        self.records += 1;
        self.tell(&record.told, at);
        let mut effects = match self.cause(&record.cause) {
            Ok(effects) => effects,
            Err(error) => return Some(Divergence { record: self.records, what: error.message }),
        };
        let now = self.feed.now();
        effects.extend(self.listener.take().into_iter().map(|heard| heard.effect(&self.sessions)));
        let amiss = self.amiss();
        effects.extend(self.started());
        effects.iter().for_each(|effect| self.counter.count(effect, now));
        let what = amiss.map(str::to_owned).or_else(|| difference(&record.effects, &effects));
        what.map(|what| Divergence { record: self.records, what })
    }

    /// What came of it.
    pub(super) fn counter(&self) -> &Counter {
        &self.counter
    }

    /// The costs that the scheduler has measured.
    pub(super) fn costs(&self) -> &Costs {
        &self.worker.costs
    }

    /// What the disk is throttled to, and how the host tier is made.
    pub(super) fn throttles(&self) -> (Option<u64>, &HostControl) {
        (self.feed.disk_limit(), &self.control)
    }

    fn tell(&mut self, told: &Told, at: Duration) {
        self.feed.begin(at, told);
        self.worker.engine.backend().packed.begin(&told.packed);
        if let Some(host) = &told.host {
            host.apply(&self.control);
        }
        for (session, taken) in &told.tokens {
            if let Some(script) = self.scripts.get(session) {
                script.push(*taken);
            }
        }
        if let Some((session, count, right)) = told.guess
            && let Some(script) = self.scripts.get(&session)
        {
            script.set_guess(count, right);
        }
        for session in &told.unwanted {
            self.restores.remove(session);
        }
    }

    /// What the scheduler asked for that was not there, and what was there that it did not ask for.
    fn amiss(&self) -> Option<&'static str> {
        let unused = self.scripts.values().any(|script| !script.is_used_up());
        let unused = unused.then_some("the trace has a token that the scheduler does not sample");
        self.feed.amiss().or(unused).or_else(|| self.worker.engine.backend().packed.amiss())
    }

    /// Messages whose first token came. Those that ended are forgotten.
    fn started(&mut self) -> Vec<Effect> {
        let mut started = Vec::new();
        self.scripts.retain(|session, script| {
            let mut goes_on = true;
            for event in script.heard() {
                match event {
                    GenerationEvent::Started { input_tokens: input, cached_tokens: cached } => {
                        started.push(Effect::Started { session: *session, input, cached });
                    }
                    GenerationEvent::Done { .. } | GenerationEvent::Failed(_) => goes_on = false,
                    GenerationEvent::Token { .. } => {}
                }
            }
            goes_on
        });
        started
    }

    /// Does what came; what the disk has taken.
    fn cause(&mut self, cause: &Cause) -> Result<Vec<Effect>, Error> {
        let mut effects = Vec::new();
        match cause {
            Cause::Turn => {
                self.worker.turn();
            }
            Cause::Stop => {}
            Cause::Saved { refused } => {
                let answer = self.feed.saved(refused.clone()).ok_or_else(unasked)?;
                if let (crate::scheduler::tier::TierAnswer::Saved { bytes, .. }, None) = (&answer, refused) {
                    effects.push(Effect::Saved { bytes: *bytes });
                }
                self.worker.tier_answer(answer);
            }
            Cause::Loaded { given, refused, seconds } => {
                let answer = self.feed.loaded(given, refused, *seconds).ok_or_else(unasked)?;
                self.worker.tier_answer(answer);
            }
            Cause::Generate { session, sampled } => {
                self.counter.asked(*session, self.feed.now());
                self.generate(*session, *sampled as usize)?;
            }
            Cause::Restore { session, mode } => {
                let (reply, answer) = oneshot::channel();
                let (mode, id) = (setting::word(mode)?, self.sessions.id(*session)?);
                self.worker.command(Command::Restore { session: id, mode, reply });
                // One that is refused because another is under way must not take that one's listener away.
                let waits = |earlier: &mut oneshot::Receiver<_>| {
                    matches!(earlier.try_recv(), Err(TryRecvError::Empty))
                };
                if !self.restores.get_mut(session).is_some_and(waits) {
                    self.restores.insert(*session, answer);
                }
            }
            Cause::Cut { session, start, tail, .. } => {
                self.command(cause)?;
                let session = self.sessions.id(*session)?;
                if let (Some(tail), Some(sequence)) = (tail, self.worker.sequences.get_mut(&session)) {
                    sequence.tokens.truncate(usize::try_from(*start).unwrap_or(usize::MAX));
                    sequence.tokens.extend(tail);
                }
            }
            _ => self.command(cause)?,
        }
        Ok(effects)
    }

    fn command(&mut self, cause: &Cause) -> Result<(), Error> {
        let next = self.sessions.next();
        let command = command(cause, next, &mut self.sessions, &self.worker.contract)?;
        self.worker.command(command);
        Ok(())
    }

    fn generate(&mut self, session: SessionNumber, sampled: usize) -> Result<(), Error> {
        let (events, told) = unbounded_channel();
        let script = Script::new(told);
        self.scripts.insert(session, script.clone());
        let id = self.sessions.id(session)?;
        self.worker.generate(id, sampled, || Ok(Box::new(script)), events);
        Ok(())
    }
}

fn unasked() -> Error {
    invalid("the disk answers for what it was not asked")
}

/// A command that needs no answer, as a trace has it. A session that it makes known gets the number `new`.
///
/// # Errors
/// A session or a word that there is not.
pub(super) fn command(
    cause: &Cause,
    new: SessionNumber,
    sessions: &mut Sessions,
    contract: &Contract,
) -> Result<Command, Error> {
    Ok(match cause {
        Cause::Open { id, tenant, tokens, saved_under, idle_ttl_ms, codec, reuse, layout } => Command::Open {
            session: sessions.add(new, id),
            opening: Box::new(OpenSession {
                tenant: Tenant::named(tenant.as_deref()),
                tokens: tokens.clone(),
                saved_under: saved_under
                    .as_ref()
                    .map(|fields| differing(contract, fields, layout.as_deref())),
                idle_ttl_ms: *idle_ttl_ms,
                codec: setting::word(codec)?,
                reuse: setting::word(reuse)?,
            }),
        },
        Cause::Append { session, tokens } => {
            Command::Append { session: sessions.id(*session)?, tokens: tokens.clone() }
        }
        Cause::Cancel { session } => Command::Cancel { session: sessions.id(*session)? },
        Cause::Rest { session, tool } => {
            let reason = tool.as_ref().map_or(RestReason::EndOfTurn, |(tool, declared_ms)| {
                RestReason::ToolCall { tool: tool.as_str().into(), declared_ms: *declared_ms }
            });
            Command::Rest { session: sessions.id(*session)?, reason }
        }
        Cause::Evict { session } => {
            Command::Evict { session: sessions.id(*session)?, reply: oneshot::channel().0 }
        }
        Cause::Restore { session, mode } => Command::Restore {
            session: sessions.id(*session)?,
            mode: setting::word(mode)?,
            reply: oneshot::channel().0,
        },
        Cause::Fork { source, id } => Command::Fork {
            source: sessions.id(*source)?,
            target: sessions.add(new, id),
            reply: oneshot::channel().0,
        },
        Cause::Cut { session, start, end, .. } => {
            let place = |place: u64| usize::try_from(place).unwrap_or(usize::MAX);
            let (session, reply) = (sessions.id(*session)?, oneshot::channel().0);
            Command::Cut { session, start: place(*start), end: place(*end), reply }
        }
        Cause::Close { session } => Command::Close { session: sessions.id(*session)? },
        Cause::Turn | Cause::Generate { .. } | Cause::Saved { .. } | Cause::Loaded { .. } | Cause::Stop => {
            return Err(invalid("it has no command where one is expected"));
        }
    })
}

/// A contract that differs in these fields, of cells with this layout.
fn differing(contract: &Contract, fields: &[String], layout: Option<&str>) -> Contract {
    let mut other = contract.clone();
    for field in fields {
        let value = match field.as_str() {
            "weights_digest" => &mut other.weights_digest,
            "architecture" => &mut other.architecture,
            "adapter_digest" => &mut other.adapter_digest,
            "tokenizer_digest" => &mut other.tokenizer_digest,
            "rope" => &mut other.rope,
            "kv_layout" => &mut other.kv_layout,
            "numerics_class" => &mut other.numerics_class,
            "lineage" => &mut other.lineage,
            _ => &mut other.tenant_salt,
        };
        value.push_str(" of another");
    }
    if let Some(layout) = layout {
        layout.clone_into(&mut other.kv_layout);
    }
    other
}

/// In what the effects of a record differ from those of its replay. Messages that start in one turn have no order.
fn difference(recorded: &[Effect], replayed: &[Effect]) -> Option<String> {
    let ordered = |effects: &[Effect]| {
        let started = |effect: &&Effect| matches!(effect, Effect::Started { .. });
        let mut beginnings: Vec<Effect> = effects.iter().filter(started).cloned().collect();
        beginnings.sort_by_key(|effect| match effect {
            Effect::Started { session, .. } => *session,
            _ => SessionNumber::MAX,
        });
        let others = effects.iter().filter(|effect| !started(effect)).cloned();
        others.chain(beginnings).collect::<Vec<Effect>>()
    };
    let (recorded, replayed) = (ordered(recorded), ordered(replayed));
    if recorded == replayed {
        return None;
    }
    let at = recorded.iter().zip(&replayed).take_while(|(a, b)| a == b).count();
    let name =
        |effects: &[Effect]| effects.get(at).map_or("nothing".to_owned(), |effect| format!("{effect:?}"));
    Some(format!("recorded {}, replayed {}", name(&recorded), name(&replayed)))
}
