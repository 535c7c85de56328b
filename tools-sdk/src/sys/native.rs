//! The imports on the host: calls into the mock that is installed on this thread, see [`crate::testing::Host`].
//! Outside of one, reading gives nothing and doing fails as `no_host`.

use crate::agent::chat::{Chunk, Options, Retention, Role, Segment, SegmentKind};
use crate::agent::context::{RestoreReport, Status};
use crate::agent::{segments, tools};
use crate::log::Level;
use crate::testing::{self, Reply};
use crate::tool::files::{Entry, Grant};
use crate::{Error, ErrorKind};

fn no_host() -> Error {
    Error::new(ErrorKind::Unavailable, "no_host", "no testing::Host is installed on this thread")
}

pub(crate) fn log(level: Level, message: &str) {
    testing::with(|host| host.logs.push((level, message.to_owned())));
}

pub(crate) fn now_ms() -> u64 {
    testing::with(|host| host.now_ms).unwrap_or(0)
}

pub(crate) fn sleep_ms(duration: u64) -> Result<(), Error> {
    testing::with(|host| host.sleep(duration)).unwrap_or_else(|| Err(no_host()))
}

pub(crate) fn progress(done: u64, total: u64, message: &str) {
    testing::with(|host| host.progress.push((done, total, message.to_owned())));
}

pub(crate) fn files_grants() -> Vec<Grant> {
    testing::with(|host| host.files.grants()).unwrap_or_default()
}

pub(crate) fn files_list(grant: &str, path: &str) -> Result<Vec<Entry>, Error> {
    testing::with(|host| host.files.list(grant, path)).unwrap_or_else(|| Err(no_host()))
}

pub(crate) fn files_read(grant: &str, path: &str, offset: u64, length: u32) -> Result<Vec<u8>, Error> {
    testing::with(|host| host.files.read(grant, path, offset, length)).unwrap_or_else(|| Err(no_host()))
}

pub(crate) fn session_id() -> String {
    "sess_test".to_owned()
}

pub(crate) fn session_params() -> String {
    testing::with(|host| host.params.clone()).unwrap_or_default()
}

pub(crate) fn session_turn() -> u32 {
    testing::with(|host| host.turn).unwrap_or(1)
}

pub(crate) fn session_cancelled() -> bool {
    testing::with(|host| host.cancelled).unwrap_or(false)
}

/// A generation whose text is known beforehand.
pub(crate) struct Generation {
    reply: Reply,
    segment: Segment,
}

impl Generation {
    pub(crate) fn next_chunk(&mut self) -> Result<Chunk, Error> {
        Ok(self.reply.next_chunk())
    }

    pub(crate) fn segment(&self) -> Segment {
        self.segment.clone()
    }
}

pub(crate) fn chat_append(
    role: Role,
    kind: SegmentKind,
    keep: Retention,
    text: &str,
) -> Result<Segment, Error> {
    testing::with(|host| host.append(role, kind, keep, text)).ok_or_else(no_host)
}

pub(crate) fn chat_generate(options: &Options) -> Result<Generation, Error> {
    testing::with(|host| host.generate(options))
        .unwrap_or_else(|| Err(no_host()))
        .map(|(reply, segment)| Generation { reply, segment })
}

pub(crate) fn context_status() -> Status {
    testing::with(|host| host.status()).unwrap_or_else(|| testing::State::default().status())
}

pub(crate) fn context_last_restore() -> Option<RestoreReport> {
    None
}

pub(crate) fn segments_list() -> Vec<segments::Info> {
    testing::with(|host| host.segments()).unwrap_or_default()
}

pub(crate) fn segments_set_retention(id: &str, retention: Retention) -> Result<(), Error> {
    testing::with(|host| host.set_retention(id, retention)).unwrap_or_else(|| Err(no_host()))
}

pub(crate) fn tools_list() -> Vec<tools::Info> {
    testing::with(|host| host.tools.values().map(|tool| tool.info.clone()).collect()).unwrap_or_default()
}

pub(crate) fn tools_call(name: &str, input: &str) -> Result<String, Error> {
    testing::with(|host| host.call_tool(name, input)).unwrap_or_else(|| Err(no_host()))
}

pub(crate) fn state_get(key: &str) -> Option<String> {
    testing::with(|host| host.state.get(key).cloned()).flatten()
}

pub(crate) fn state_set(key: &str, value: &str) -> Result<(), Error> {
    testing::with(|host| {
        host.state.insert(key.to_owned(), value.to_owned());
    })
    .ok_or_else(no_host)
}

pub(crate) fn state_delete(key: &str) {
    testing::with(|host| host.state.remove(key));
}

pub(crate) fn random_u64() -> u64 {
    testing::with(|host| host.next_random()).unwrap_or(0)
}
