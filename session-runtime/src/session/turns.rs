//! Turns: begun by at most one writer, run to their end whoever listens, resumed after a crash.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::{OwnedSemaphorePermit, watch};

use super::driver::{Drivers, TurnDriver};
use super::event::SessionEvent;
use super::live::{RunningTurn, Session};
use super::record::TurnRecord;
use super::scope::TurnScope;
use super::spec::{OnBusy, Retention, TurnRequest};
use super::view::{SessionStatus, TurnError, TurnStatus, TurnView, Usage};
use crate::error::{Error, ErrorKind};
use crate::ids;
use crate::kv::contract::{Place, Relation};
use crate::scheduler::RestReason;

impl Session {
    /// Begins a turn, or gives the turn that this id began before. It runs on whoever listens.
    ///
    /// # Errors
    /// `session_busy`, `queue_full`, `contract_mismatch`, what is wrong with the request, or the store.
    pub async fn start_turn(
        self: &Arc<Self>,
        request: TurnRequest,
        drivers: &dyn Drivers,
    ) -> Result<TurnView, Error> {
        let _starting = self.starting.lock().await;
        if let Some(id) = &request.turn_id {
            if !ids::is_valid(id) {
                return Err(Error::invalid(
                    "invalid_request",
                    "turn_id has characters other than letters, digits, '_', '-' and '.'",
                ));
            }
            if let Some(turn) = self.record().turn(id) {
                return Ok(self.turn_view(turn));
            }
        }
        self.check_turn(&request)?;
        let driver = drivers.driver(&self.record().spec)?;
        let turn = request.turn_id.clone().unwrap_or_else(|| ids::fresh("turn"));
        match self.hold().await {
            Ok(permit) => {
                self.begin_turn(&turn, request).await?;
                self.spawn_turn(turn.clone(), driver, permit);
            }
            Err(_) if request.on_busy == OnBusy::Enqueue => {
                self.enqueue_turn(&turn, request, driver).await?;
            }
            Err(busy) => return Err(busy),
        }
        self.turn(&turn)
    }

    /// Takes the right to write.
    ///
    /// # Errors
    /// `session_busy` while a turn runs or waits.
    pub(super) async fn hold(&self) -> Result<OwnedSemaphorePermit, Error> {
        if let Ok(permit) = Arc::clone(&self.gate).try_acquire_owned() {
            return Ok(permit);
        }
        // A turn that is on record as ended gives its permit back within moments.
        let ended = self.record().status() != SessionStatus::Running;
        if ended && self.queued.load(Ordering::Relaxed) == 0 {
            return Arc::clone(&self.gate).acquire_owned().await.map_err(|_| Error::no_session(&self.id));
        }
        Err(self.busy())
    }

    fn busy(&self) -> Error {
        Error::new(
            ErrorKind::Conflict,
            "session_busy",
            format!(
                "session '{}' is running a turn: wait for it, cancel it, or send on_busy: enqueue",
                self.id
            ),
        )
    }

    /// Refuses what can be known to fail before anything is written.
    fn check_turn(&self, request: &TurnRequest) -> Result<(), Error> {
        super::host::sampling_params(&request.sampling)?;
        self.host.constraint(&request.constraint)?;
        let record = self.record();
        // Ids mean another text under another tokenizer. KV of other weights is refused cell by cell and recomputed.
        if let Relation::Destroy(_) =
            self.host.contract.relation(&record.contract, Place::Same, record.spec.kv_reuse)
        {
            return Err(Error::new(
                ErrorKind::Conflict,
                "contract_mismatch",
                format!(
                    "session '{}' belongs to model '{}' and differs from the loaded model '{}' in \
                     tokenizer_digest, so its tokens mean nothing here: start the runtime with that model, or \
                     create a new session",
                    self.id, record.model, self.host.model
                ),
            ));
        }
        let tokens = record.tokens.len();
        drop(record);
        let message = self.host.encode_message(super::spec::Role::User, &request.input, tokens == 0)?.len();
        self.host.check_context(tokens + message)
    }

    async fn begin_turn(self: &Arc<Self>, turn: &str, request: TurnRequest) -> Result<(), Error> {
        let number = self.record().turn_number() + 1;
        let event = SessionEvent::TurnStarted {
            turn: turn.to_owned(),
            number,
            input: request.input.clone(),
            request: Box::new(request),
        };
        self.write(event).await?;
        Ok(())
    }

