//! The scheduler's loop: messages in, one piece of work at a time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kernels::backend::Backend;
use store::Clock;
use tokio::sync::mpsc::UnboundedSender;

use super::generation::{Generation, TokenSource};
use super::host::HostTier;
use super::host_control::HostPipe;
use super::idle::{IdlePolicy, Watermarks};
use super::lookup::Gain;
use super::port::TierPort;
use super::restoring::RestoreRun;
use super::saving::Saver;
use super::sequence::Sequence;
use super::sharing::NAMES;
use super::tenants::{Tenant, Turns};
use super::tier::{TierAnswer, TierRequest};
use super::trace::{Recorder, Surroundings};
use super::{Command, Finish, GenerationEvent, KvObserver, KvTransition, Message, Reply, SchedulerOptions};
use crate::engine::Engine;
use crate::error::{Error, ErrorKind};
use crate::kv::contract::{Contract, Digest};
use crate::kv::pool::PagePool;
use crate::kv::prefix::PrefixTree;
use crate::kv::shape::TableShape;
use crate::kv::state::KvEvent;
use crate::kv::table::BlockTable;
use crate::restore::cost::Costs;
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;

/// How often idle sessions are looked at, and the longest sleep while a restore waits for its tier.
pub(super) const TICK: Duration = Duration::from_millis(200);
const RESTORE_POLL: Duration = Duration::from_millis(2);
/// Least time between two writes of the measured costs.
const COSTS_KEPT_EVERY: Duration = Duration::from_secs(2);

/// What a job is for.
pub(super) enum Purpose {
    /// Write a message.
    Message {
        /// The message so far.
        generation: Box<dyn TokenSource>,
        /// Where what happens is told.
        events: UnboundedSender<GenerationEvent>,
        /// Whether the first logits were computed.
        started: bool,
        /// Tokens before the message.
        input_tokens: usize,
    },
    /// Bring the KV back, on command.
    Restore { reply: Option<Reply<RestoreReport>> },
    /// Bring the KV back ahead of a return that is foreseen. It never waits, and yields to whoever needs its pages.
    Prefetch,
}

impl Purpose {
    /// The reason that its transitions of KV give.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Message { .. } => "turn",
            Self::Restore { .. } => "command",
            Self::Prefetch => "prefetch",
        }
    }
}

/// Where a job stands.
pub(super) enum Phase {
    /// Waiting for pages.
    Waiting,
    /// Bringing saved KV back.
    Restoring(Box<RestoreRun>),
    /// Computing, or decoding.
    Running,
}

/// Work for one session. A session has at most one job.
pub(super) struct Job {
    pub session: Arc<str>,
    pub tenant: Tenant,
    pub purpose: Purpose,
    pub phase: Phase,
    pub mode: RestoreMode,
    /// When it was first admitted, counted in admissions: who was admitted last steps back first.
    pub admission: Option<u64>,
    /// Tokens whose KV had to be computed for this message, restores included.
    pub computed_tokens: u64,
}

pub(super) struct Worker<B: Backend> {
    pub engine: Engine<B>,
    pub pool: PagePool,
    /// Which tokens each layer keeps.
    pub shape: Arc<TableShape>,
    pub tier: Box<dyn TierPort>,
    pub host: HostTier,
    pub host_pipe: HostPipe,
    pub contract: Contract,
    pub contract_digest: Digest,
    pub options: SchedulerOptions,
    /// What becomes of KV at rest.
    pub policy: Box<dyn IdlePolicy>,
    pub watermarks: Watermarks,
    pub clock: Arc<dyn Clock>,
    pub observer: Box<dyn KvObserver>,
    /// In an order of their own: what is done to several sessions must not depend on chance.
    pub sequences: BTreeMap<Arc<str>, Sequence>,
    /// Who has KV of which beginnings.
    pub prefixes: PrefixTree,
    /// Oldest first.
    pub jobs: VecDeque<Job>,
    /// Whose turn it is to be admitted, and whose to read a prompt.
    pub turns: Turns,
    pub reading: Turns,
    /// The session whose prompt is being read.
    pub prompt: Option<Arc<str>>,
    /// Jobs admitted so far.
    pub admissions: u64,
    pub saver: Saver,
    pub costs: Costs,
    costs_kept: Duration,
    pub logits: Vec<f32>,
    pub next_restore: u64,
    /// When a tier last brought something to anyone: it is not stuck, though another may have to wait for its turn.
    pub last_arrival: Duration,
    pub settling: Vec<Reply<()>>,
    pub evicting: Vec<(Arc<str>, KvTransition, Duration, Reply<KvTransition>)>,
    pub tokens_computed: u64,
    pub tokens_reused: u64,
    /// Seconds of work, and those of them in the forward passes of steps.
    pub busy_seconds: f64,
    pub forward_seconds: f64,
    pub gain: Gain,
    stopping: Arc<AtomicBool>,
    /// Set where the device is lost.
    pub lost: Arc<OnceLock<Error>>,
    pub trace: Recorder,
    pub last_tick: Duration,
}

