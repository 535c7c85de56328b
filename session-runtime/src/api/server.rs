//! Listening: which addresses are allowed, how the server stops. Knows no route.

use std::future::{Future, IntoFuture};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::error::{Error, ErrorKind};
use crate::runtime::Runtime;

/// Time that clients have to take their answers once the server is stopping.
const GRACE: Duration = Duration::from_secs(5);

/// A REST server bound to its address.
pub struct Server {
    runtime: Runtime,
    listener: TcpListener,
    address: SocketAddr,
}

impl Server {
    /// Binds `address` and writes it into the data directory's lock, so that the commands find it.
    ///
    /// # Errors
    /// `remote_bind` for an address other machines can reach without `allow_remote` (there is no
    /// authentication), `address_in_use`, or what the operating system says.
    pub async fn bind(runtime: Runtime, address: SocketAddr, allow_remote: bool) -> Result<Self, Error> {
        if !address.ip().is_loopback() && !allow_remote {
            let message = format!(
                "{address} can be reached by other machines and the server has no authentication: listen on \
                 127.0.0.1, or add --allow-remote if the network is trusted"
            );
            return Err(Error::new(ErrorKind::Denied, "remote_bind", message));
        }
        let listener = TcpListener::bind(address).await.map_err(|error| bind_error(address, &error))?;
        let address = listener.local_addr().map_err(Error::internal)?;
        let server = Self { runtime, listener, address };
        server.runtime.set_address(&server.url())?;
        Ok(server)
    }

    /// The address clients use.
    pub fn url(&self) -> String {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            let loopback: std::net::IpAddr = match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            };
            address.set_ip(loopback);
        }
        format!("http://{address}")
    }

    /// Serves until `stop` resolves, then takes no new work, ends streams and waits some seconds for the
    /// answers under way. Running turns are not part of it: they go on, and after a restart they resume.
    ///
    /// # Errors
    /// What the operating system says about the listener.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), Error> {
        let draining = Arc::new(watch::Sender::new(false));
        let routes = super::routes(self.runtime, Arc::clone(&draining), self.address.ip().is_loopback());
        let mut stopping = draining.subscribe();
        let grace = async move {
            // An error means that the server is gone: then the other branch has ended.
            let _ = stopping.wait_for(|stopping| *stopping).await;
            tokio::time::sleep(GRACE).await;
        };
        let stop = async move {
            stop.await;
            draining.send_replace(true);
        };
        let serving = axum::serve(self.listener, routes).with_graceful_shutdown(stop);
        tokio::select! {
            served = serving.into_future() => served.map_err(Error::internal),
            () = grace => {
                tracing::warn!("some clients kept their connections open and were cut off");
                Ok(())
            }
        }
    }
}

fn bind_error(address: SocketAddr, error: &io::Error) -> Error {
    let (code, message) = match error.kind() {
        io::ErrorKind::AddrInUse => {
            let message = format!(
                "port {} of {} is in use: stop the other program, or choose another port with --listen {}:{}",
                address.port(),
                address.ip(),
                address.ip(),
                address.port().wrapping_add(1).max(1024),
            );
            ("address_in_use", message)
        }
        io::ErrorKind::PermissionDenied => {
            let message = format!("{address} may not be used: choose a port above 1023 with --listen");
            ("address_denied", message)
        }
        _ => ("address_unusable", format!("{address} cannot be used: {error}; choose another with --listen")),
    };
    Error::new(ErrorKind::Unavailable, code, message)
}
