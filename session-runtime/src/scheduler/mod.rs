//! The scheduler: one thread that owns the engine, the device's pages and every session's KV life.
//!
//! It admits messages, restores and evicts, batches the rows of running sessions into steps, and keeps
//! the device within its budget. Restores never evict each other (I9): victims are idle sessions; when
//! running ones outgrow the device, the youngest steps back and is restored later.
//!
//! Knows tokens, pages and cells; knows no guest, no journal and no HTTP.

mod cutting;
mod generation;
mod host;
mod host_control;
mod host_loads;
pub mod idle;
mod lookup;
mod loss;
mod packing;
mod port;
pub mod replay;
mod resting;
mod restoring;
mod room;
mod saving;
mod sequence;
mod sessions;
mod sharing;
pub mod simulation;
mod stepping;
pub mod tenants;
mod tier;
mod together;
pub mod trace;
mod view;
mod worker;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use kernels::backend::Backend;
use store::{Clock, Store};
use tokio::sync::{mpsc::UnboundedSender, oneshot};

use crate::engine::Engine;
use crate::error::{Error, ErrorKind};
use crate::kv::codec::KvCodec;
use crate::kv::contract::Contract;
use crate::kv::reuse::KvReuse;
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use tenants::{Tenant, TenantQuotas, TenantView};

pub use generation::GenerationRequest;
pub use host_control::HostControl;
pub use idle::{IdlePolicyName, RestReason};
pub use lookup::Speculation;
pub use view::{Finish, HostView, KvTransition, KvView, Relocation};

/// Messages that may wait for the scheduler.
const INBOX_MESSAGES: usize = 4096;

/// Told of every change of KV state and every restore, on the scheduler's thread: it must not block.
pub trait KvObserver: Send + 'static {
    /// A session's KV changed state.
    fn transition(&self, session: &str, transition: &KvTransition);
    /// A restore ended.
    fn restored(&self, session: &str, report: &RestoreReport);
    /// KV was moved to earlier positions. Who only counts what goes between tiers need not know.
    fn relocated(&self, _session: &str, _relocation: &Relocation) {}
}

/// How the scheduler keeps its device.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// How restores choose, unless a command says otherwise.
    pub restore_mode: RestoreMode,
    /// What becomes of KV while its session rests.
    pub idle_policy: IdlePolicyName,
    /// Idle time after which KV leaves the device unasked, milliseconds.
    pub idle_ttl_ms: u64,
    /// Most tokens of a session.
    pub context_length: usize,
    /// Whether sealed chunks are saved when a session becomes idle, so that they survive the process.
    pub save_when_idle: bool,
    /// When the next tokens are guessed from the history.
    pub speculation: Speculation,
    /// Whether a session that begins takes the KV of the tokens it has in common with others.
    pub share_prefixes: bool,
    /// Bytes of cells that host memory may hold; 0: there is no host tier.
    pub host_budget_bytes: u64,
    /// How slow or faulty the host tier is made.
    pub host_control: HostControl,
    /// How much of each tier each tenant may take.
    pub tenants: TenantQuotas,
    /// Seconds that a step may be predicted to take while sessions wait for their next token: it bounds the rows of a
    /// prompt that is read beside them.
    pub step_seconds: f64,
    /// Where a trace is written.
    pub trace: Option<trace::TraceOptions>,
}

/// What the scheduler is told of a session that it is to know.
#[derive(Debug, Default)]
pub struct OpenSession {
    /// Whose it is.
    pub tenant: Tenant,
    /// Its history.
    pub tokens: Vec<u32>,
    /// The contract that its cells were saved under; unset: nothing was saved.
    pub saved_under: Option<Contract>,
    /// Idle time after which its KV leaves the device unasked, milliseconds; unset: as of the runtime.
    pub idle_ttl_ms: Option<u64>,
    /// How its KV is packed when it leaves the device.
    pub codec: KvCodec,
    /// Whether it takes KV near what would be computed.
    pub reuse: KvReuse,
}

