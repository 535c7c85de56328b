//! `session-runtime serve`: the REST server until a signal stops it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::failure::{Failure, Outcome};
use super::options::Options;
use crate::api::Server;
use crate::config::Config;
use crate::error::Error;
use crate::models::progress::Terminal;
use crate::runtime::Runtime;

/// Address where none is given.
pub(super) const DEFAULT_LISTEN: &str = "127.0.0.1:8080";

/// Options of `serve`.
#[derive(Args, Debug)]
pub(super) struct Serve {
    /// Address and port; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = DEFAULT_LISTEN)]
    listen: SocketAddr,
    /// Allows an address that other machines can reach, although there is no authentication
    #[arg(long)]
    allow_remote: bool,
    /// Directory that clients may grant to their sessions, with everything in it; may be repeated. Without one
    /// nothing can be granted
    #[arg(long = "grant-root", value_name = "DIR", value_parser = directory)]
    grant_roots: Vec<PathBuf>,
}

/// A directory that exists, by its real path.
pub(super) fn directory(text: &str) -> Result<PathBuf, String> {
    let path = std::fs::canonicalize(text).map_err(|error| format!("{text}: {error}"))?;
    if path.is_dir() { Ok(path) } else { Err(format!("{text} is not a directory")) }
}

impl Serve {
    pub(super) fn run(&self, options: &Options, handle: &Handle) -> Outcome {
        let config = Config { grant_roots: self.grant_roots.clone(), ..options.config()? };
        handle.block_on(async {
            let (interrupt, terminate) =
                (listen_for(SignalKind::interrupt())?, listen_for(SignalKind::terminate())?);
            let runtime = Runtime::open_telling(config, Arc::new(Terminal::new())).await?;
            let server = match Server::bind(runtime.clone(), self.listen, self.allow_remote).await {
                Ok(server) => server,
                Err(error) => {
                    runtime.shutdown().await?;
                    return Err(Failure::from(error));
                }
            };
            announce(&runtime, &server).await?;
            server.serve(stop(interrupt, terminate)).await?;
            eprintln!("stopping: saving what is in memory");
            runtime.shutdown().await?;
            Ok(())
        })
    }
}

async fn announce(runtime: &Runtime, server: &Server) -> Outcome {
    let info = runtime.info().await?;
    for note in info.recovery.iter().chain(&info.warnings) {
        eprintln!("note: {note}");
    }
    eprintln!(
        "session-runtime {} serves {} on {} at {} (no authentication; stop with Ctrl-C)",
        info.version,
        info.model.alias,
        info.backend,
        server.url()
    );
    Ok(())
}

fn listen_for(kind: SignalKind) -> Result<Signal, Error> {
    signal(kind).map_err(|error| Error::internal(format!("signals cannot be received: {error}")))
}

/// Resolves at the first signal. A second one ends the process at once: what was acknowledged is on disk
/// already.
async fn stop(mut interrupt: Signal, mut terminate: Signal) {
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        std::process::exit(1);
    });
}