    async fn enqueue_turn(
        self: &Arc<Self>,
        turn: &str,
        request: TurnRequest,
        driver: Arc<dyn TurnDriver>,
    ) -> Result<(), Error> {
        let limit = self.host.limits.queued_turns;
        if self.queued.fetch_add(1, Ordering::Relaxed) >= limit {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            return Err(Error::new(
                ErrorKind::Limit,
                "queue_full",
                format!("{limit} turns wait for session '{}' already; try again later", self.id),
            )
            .retryable());
        }
        let event = SessionEvent::TurnQueued { turn: turn.to_owned(), request: Box::new(request.clone()) };
        if let Err(error) = self.write(event).await {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            return Err(error);
        }
        self.spawn_queued(turn.to_owned(), request, driver);
        Ok(())
    }

    fn spawn_queued(self: &Arc<Self>, turn: String, request: TurnRequest, driver: Arc<dyn TurnDriver>) {
        let session = Arc::clone(self);
        tokio::spawn(async move {
            let permit = Arc::clone(&session.gate).acquire_owned().await;
            session.queued.fetch_sub(1, Ordering::Relaxed);
            let queued = session.record().turn(&turn).is_some_and(|turn| turn.status == TurnStatus::Queued);
            let Ok(permit) = permit else { return };
            if !queued {
                return;
            }
            match session.begin_turn(&turn, request).await {
                Ok(()) => session.spawn_turn(turn, driver, permit),
                Err(error) => tracing::error!(session = %session.id, turn, %error, "queued turn not begun"),
            }
        });
    }

    /// Runs a turn that is on record as running, in its own task.
    fn spawn_turn(self: &Arc<Self>, turn: String, driver: Arc<dyn TurnDriver>, permit: OwnedSemaphorePermit) {
        let (cancel, cancelled) = watch::channel(false);
        *self.running() = Some(RunningTurn { id: turn.clone(), cancel });
        let session = Arc::clone(self);
        tokio::spawn(async move {
            let outcome = match TurnScope::new(Arc::clone(&session), &turn, cancelled) {
                Some(scope) => {
                    let (mut scope, outcome) = driver.run(scope).await;
                    let closed = scope.abandon_message().await;
                    let cancelled = scope.is_cancelled();
                    (outcome.and(closed), cancelled)
                }
                None => (Err(Error::internal(format!("turn {turn} is not on record"))), false),
            };
            if let Err(error) = session.end_turn(&turn, outcome).await {
                tracing::error!(session = %session.id, turn, %error, "turn not ended");
            }
            *session.running() = None;
            drop(permit);
        });
    }

    async fn end_turn(
        self: &Arc<Self>,
        turn: &str,
        (outcome, cancelled): (Result<(), Error>, bool),
    ) -> Result<(), Error> {
        self.drop_after_turn(turn).await?;
        let (status, error) = match outcome {
            _ if cancelled => (TurnStatus::Cancelled, None),
            Ok(()) => (TurnStatus::Completed, None),
            Err(error) => {
                let status = match &*error.code {
                    "outcome_unknown" => TurnStatus::RequiresAction,
                    _ => TurnStatus::Failed,
                };
                tracing::warn!(session = %self.id, turn, code = %error.code, %error, "turn ended with an error");
                let Error { code, message, retryable, .. } = error;
                (status, Some(TurnError { code: code.into_owned(), message, retryable }))
            }
        };
        self.host.scheduler.rest(&self.id, RestReason::EndOfTurn)?;
        let (finish, usage) =
            self.record().turn(turn).map_or((None, Usage::default()), |turn| (turn.finish, turn.usage));
        let turn = turn.to_owned();
        self.write(SessionEvent::TurnFinished { turn, status, finish, error, usage }).await?;
        Ok(())
    }

    /// Cuts the segments that were to live no longer than this turn, and gives the others their deadlines:
    /// those the turn made, and those it changed its mind about.
    async fn drop_after_turn(self: &Arc<Self>, turn: &str) -> Result<(), Error> {
        let segments = self.record().segments_of(turn);
        for segment in segments {
            match segment.retention {
                Retention::DropAfterTurn => self.cut_segment(&segment.id, "drop_after_turn").await?,
                Retention::Expire { .. } => self.index_segment(&segment, None),
                Retention::Keep => {}
            }
        }
        Ok(())
    }