impl<B: Backend> Worker<B> {
    pub(super) fn new(
        engine: Engine<B>,
        surroundings: Surroundings,
        trace: Recorder,
        stopping: Arc<AtomicBool>,
    ) -> Self {
        let Surroundings { tier, contract, options, clock, observer } = surroundings;
        let pool = PagePool::new(engine.pool_spec().pages);
        let now = clock.monotonic();
        let config = engine.config();
        let windows = config.layer_kinds.iter().map(|kind| kind.window()).collect();
        let shape = Arc::new(TableShape::new(windows, config.kv_heads, engine.step_rows()));
        let device = engine.backend().describe();
        let names = if options.share_prefixes { NAMES } else { 0 };
        let kept = tier.costs().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Self {
            contract_digest: contract.digest(),
            engine,
            pool,
            shape,
            tier,
            host: HostTier::new(options.host_budget_bytes, options.tenants.clone()),
            host_pipe: HostPipe::default(),
            contract,
            policy: options.idle_policy.policy(),
            watermarks: Watermarks::default(),
            options,
            clock,
            observer,
            sequences: BTreeMap::new(),
            prefixes: PrefixTree::new(names),
            jobs: VecDeque::new(),
            turns: Turns::default(),
            reading: Turns::default(),
            prompt: None,
            admissions: 0,
            saver: Saver::default(),
            costs: Costs::on(device, kept),
            costs_kept: now,
            logits: Vec::new(),
            next_restore: 0,
            last_arrival: now,
            settling: Vec::new(),
            evicting: Vec::new(),
            tokens_computed: 0,
            tokens_reused: 0,
            busy_seconds: 0.0,
            forward_seconds: 0.0,
            gain: Gain::default(),
            stopping,
            lost: Arc::default(),
            trace,
            last_tick: now,
        }
    }

    /// Tells a lost device there as well.
    pub(super) fn telling_loss(self, lost: Arc<OnceLock<Error>>) -> Self {
        Self { lost, ..self }
    }

    /// Works until told to stop.
    pub(super) fn run(mut self, messages: &Receiver<Message>) {
        let mut worked = false;
        loop {
            if !self.receive(messages, worked) || self.stopping.load(Ordering::Relaxed) {
                // Restores let go of a disk that is stuck, which the tier's thread could else not leave.
                self.jobs.clear();
                return;
            }
            worked = self.turn();
        }
    }

