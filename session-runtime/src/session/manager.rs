//! Every session of a runtime: created, listed, forked, deleted, brought back at start, and kept
//! within its TTLs.

use std::sync::{Arc, Weak};
use std::time::Duration;

use serde_json::Value;

use super::driver::Drivers;
use super::event::SessionEvent;
use super::host::SessionHost;
use super::live::{Session, SessionMap, expires_ms, store_failed};
use super::record::SessionRecord;
use super::scope::{Placed, append_message, segment_view};
use super::spec::{Retention, Role, SegmentKind, SessionSpec};
use super::view::{Event, KvTransition, SegmentView, SessionView};
use crate::error::{Error, ErrorKind};
use crate::ids;
use crate::restore::plan::RestoreMode;
use crate::restore::report::RestoreReport;
use crate::scheduler::OpenSession;
use crate::scheduler::tenants::Tenant;

/// How often expired segments are looked for.
const SWEEP: Duration = Duration::from_secs(1);
/// Events of one journal read.
const READ_EVENTS: usize = 1024;

/// Refuses a tenant that is not named as ids are.
fn check_tenant(name: Option<&str>) -> Result<(), Error> {
    match name {
        Some(name) if !ids::is_valid(name) => Err(Error::invalid(
            "tenant_invalid",
            "a tenant's name has 1 to 64 letters, digits, '_', '-' or '.': leave it out for none",
        )),
        _ => Ok(()),
    }
}

/// The sessions of a runtime.
pub struct SessionManager {
    host: Arc<SessionHost>,
    sessions: Arc<SessionMap>,
    drivers: Arc<dyn Drivers>,
}

