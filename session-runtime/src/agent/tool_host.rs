//! The host functions of the tool world. Everything here acts through the call's [`ToolContext`].

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::bindings::tool::session_runtime::tool::{clock, files, log, progress, types};
use super::engine::Metered;
use super::failure::tool_failure;
use super::limits::{GuestLimits, Meter, Stop};
use super::tools::ToolContext;
use crate::session::tool::ToolFailure;

/// Data of the store of one call.
pub(super) struct ToolState {
    name: String,
    meter: Meter,
    cx: ToolContext,
}

impl ToolState {
    pub(super) fn new(name: &str, limits: &GuestLimits, cx: ToolContext) -> Self {
        Self { name: name.to_owned(), meter: Meter::new(limits), cx }
    }

    fn enter(&mut self) -> wasmtime::Result<()> {
        self.meter.host_call().map_err(wasmtime::Error::new)
    }
}

impl Metered for ToolState {
    fn meter(&mut self) -> &mut Meter {
        &mut self.meter
    }
}

/// Milliseconds since the Unix epoch.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn guest_error(failure: ToolFailure) -> types::Error {
    use types::ErrorKind as K;
    let kind = match failure.kind.as_str() {
        "invalid_input" => K::InvalidInput,
        "not_found" => K::NotFound,
        "denied" => K::Denied,
        "limit" => K::Limit,
        "cancelled" => K::Cancelled,
        "unavailable" => K::Unavailable,
        _ => K::Failed,
    };
    types::Error { kind, code: failure.code, message: failure.message, retryable: failure.retryable }
}

pub(super) fn host_failure(error: types::Error) -> ToolFailure {
    use types::ErrorKind as K;
    let kind = match error.kind {
        K::InvalidInput => "invalid_input",
        K::NotFound => "not_found",
        K::Denied => "denied",
        K::Limit => "limit",
        K::Cancelled => "cancelled",
        K::Unavailable => "unavailable",
        K::Failed => "failed",
    };
    ToolFailure {
        kind: kind.to_owned(),
        code: error.code,
        message: error.message,
        retryable: error.retryable,
    }
}

impl types::Host for ToolState {}

impl log::Host for ToolState {
    async fn write(&mut self, level: log::Level, message: String) -> wasmtime::Result<()> {
        self.enter()?;
        let Some(line) = self.meter.log_line(&message) else { return Ok(()) };
        let (tool, call) = (self.name.as_str(), self.cx.call_id());
        match level {
            log::Level::Debug => tracing::debug!(target: "guest", tool, call, "{line}"),
            log::Level::Info => tracing::info!(target: "guest", tool, call, "{line}"),
            log::Level::Warn => tracing::warn!(target: "guest", tool, call, "{line}"),
            log::Level::Error => tracing::error!(target: "guest", tool, call, "{line}"),
        }
        Ok(())
    }
}

impl clock::Host for ToolState {
    async fn now_ms(&mut self) -> wasmtime::Result<u64> {
        self.enter()?;
        Ok(now_ms())
    }

    async fn sleep_ms(&mut self, duration: u64) -> wasmtime::Result<Result<(), types::Error>> {
        self.enter()?;
        let duration = Duration::from_millis(duration);
        let remaining = self.cx.remaining();
        if duration >= remaining {
            let message = format!("the call has {} ms left", remaining.as_millis());
            return Ok(Err(guest_error(tool_failure("limit", "deadline", message))));
        }
        tokio::time::sleep(duration).await;
        self.meter.returned();
        Ok(Ok(()))
    }
}

impl progress::Host for ToolState {
    async fn report(&mut self, done: u64, total: u64, message: String) -> wasmtime::Result<()> {
        self.enter()?;
        self.cx.progress(done, total, &message);
        Ok(())
    }
}

/// Runs blocking file work beside the executor, so that a slow disk cannot hold up a deadline.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ToolFailure> + Send + 'static,
) -> wasmtime::Result<Result<T, types::Error>> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Ok(result.map_err(guest_error)),
        Err(error) => Err(wasmtime::Error::new(Stop::Host(crate::error::Error::internal(error)))),
    }
}

impl files::Host for ToolState {
    async fn grants(&mut self) -> wasmtime::Result<Vec<files::Grant>> {
        self.enter()?;
        let grants = self.cx.policy().grants();
        Ok(grants.into_iter().map(|(name, writable)| files::Grant { name, writable }).collect())
    }

    async fn list_directory(
        &mut self,
        grant: String,
        path: String,
    ) -> wasmtime::Result<Result<Vec<files::Entry>, types::Error>> {
        self.enter()?;
        let policy = Arc::clone(self.cx.policy());
        let listed = blocking(move || {
            let entries = policy.list(&grant, &path)?;
            let entry = |entry: super::policy::DirectoryEntry| files::Entry {
                name: entry.name,
                is_directory: entry.is_directory,
                size: entry.size,
            };
            Ok(entries.into_iter().map(entry).collect())
        })
        .await;
        self.meter.returned();
        listed
    }

    async fn read(
        &mut self,
        grant: String,
        path: String,
        offset: u64,
        length: u32,
    ) -> wasmtime::Result<Result<Vec<u8>, types::Error>> {
        self.enter()?;
        let policy = Arc::clone(self.cx.policy());
        let read = blocking(move || policy.read(&grant, &path, offset, u64::from(length))).await;
        self.meter.returned();
        read
    }
}