/// What a message told while it was written.
#[derive(Debug)]
pub enum GenerationEvent {
    /// The history before the message is on the device.
    Started {
        /// Tokens before the message.
        input_tokens: u64,
        /// Of these, tokens whose KV was not computed for it.
        cached_tokens: u64,
    },
    /// Tokens were sampled; `text` is what they let show.
    Token {
        /// The token.
        id: u32,
        /// Text that can be shown.
        text: String,
    },
    /// The message ended; `text` is what was held back.
    Done {
        /// Why.
        finish: Finish,
        /// The rest of the text.
        text: String,
    },
    /// The message cannot go on.
    Failed(Error),
}

/// What the device holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct DeviceView {
    /// Pages of the pool.
    pub pages_total: u64,
    /// Free pages.
    pub pages_free: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Sessions with KV on the device.
    pub sessions_resident: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Tokens computed since the start.
    pub tokens_computed: u64,
    /// Tokens whose KV was reused when a message began.
    pub tokens_reused: u64,
    /// Seconds of the scheduler's work.
    pub busy_seconds: f64,
    /// Those of them in the forward passes of steps.
    pub forward_seconds: f64,
    /// Tokens guessed from histories, and how many of them were right.
    pub tokens_guessed: [u64; 2],
}

type Reply<T> = oneshot::Sender<Result<T, Error>>;

/// What the scheduler is asked.
enum Command {
    Open { session: Arc<str>, opening: Box<OpenSession> },
    Append { session: Arc<str>, tokens: Vec<u32> },
    Generate { session: Arc<str>, request: Box<GenerationRequest>, events: UnboundedSender<GenerationEvent> },
    Cancel { session: Arc<str> },
    Rest { session: Arc<str>, reason: RestReason },
    Evict { session: Arc<str>, reply: Reply<KvTransition> },
    Restore { session: Arc<str>, mode: RestoreMode, reply: Reply<RestoreReport> },
    Fork { source: Arc<str>, target: Arc<str>, reply: Reply<()> },
    Cut { session: Arc<str>, start: usize, end: usize, reply: Reply<()> },
    Close { session: Arc<str> },
    View { session: Arc<str>, reply: Reply<KvView> },
    Device { reply: Reply<DeviceView> },
    Host { reply: Reply<HostView> },
    Tenants { reply: Reply<Vec<TenantView>> },
    Settle { reply: Reply<()> },
}

enum Message {
    Command(Command),
    Tier(tier::TierAnswer),
    Stop,
}

/// Handle of the scheduler's thread.
pub struct Scheduler {
    inbox: SyncSender<Message>,
    thread: Option<JoinHandle<()>>,
    stopping: Arc<AtomicBool>,
    lost: Arc<OnceLock<Error>>,
}

impl Scheduler {
    /// Starts the thread with an engine and a store.
    ///
    /// # Errors
    /// `host_budget_too_small`, `trace_exists`, `trace_unwritable`, or the thread cannot be started.
    pub fn start<B: Backend>(
        engine: Engine<B>,
        store: Store,
        contract: Contract,
        options: SchedulerOptions,
        clock: Arc<dyn Clock>,
        observer: Box<dyn KvObserver>,
    ) -> Result<Self, Error> {
        host_loads::check_budget(&engine, options.host_budget_bytes)?;
        let (inbox, messages) = sync_channel(INBOX_MESSAGES);
        let stopping = Arc::new(AtomicBool::new(false));
        let answers = inbox.clone();
        let tier = tier::Tier::start(store, move |answer| {
            // The scheduler may be gone already; its answers are then of no use.
            let _ = answers.send(Message::Tier(answer));
        })?;
        let lost = Arc::new(OnceLock::new());
        let surroundings = trace::Surroundings { tier: Box::new(tier), contract, options, clock, observer };
        let (surroundings, recorder) = surroundings.traced(&engine)?;
        let (stop, losing) = (Arc::clone(&stopping), Arc::clone(&lost));
        let thread = std::thread::Builder::new()
            .name("scheduler".into())
            .spawn(move || {
                worker::Worker::new(engine, surroundings, recorder, stop).telling_loss(losing).run(&messages);
            })
            .map_err(Error::internal)?;
        Ok(Self { inbox, thread: Some(thread), stopping, lost })
    }

    /// Why nothing runs on the device any more, if it is lost.
    pub fn device_lost(&self) -> Option<Error> {
        self.lost.get().cloned()
    }

