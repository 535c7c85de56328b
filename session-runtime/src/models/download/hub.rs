//! One file from the public hub over HTTP, going on where an earlier attempt stopped.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use ureq::http::StatusCode;

use super::super::catalog::Entry;
use super::super::progress::{Progress, Stage};

/// Longest wait for a name or a connection: an unreachable hub must not hold up the next source.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest wait for the head of an answer.
const ANSWER: Duration = Duration::from_secs(20);
/// Longest silence inside an answer.
const SILENCE: Duration = Duration::from_secs(30);
/// Most requests for one file; each one after the first continues a broken transfer.
const MAX_REQUESTS: usize = 40;
/// Requests in a row that bring nothing before the hub is given up.
const MAX_IDLE_REQUESTS: usize = 3;
/// Bytes read at once.
const PIECE_BYTES: usize = 256 << 10;

/// The source, for people.
pub(super) fn name(hub: &str, entry: &Entry) -> String {
    let host = hub.split_once("://").map_or(hub, |(_, host)| host);
    format!("{host}/{}", entry.hub.repository)
}

/// Brings `partial` to its full length.
pub(super) fn fetch(hub: &str, entry: &Entry, partial: &Path, progress: &dyn Progress) -> Result<(), String> {
    let config = ureq::Agent::config_builder()
        .timeout_resolve(Some(CONNECT))
        .timeout_connect(Some(CONNECT))
        .timeout_recv_response(Some(ANSWER))
        .timeout_per_read(Some(SILENCE))
        .http_status_as_error(false)
        .user_agent(concat!("session-runtime/", env!("CARGO_PKG_VERSION")))
        .build();
    let agent = ureq::Agent::new_with_config(config);
    let url =
        format!("{}/{}/resolve/main/{}", hub.trim_end_matches('/'), entry.hub.repository, entry.hub.file);
    let source = name(hub, entry);
    let mut idle = 0;
    let mut last = String::new();
    for _ in 0..MAX_REQUESTS {
        let have = fs::metadata(partial).map_or(0, |metadata| metadata.len());
        if have == entry.bytes {
            return Ok(());
        }
        progress.bytes(&source, Stage::Connecting, have, Some(entry.bytes));
        match request(&agent, &url, entry, partial, have, &mut |done| {
            progress.bytes(&source, Stage::Downloading, done, Some(entry.bytes));
        }) {
            Ok(()) => {}
            Err(Failure::Final(error)) => return Err(error),
            Err(Failure::Broken(error)) => last = error,
        }
        let now = fs::metadata(partial).map_or(0, |metadata| metadata.len());
        idle = if now > have { 0 } else { idle + 1 };
        if idle == MAX_IDLE_REQUESTS || (have == 0 && now == 0) {
            break;
        }
    }
    let have = fs::metadata(partial).map_or(0, |metadata| metadata.len());
    if have == entry.bytes {
        Ok(())
    } else {
        Err(format!("{last} ({have} of {} bytes are here)", entry.bytes))
    }
}

/// Why one request did not bring the rest of the file.
enum Failure {
    /// Asking again is useless.
    Final(String),
    /// What arrived so far is kept.
    Broken(String),
}

fn request(
    agent: &ureq::Agent,
    url: &str,
    entry: &Entry,
    partial: &Path,
    have: u64,
    done: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    let start = have.min(entry.bytes);
    let mut get = agent.get(url);
    if start > 0 {
        get = get.header("Range", format!("bytes={start}-"));
    }
    let response = get.call().map_err(|error| Failure::Broken(error.to_string()))?;
    let disk = |error: std::io::Error| Failure::Final(format!("{}: {error}", partial.display()));
    let mut file;
    let mut at;
    match response.status() {
        StatusCode::OK => {
            // The whole file, whatever was asked for.
            at = 0;
            file = File::create(partial).map_err(disk)?;
        }
        StatusCode::PARTIAL_CONTENT => {
            let range = response.headers().get("content-range").and_then(|value| value.to_str().ok());
            let begins =
                range.and_then(|range| range.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
            if begins != Some(start) {
                return Err(Failure::Final(format!("asked for bytes from {start} on, got {range:?}")));
            }
            at = start;
            file = File::options().append(true).open(partial).map_err(disk)?;
        }
        StatusCode::RANGE_NOT_SATISFIABLE => {
            fs::remove_file(partial).map_err(disk)?;
            return Err(Failure::Broken("the file there is shorter than what is here".to_string()));
        }
        status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            return Err(Failure::Broken(format!("the server answered {status}")));
        }
        status => return Err(Failure::Final(format!("the server answered {status} for {url}"))),
    }
    let mut body = response.into_body().into_reader();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let count = match body.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) => return Err(Failure::Broken(error.to_string())),
        };
        at += count as u64;
        if at > entry.bytes {
            drop(file);
            fs::remove_file(partial).map_err(disk)?;
            return Err(Failure::Final(format!("the file there is longer than {} bytes", entry.bytes)));
        }
        file.write_all(&piece[..count]).map_err(disk)?;
        done(at);
    }
    if at < entry.bytes { Err(Failure::Broken("the transfer ended early".to_string())) } else { Ok(()) }
}