impl SessionManager {
    /// Brings every session of the journal back. `resume` lets interrupted turns go on.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn open(
        host: Arc<SessionHost>,
        sessions: Arc<SessionMap>,
        drivers: Arc<dyn Drivers>,
        resume: bool,
    ) -> Result<Arc<Self>, Error> {
        let manager = Arc::new(Self { host, sessions, drivers });
        for listed in manager.host.store.journal().sessions() {
            manager.load(&listed.session)?;
        }
        for session in manager.sessions.all() {
            if session.record().spec.ephemeral {
                manager.forget(&session)?;
            } else if resume {
                session.resume_turns(manager.drivers.as_ref());
            }
        }
        manager.sweep_in_background();
        Ok(manager)
    }

    /// Folds one session's events.
    fn load(&self, id: &str) -> Result<(), Error> {
        let mut record: Option<SessionRecord> = None;
        let mut after = 0;
        loop {
            let events = self.host.store.journal().read(id, after, READ_EVENTS).map_err(store_failed)?;
            let Some(last) = events.last() else { break };
            after = last.seq;
            for event in events {
                let body = match SessionEvent::decode(&event.kind, &event.payload) {
                    Ok(body) => body,
                    Err(error) => {
                        tracing::error!(session = id, seq = event.seq, %error, "event not understood");
                        continue;
                    }
                };
                match &mut record {
                    Some(record) => record.apply(event.seq, event.time_ms, body),
                    None => {
                        record = SessionRecord::begin(&body);
                        if let Some(record) = &mut record {
                            record.apply(event.seq, event.time_ms, body);
                        }
                    }
                }
            }
        }
        let Some(record) = record else {
            tracing::error!(session = id, "the session's first event is missing: it is not listed");
            return Ok(());
        };
        let id: Arc<str> = id.into();
        let idle = record.spec.idle_ttl_seconds.map(|seconds| seconds.saturating_mul(1000));
        let saved_under = (!record.tokens.is_empty()).then(|| record.contract.clone());
        let opening = OpenSession {
            tenant: Tenant::named(record.spec.tenant.as_deref()),
            tokens: record.tokens.clone(),
            saved_under,
            idle_ttl_ms: idle,
            codec: record.spec.kv_codec,
            reuse: record.spec.kv_reuse,
        };
        self.host.scheduler.open(&id, opening)?;
        let session = Session::new(id, Arc::clone(&self.host), record);
        // The index of deadlines may have been rebuilt; the journal has the segments.
        session.index_deadlines();
        self.sessions.insert(session);
        Ok(())
    }

    /// A session by its id.
    ///
    /// # Errors
    /// `session_not_found`.
    pub fn get(&self, id: &str) -> Result<Arc<Session>, Error> {
        self.sessions.get(id).ok_or_else(|| Error::no_session(id))
    }

    /// What every session shares.
    pub fn host(&self) -> &Arc<SessionHost> {
        &self.host
    }

    /// What drives turns.
    pub fn drivers(&self) -> &dyn Drivers {
        self.drivers.as_ref()
    }

    /// How many sessions there are.
    pub fn count(&self) -> usize {
        self.sessions.count()
    }

    fn new_id(&self, wanted: Option<String>) -> Result<Arc<str>, Error> {
        let limit = self.host.limits.sessions;
        if self.sessions.count() >= limit {
            return Err(Error::new(
                ErrorKind::Limit,
                "too_many_sessions",
                format!("there are {limit} sessions already: delete some, or raise the limit"),
            ));
        }
        let id = wanted.unwrap_or_else(|| ids::fresh("sess"));
        if !ids::is_valid(&id) {
            return Err(Error::invalid(
                "invalid_request",
                "a session id has 1 to 64 letters, digits, '_', '-' or '.'",
            ));
        }
        if self.sessions.get(&id).is_some() {
            return Err(Error::new(
                ErrorKind::Conflict,
                "session_exists",
                format!("there is a session '{id}' already: continue it, or choose another id"),
            ));
        }
        Ok(id.into())
    }

    /// Creates a session.
    ///
    /// # Errors
    /// `session_exists`, `too_many_sessions`, `tenant_invalid`, an unknown agent, or the store.
    pub async fn create(&self, spec: SessionSpec) -> Result<Arc<Session>, Error> {
        super::host::sampling_params(&spec.sampling)?;
        self.drivers.driver(&spec)?;
        self.host.check_codec(spec.kv_codec)?;
        check_tenant(spec.tenant.as_deref())?;
        let id = self.new_id(spec.id.clone())?;
        let opening = OpenSession {
            tenant: Tenant::named(spec.tenant.as_deref()),
            idle_ttl_ms: spec.idle_ttl_seconds.map(|seconds| seconds.saturating_mul(1000)),
            codec: spec.kv_codec,
            reuse: spec.kv_reuse,
            ..OpenSession::default()
        };
        let event = SessionEvent::Created {
            spec: Box::new(spec),
            model: self.host.model.clone(),
            contract: Box::new(self.host.contract.clone()),
        };
        let session = self.begin(id, event).await?;
        self.host.scheduler.open(&session.id, opening)?;
        Ok(session)
    }

    async fn begin(&self, id: Arc<str>, event: SessionEvent) -> Result<Arc<Session>, Error> {
        let record =
            SessionRecord::begin(&event).ok_or_else(|| Error::internal("not a session's first event"))?;
        let session = Session::new(id, Arc::clone(&self.host), record);
        self.sessions.insert(Arc::clone(&session));
        if let Err(error) = session.write(event).await {
            self.sessions.remove(&session.id);
            return Err(error);
        }
        Ok(session)
    }

    /// Makes a session with the history of another one, sharing its pages.
    ///
    /// # Errors
    /// `session_busy` while the source runs a turn, `session_exists`, or the store.
    pub async fn fork(
        &self,
        source: &Arc<Session>,
        id: Option<String>,
        title: Option<String>,
    ) -> Result<Arc<Session>, Error> {
        let id = self.new_id(id)?;
        let _permit = source.hold().await?;
        let event = {
            let record = source.record();
            let mut spec = record.spec.clone();
            spec.id = Some(id.to_string());
            spec.title = title.or(spec.title);
            SessionEvent::Forked {
                parent: source.id.to_string(),
                spec: Box::new(spec),
                model: record.model.clone(),
                contract: Box::new(record.contract.clone()),
                tokens: record.tokens.clone(),
                segments: record.segments.clone(),
                state: record
                    .state
                    .iter()
                    .map(|(key, value)| (key.clone(), Value::from(value.clone())))
                    .collect(),
                agent_started: record.agent_started,
                turns: record.turn_number(),
            }
        };
        let session = self.begin(id, event).await?;
        session.index_deadlines();
        self.host.scheduler.fork(&source.id, &session.id).await?;
        Ok(session)
    }

    /// Deletes a session: its turn is cancelled, its events are removed.
    ///
    /// # Errors
    /// The store.
    pub async fn delete(&self, session: &Arc<Session>) -> Result<(), Error> {
        if let Some(running) = &*session.running() {
            running.cancel.send_replace(true);
        }
        // Queued turns find the gate closed; the running one ends first.
        if let Ok(permit) = session.gate.acquire().await {
            permit.forget();
        }
        self.forget(session)
    }

    fn forget(&self, session: &Arc<Session>) -> Result<(), Error> {
        session.gate.close();
        self.sessions.remove(&session.id);
        self.host.scheduler.close(&session.id)?;
        self.host.store.segments().remove_session(&session.id).map_err(store_failed)?;
        self.host.store.journal().remove_session(&session.id).map_err(store_failed)?;
        session.wake_waiters();
        Ok(())
    }

    /// Appends a message between turns.
    ///
    /// # Errors
    /// `session_busy`, `context_length_exceeded`, or the store.
    pub async fn append_message(&self, session: &Arc<Session>, role: Role, text: &str) -> Result<(), Error> {
        let _permit = session.hold().await?;
        let kind = match role {
            Role::System => SegmentKind::System,
            Role::User => SegmentKind::User,
            Role::Assistant => SegmentKind::Answer,
            Role::Tool => SegmentKind::ToolResult,
        };
        let placed = Placed { call: None, turn: None, role, kind, retention: Retention::Keep };
        append_message(session, placed, text).await?;
        Ok(())
    }

    /// A session as clients see it.
    ///
    /// # Errors
    /// The scheduler has stopped.
    pub async fn view(&self, session: &Session) -> Result<SessionView, Error> {
        let kv = self.host.scheduler.view(&session.id).await?;
        let record = session.record();
        Ok(SessionView {
            id: session.id.to_string(),
            model: record.model.clone(),
            status: record.status(),
            spec: record.spec.clone(),
            created_ms: record.created_ms,
            updated_ms: record.updated_ms,
            parent: record.parent.clone(),
            turns: record.turn_number(),
            tokens: record.tokens.len() as u64,
            last_event: record.last_event,
            usage: record.usage,
            kv,
        })
    }

    /// Every session as clients see it, by creation.
    pub async fn views(&self) -> Vec<SessionView> {
        let mut views = Vec::new();
        for session in self.sessions.all() {
            // One that was deleted meanwhile is left out.
            if let Ok(view) = self.view(&session).await {
                views.push(view);
            }
        }
        views
    }

    /// Durable events after `after`, at most `limit`. Every one of them has taken effect: who has read that a turn ended
    /// finds it ended.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn events(&self, session: &Session, after: u64, limit: usize) -> Result<Vec<Event>, Error> {
        let (store, id) = (self.host.store.clone(), Arc::clone(&session.id));
        // The journal can be a moment ahead of the record.
        let applied = session.last_applied();
        let records = tokio::task::spawn_blocking(move || store.journal().read(&id, after, limit))
            .await
            .map_err(Error::internal)?
            .map_err(store_failed)?;
        records
            .into_iter()
            .take_while(|record| record.seq <= applied)
            .map(|record| {
                Ok(Event {
                    seq: record.seq,
                    kind: record.kind,
                    time_ms: record.time_ms,
                    session: session.id.to_string(),
                    data: serde_json::from_slice(&record.payload)?,
                })
            })
            .collect()
    }

    /// The session's segments.
    pub fn segments(&self, session: &Session) -> Vec<SegmentView> {
        session.record().segments.iter().map(segment_view).collect()
    }

    /// Saves the session's KV and drops the device copy; of a session that is evicted nothing is left to do, and the
    /// transition moves no bytes.
    ///
    /// # Errors
    /// `session_busy`; `not_resident` where there is no KV at all.
    pub async fn evict(&self, session: &Session) -> Result<KvTransition, Error> {
        self.host.scheduler.evict(&session.id).await
    }

    /// Brings the session's KV back to the device.
    ///
    /// # Errors
    /// `session_busy`, `kv_capacity`, `nothing_to_restore`.
    pub async fn restore(&self, session: &Session, mode: RestoreMode) -> Result<RestoreReport, Error> {
        self.host.scheduler.restore(&session.id, mode).await
    }

    /// Cuts segments whose TTL has passed, for as long as the manager lives.
    fn sweep_in_background(self: &Arc<Self>) {
        let manager: Weak<Self> = Arc::downgrade(self);
        tokio::spawn(async move {
            let mut tick = tokio::time::interval(SWEEP);
            loop {
                tick.tick().await;
                let Some(manager) = manager.upgrade() else { return };
                manager.sweep().await;
            }
        });
    }

    /// Cuts segments whose TTL has passed. A session that runs a turn keeps its segments until the turn
    /// has ended: an outstanding tool call may depend on them.
    pub async fn sweep(&self) {
        let now = self.host.clock.now_ms();
        let report = match self.host.store.segments().sweep(now) {
            Ok(report) => report,
            Err(error) => {
                tracing::warn!(%error, "segments not swept");
                return;
            }
        };
        for expired in report.expired {
            let Some(session) = self.sessions.get(&expired.session) else { continue };
            let id = expired.id.rsplit('/').next().unwrap_or_default();
            let permit = session.gate.try_acquire();
            let segment = session.record().segment(id).cloned();
            let Some(segment) = segment else { continue };
            if permit.is_err() || expires_ms(&segment).is_some_and(|deadline| deadline > now) {
                // Back into the index: it is due again at the next tick, or later.
                session.index_segment(&segment, None);
                continue;
            }
            if expires_ms(&segment).is_some()
                && let Err(error) = session.cut_segment(id, "expired").await
            {
                tracing::warn!(session = %session.id, segment = id, %error, "segment not cut");
            }
        }
    }
}