    fn send(&self, command: Command) -> Result<(), Error> {
        self.inbox.try_send(Message::Command(command)).map_err(|error| match error {
            TrySendError::Full(_) => Error::new(
                ErrorKind::Limit,
                "queue_full",
                format!("the scheduler's queue of {INBOX_MESSAGES} messages is full; try again shortly"),
            )
            .retryable(),
            TrySendError::Disconnected(_) => {
                Error::new(ErrorKind::Unavailable, "stopped", "the scheduler has stopped")
            }
        })
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply))?;
        answer
            .await
            .map_err(|_| Error::new(ErrorKind::Unavailable, "stopped", "the scheduler has stopped"))?
    }

    /// Makes a session known.
    ///
    /// # Errors
    /// The queue is full or the scheduler has stopped (also for every method below).
    pub fn open(&self, session: &Arc<str>, opening: OpenSession) -> Result<(), Error> {
        self.send(Command::Open { session: Arc::clone(session), opening: Box::new(opening) })
    }

    /// Appends given tokens to a session's history.
    pub fn append(&self, session: &Arc<str>, tokens: Vec<u32>) -> Result<(), Error> {
        self.send(Command::Append { session: Arc::clone(session), tokens })
    }

    /// Begins a message; what happens is told through `events`.
    pub fn generate(
        &self,
        session: &Arc<str>,
        request: GenerationRequest,
        events: UnboundedSender<GenerationEvent>,
    ) -> Result<(), Error> {
        self.send(Command::Generate { session: Arc::clone(session), request: Box::new(request), events })
    }

    /// Ends the session's message with [`Finish::Cancelled`].
    pub fn cancel(&self, session: &Arc<str>) -> Result<(), Error> {
        self.send(Command::Cancel { session: Arc::clone(session) })
    }

    /// Tells that the session will not generate for a while.
    pub fn rest(&self, session: &Arc<str>, reason: RestReason) -> Result<(), Error> {
        self.send(Command::Rest { session: Arc::clone(session), reason })
    }

    /// Saves the session's KV and drops the device copy. Refused while a message is written.
    pub async fn evict(&self, session: &Arc<str>) -> Result<KvTransition, Error> {
        self.ask(|reply| Command::Evict { session: Arc::clone(session), reply }).await
    }

    /// Brings the session's KV back to the device.
    pub async fn restore(&self, session: &Arc<str>, mode: RestoreMode) -> Result<RestoreReport, Error> {
        self.ask(|reply| Command::Restore { session: Arc::clone(session), mode, reply }).await
    }

    /// Makes `target` known with the history of `source`, sharing its pages.
    pub async fn fork(&self, source: &Arc<str>, target: &Arc<str>) -> Result<(), Error> {
        let (source, target) = (Arc::clone(source), Arc::clone(target));
        self.ask(|reply| Command::Fork { source, target, reply }).await
    }

    /// Removes tokens `start..end` from the history; what follows is recomputed when next used, or moved where the session
    /// takes KV near what would be computed.
    pub async fn cut(&self, session: &Arc<str>, start: usize, end: usize) -> Result<(), Error> {
        self.ask(|reply| Command::Cut { session: Arc::clone(session), start, end, reply }).await
    }

    /// Forgets a session and frees its pages.
    pub fn close(&self, session: &Arc<str>) -> Result<(), Error> {
        self.send(Command::Close { session: Arc::clone(session) })
    }

    /// Where a session's KV is.
    pub async fn view(&self, session: &Arc<str>) -> Result<KvView, Error> {
        self.ask(|reply| Command::View { session: Arc::clone(session), reply }).await
    }

    /// What the device holds.
    pub async fn device(&self) -> Result<DeviceView, Error> {
        self.ask(|reply| Command::Device { reply }).await
    }

    /// What host memory holds.
    pub async fn host(&self) -> Result<HostView, Error> {
        self.ask(|reply| Command::Host { reply }).await
    }

    /// What each tenant holds.
    pub async fn tenants(&self) -> Result<Vec<TenantView>, Error> {
        self.ask(|reply| Command::Tenants { reply }).await
    }

    /// Waits until nothing is left to save.
    pub async fn settle(&self) -> Result<(), Error> {
        self.ask(|reply| Command::Settle { reply }).await
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        // A full inbox is fine: the flag is seen at the next message.
        let _ = self.inbox.try_send(Message::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
