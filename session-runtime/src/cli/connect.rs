//! Where a command's sessions live: in the server that holds the data directory, or else in a server that
//! this process starts for the length of the command. Either way the command talks REST.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::client::Client;
use super::failure::{Failure, Outcome};
use super::options::Options;
use crate::api::Server;
use crate::config::Config;
use crate::error::Error;
use crate::models::progress::Terminal;
use crate::runtime::Runtime;

/// A way to the sessions of a data directory.
pub(super) struct Connection {
    pub(super) client: Client,
    own: Option<OwnServer>,
}

/// A server inside this process.
struct OwnServer {
    handle: Handle,
    runtime: Runtime,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), Error>>,
}

impl Connection {
    /// Finds the server that holds the data directory, or starts one on a free loopback port, where the
    /// directories `granted` and no others may be granted.
    pub(super) fn open(options: &Options, handle: &Handle, granted: &[PathBuf]) -> Outcome<Self> {
        let dir = options.data_dir()?;
        match store::holder(&dir) {
            Some(store::Holder { address: Some(address), .. }) if options.trace.is_some() => {
                Err(Failure::new(format!(
                    "the server at {address} does the work, and --trace writes what this process does: start that server with \
                     --trace, or stop it"
                )))
            }
            Some(store::Holder { address: Some(address), .. }) => {
                let client = Client::new(address);
                check_model(&client, options)?;
                Ok(Self { client, own: None })
            }
            Some(store::Holder { pid, address: None }) => Err(Failure::new(format!(
                "the data directory {} is used by process {pid}, which serves no address (yet): wait for it, \
                 stop it, or choose another directory with --data-dir",
                dir.display()
            ))),
            None => Self::start(options, handle, granted),
        }
    }

    fn start(options: &Options, handle: &Handle, granted: &[PathBuf]) -> Outcome<Self> {
        let config = Config { grant_roots: granted.to_vec(), ..options.config()? };
        let (runtime, server) = handle.block_on(async {
            let runtime = Runtime::open_telling(config, Arc::new(Terminal::new())).await?;
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            let server = Server::bind(runtime.clone(), address, false).await?;
            Ok::<_, Error>((runtime, server))
        })?;
        let client = Client::new(server.url());
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = handle.spawn(server.serve(async {
            // A dropped sender means the same as a message.
            let _ = stopped.await;
        }));
        Ok(Self { client, own: Some(OwnServer { handle: handle.clone(), runtime, stop, serving }) })
    }

    /// Ends the own server, if there is one, so that everything is on disk.
    pub(super) fn close(self) -> Outcome {
        let Some(own) = self.own else { return Ok(()) };
        own.handle.block_on(async {
            // The server may have ended by itself; its result says why.
            let _ = own.stop.send(());
            own.serving.await.map_err(Error::internal)??;
            own.runtime.shutdown().await
        })?;
        Ok(())
    }
}

/// A model asked for by name must be the one the running server has.
fn check_model(client: &Client, options: &Options) -> Outcome {
    let Some(wanted) = options.model.as_deref() else { return Ok(()) };
    let models = client.get("/v1/models")?;
    match models["data"][0]["id"].as_str() {
        Some(loaded) if loaded != wanted => Err(Failure::new(format!(
            "the server at {} runs model '{loaded}', not '{wanted}': leave --model out, stop that server, or \
             choose another directory with --data-dir",
            client.base()
        ))),
        _ => Ok(()),
    }
}

/// Runs `work` with a connection and closes it, whatever the outcome. `granted` as for [`Connection::open`].
pub(super) fn with_connection<T>(
    options: &Options,
    handle: &Handle,
    granted: &[PathBuf],
    work: impl FnOnce(&Client) -> Outcome<T>,
) -> Outcome<T> {
    let connection = Connection::open(options, handle, granted)?;
    let outcome = work(&connection.client);
    let closed = connection.close();
    let value = outcome?;
    closed?;
    Ok(value)
}