    /// Removes a segment from the history; what follows it is recomputed when next used, or moved. The caller
    /// holds the session's gate.
    pub(super) async fn cut_segment(self: &Arc<Self>, segment: &str, reason: &str) -> Result<(), Error> {
        let Some((start, end)) = self.record().segment(segment).map(|segment| (segment.start, segment.end))
        else {
            return Ok(());
        };
        let event =
            SessionEvent::SegmentCut { segment: segment.to_owned(), start, end, reason: reason.to_owned() };
        self.write(event).await?;
        self.host.scheduler.cut(&self.id, start as usize, end as usize).await
    }

    /// Goes on with the turns that a crash interrupted, and with those that waited.
    pub(super) fn resume_turns(self: &Arc<Self>, drivers: &dyn Drivers) {
        let waits = |turn: &TurnRecord| matches!(turn.status, TurnStatus::Running | TurnStatus::Queued);
        let turns: Vec<TurnRecord> = self.record().turns.iter().filter(|turn| waits(turn)).cloned().collect();
        if turns.is_empty() {
            return;
        }
        let driver = match drivers.driver(&self.record().spec) {
            Ok(driver) => driver,
            Err(error) => {
                tracing::warn!(session = %self.id, %error, "interrupted turns stay interrupted");
                return;
            }
        };
        for turn in turns {
            if turn.status == TurnStatus::Queued {
                self.queued.fetch_add(1, Ordering::Relaxed);
                self.spawn_queued(turn.id, turn.request, Arc::clone(&driver));
            } else if let Ok(permit) = Arc::clone(&self.gate).try_acquire_owned() {
                tracing::info!(session = %self.id, turn = turn.id, "resuming an interrupted turn");
                self.spawn_turn(turn.id, Arc::clone(&driver), permit);
            }
        }
    }

    /// Asks a turn to stop.
    ///
    /// # Errors
    /// `turn_not_found`, or the store.
    pub async fn cancel_turn(self: &Arc<Self>, turn: &str) -> Result<TurnView, Error> {
        let view = self.turn(turn)?;
        match view.status {
            TurnStatus::Running => {
                if let Some(running) = &*self.running()
                    && running.id == turn
                {
                    running.cancel.send_replace(true);
                }
            }
            TurnStatus::Queued => {
                let event = SessionEvent::TurnFinished {
                    turn: turn.to_owned(),
                    status: TurnStatus::Cancelled,
                    finish: None,
                    error: None,
                    usage: Usage::default(),
                };
                self.write(event).await?;
            }
            _ => {}
        }
        self.turn(turn)
    }

    /// A turn as clients see it.
    ///
    /// # Errors
    /// `turn_not_found`.
    pub fn turn(&self, turn: &str) -> Result<TurnView, Error> {
        let record = self.record();
        record.turn(turn).map(|turn| self.turn_view(turn)).ok_or_else(|| {
            Error::not_found("turn_not_found", format!("session '{}' has no turn '{turn}'", self.id))
        })
    }

    /// Every turn, in order.
    pub fn turns(&self) -> Vec<TurnView> {
        self.record().turns.iter().map(|turn| self.turn_view(turn)).collect()
    }

    fn turn_view(&self, turn: &TurnRecord) -> TurnView {
        TurnView {
            id: turn.id.clone(),
            session: self.id.to_string(),
            number: turn.number,
            status: turn.status,
            output_text: turn.output_text.clone(),
            finish: turn.finish,
            usage: turn.usage,
            error: turn.error.clone(),
            first_event: turn.first_event,
            restores: turn.restores.clone(),
        }
    }

    /// Waits until a turn is neither queued nor running.
    ///
    /// # Errors
    /// `turn_not_found`, or the session was deleted.
    pub async fn wait_turn(&self, turn: &str) -> Result<TurnView, Error> {
        loop {
            let seen = self.record().last_event;
            let view = self.turn(turn)?;
            if !matches!(view.status, TurnStatus::Queued | TurnStatus::Running) {
                return Ok(view);
            }
            self.wait_events(seen).await?;
        }
    }
}