    /// Takes every waiting message; sleeps for the first when there is nothing to do. False: stop.
    fn receive(&mut self, messages: &Receiver<Message>, worked: bool) -> bool {
        let patience = if worked { Duration::ZERO } else { self.patience() };
        let mut first = match messages.recv_timeout(patience) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return false,
        };
        loop {
            match first.take().map_or_else(|| messages.try_recv(), Ok) {
                Ok(Message::Command(command)) => self.command(command),
                Ok(Message::Tier(answer)) => self.tier_answer(answer),
                Ok(Message::Stop) | Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    /// How long the loop may sleep when there is nothing to do.
    pub(super) fn patience(&self) -> Duration {
        let restores = self.jobs.iter().any(|job| matches!(job.phase, Phase::Restoring(_)));
        if restores { RESTORE_POLL } else { TICK }
    }

    /// What is due by the clock, then one piece of work; whether there was any.
    pub(super) fn turn(&mut self) -> bool {
        self.trace.turn();
        let begun = self.clock.monotonic();
        self.tick(begun);
        let worked = self.work();
        if worked {
            self.busy_seconds += self.since(begun);
        }
        self.trace.end();
        worked
    }

    /// What is due every so often, where it is due `now`.
    pub(super) fn tick(&mut self, now: Duration) {
        if now.saturating_sub(self.last_tick) >= TICK {
            self.last_tick = now;
            self.evict_expired();
            self.prefetch_some();
        }
    }

    /// Seconds since a time of the monotonic clock.
    pub(super) fn since(&self, begun: Duration) -> f64 {
        self.clock.monotonic().saturating_sub(begun).as_secs_f64()
    }

    /// One piece of work; whether there was any.
    fn work(&mut self) -> bool {
        let mut worked = self.save_some();
        self.admit();
        worked |= self.restore_some();
        worked |= self.step();
        self.settle_loss();
        self.settle();
        worked
    }

    pub(super) fn command(&mut self, command: Command) {
        self.trace.command(&command);
        match command {
            Command::Open { session, opening } => self.open(session, *opening),
            Command::Append { session, tokens } => {
                if let Some(sequence) = self.sequences.get_mut(&session) {
                    sequence.tokens.extend(tokens);
                }
            }
            Command::Generate { session, request, events } => {
                let sampled = request.sampled.len();
                let begin = || Ok(Box::new(Generation::new(*request)?) as Box<dyn TokenSource>);
                self.generate(session, sampled, begin, events);
            }
            Command::Cancel { session } => self.cancel(&session),
            Command::Rest { session, reason } => self.rest(&session, reason),
            Command::Evict { session, reply } => self.evict_on_command(&session, reply),
            Command::Restore { session, mode, reply } => self.restore_on_command(session, mode, reply),
            Command::Fork { source, target, reply } => {
                let _ = reply.send(self.fork(&source, target));
            }
            Command::Cut { session, start, end, reply } => {
                let outcome = self.cut(&session, start, end);
                // Tokens whose KV is moved keep their names: nobody shares it.
                if let (Ok(false), Some(sequence)) = (&outcome, self.sequences.get(&session)) {
                    self.trace.cut(&session, start, &sequence.tokens);
                }
                let _ = reply.send(outcome.map(drop));
            }
            Command::Close { session } => self.close(&session),
            Command::View { session, reply } => {
                let _ = reply.send(self.view(&session));
            }
            Command::Device { reply } => {
                let _ = reply.send(Ok(self.device()));
            }
            Command::Host { reply } => {
                let _ = reply.send(Ok(self.host_view()));
            }
            Command::Tenants { reply } => {
                let _ = reply.send(Ok(self.tenants()));
            }
            Command::Settle { reply } => self.settling.push(reply),
        }
        self.trace.end();
    }

    pub(super) fn tier_answer(&mut self, answer: TierAnswer) {
        self.trace.answer(&answer);
        match answer {
            TierAnswer::Saved { session, chunk, bytes, outcome } => {
                self.saved(&session, &chunk, bytes, outcome);
            }
            TierAnswer::Loaded { restore, index, cells, seconds } => {
                self.loaded(restore, index, cells, seconds);
            }
        }
        self.trace.end();
    }

    fn settle(&mut self) {
        if self.saver.is_idle() {
            for reply in self.settling.drain(..) {
                let _ = reply.send(Ok(()));
            }
        }
    }

    pub(super) fn table(&self) -> BlockTable {
        BlockTable::with_shape(Arc::clone(&self.shape))
    }

    /// Begins a message of whose tokens the history holds `sampled` already.
    pub(super) fn generate(
        &mut self,
        session: Arc<str>,
        sampled: usize,
        begin: impl FnOnce() -> Result<Box<dyn TokenSource>, Error>,
        events: UnboundedSender<GenerationEvent>,
    ) {
        let failure = match self.sequences.get(&session) {
            None => Some(Error::no_session(&session)),
            Some(_) if self.is_busy(&session) => Some(busy(&session)),
            Some(sequence) if sequence.tokens.is_empty() => {
                Some(Error::invalid("empty_prompt", "the session has no tokens to continue from"))
            }
            Some(sequence) if sequence.length() >= self.options.context_length => {
                Some(context_exceeded(sequence.length(), self.options.context_length))
            }
            Some(_) => self.loss(),
        };
        let purpose = failure.map_or_else(
            || {
                let input_tokens = self.history_length(&session).saturating_sub(sampled);
                let generation = begin()?;
                Ok(Purpose::Message { generation, events: events.clone(), started: false, input_tokens })
            },
            Err,
        );
        match purpose {
            Ok(purpose) => {
                self.wake(&session);
                self.share_prefix(&session);
                self.enqueue(session, purpose, self.options.restore_mode);
            }
            Err(error) => {
                self.trace.discard();
                let _ = events.send(GenerationEvent::Failed(error));
            }
        }
    }

    fn restore_on_command(&mut self, session: Arc<str>, mode: RestoreMode, reply: Reply<RestoreReport>) {
        self.drop_prefetch(&session);
        let failure = match self.sequences.get(&session) {
            None => Some(Error::no_session(&session)),
            Some(_) if self.is_busy(&session) => Some(busy(&session)),
            Some(sequence) if sequence.known == 0 => {
                Some(Error::invalid("nothing_to_restore", format!("session '{session}' has no KV yet")))
            }
            Some(_) => self.loss(),
        };
        match failure {
            Some(error) => {
                let _ = reply.send(Err(error));
            }
            None => self.enqueue(session, Purpose::Restore { reply: Some(reply) }, mode),
        }
    }

    /// Whether a session has a job that it must wait for.
    fn is_busy(&self, session: &str) -> bool {
        self.job(session).is_some_and(|index| !matches!(self.jobs[index].purpose, Purpose::Prefetch))
    }

    /// Adds a job; one whose KV is on its way back already goes on with that.
    fn enqueue(&mut self, session: Arc<str>, purpose: Purpose, mode: RestoreMode) {
        match self.job(&session) {
            Some(index) => {
                let job = &mut self.jobs[index];
                (job.purpose, job.mode) = (purpose, mode);
                if let Phase::Restoring(run) = &mut job.phase {
                    run.hurry(mode);
                }
            }
            None => {
                let tenant = self.tenant_of(&session);
                let (phase, admission) = (Phase::Waiting, None);
                self.jobs.push_back(Job {
                    session,
                    tenant,
                    purpose,
                    phase,
                    mode,
                    admission,
                    computed_tokens: 0,
                });
            }
        }
    }

    fn history_length(&self, session: &str) -> usize {
        self.sequences.get(session).map_or(0, Sequence::length)
    }

    pub(super) fn job(&self, session: &str) -> Option<usize> {
        self.jobs.iter().position(|job| &*job.session == session)
    }

    fn cancel(&mut self, session: &str) {
        if let Some(index) = self.job(session)
            && matches!(self.jobs[index].purpose, Purpose::Message { .. })
        {
            self.finish_message(index, Finish::Cancelled, String::new());
        }
    }

    /// Ends a job's message and lets its KV rest.
    pub(super) fn finish_message(&mut self, index: usize, finish: Finish, text: String) {
        if let Some(job) = self.remove_job(index)
            && let Purpose::Message { events, .. } = job.purpose
        {
            let _ = events.send(GenerationEvent::Done { finish, text });
        }
    }

    /// Ends a job with an error.
    pub(super) fn fail_job(&mut self, index: usize, error: Error) {
        self.notice_loss(&error);
        match self.remove_job(index).map(|job| job.purpose) {
            Some(Purpose::Message { events, .. }) => {
                let _ = events.send(GenerationEvent::Failed(error));
            }
            Some(Purpose::Restore { reply: Some(reply) }) => {
                let _ = reply.send(Err(error));
            }
            _ => {}
        }
    }

    /// Takes a job off the list; a restore under way is given up first.
    pub(super) fn remove_job(&mut self, index: usize) -> Option<Job> {
        let job = self.jobs.remove(index)?;
        if matches!(job.phase, Phase::Restoring(_)) {
            self.abandon_restore(&job.session);
        }
        if let Some(sequence) = self.sequences.get_mut(&job.session) {
            sequence.last_used_ms = self.clock.monotonic_ms();
        }
        Some(job)
    }

    /// Keeps the measured costs for the next start, now and then.
    pub(super) fn keep_costs(&mut self) {
        let now = self.clock.monotonic();
        if now.saturating_sub(self.costs_kept) < COSTS_KEPT_EVERY {
            return;
        }
        self.costs_kept = now;
        if let Ok(costs) = serde_json::to_vec(&self.costs) {
            self.tier.ask(TierRequest::Remember { costs });
        }
    }

    /// Moves a session's KV to its next state and tells the observer.
    pub(super) fn change(
        &mut self,
        session: &str,
        event: KvEvent,
        reason: &str,
        bytes: u64,
        ms: f64,
    ) -> Option<KvTransition> {
        let sequence = self.sequences.get_mut(session)?;
        let from = sequence.apply(event);
        self.note_resident(session);
        let sequence = self.sequences.get(session)?;
        let to = sequence.state;
        if from == to {
            return None;
        }
        let tokens = match event {
            KvEvent::Evict | KvEvent::Drop | KvEvent::Restore | KvEvent::Refuse => sequence.known,
            _ => sequence.computed,
        } as u64;
        let change = KvTransition { from, to, reason: reason.to_owned(), tokens, bytes, ms };
        self.observer.transition(session, &change);
        Some(change)
    }
}

pub(super) fn busy(session: &str) -> Error {
    Error::new(
        ErrorKind::Conflict,
        "session_busy",
        format!("session '{session}' is writing a message or being restored; wait for it or cancel its turn"),
    )
}

pub(super) fn context_exceeded(tokens: usize, context: usize) -> Error {
    Error::invalid(
        "context_length_exceeded",
        format!(
            "the session has {tokens} tokens and the model's context holds {context}: start a new session or \
             send a shorter message"
        ),
    )
}
