//! A server in a process of its own, so that the demo can kill it.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::super::client::Client;
use super::super::failure::{Failure, Outcome};

/// Longest start of a server: the model is loaded meanwhile.
const START: Duration = Duration::from_secs(120);

/// A running server.
pub(super) struct Server {
    child: Child,
    /// The way to it.
    pub(super) client: Client,
}

impl Server {
    /// Starts this same program as a server over `data_dir` and waits until it answers. Its log goes to
    /// `log`.
    pub(super) fn start(data_dir: &Path, log: &Path, arguments: &[String]) -> Outcome<Self> {
        let failed =
            |error: std::io::Error| Failure::new(format!("the server could not be started: {error}"));
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .map_err(failed)?
            .port();
        let program = std::env::current_exe().map_err(failed)?;
        let log_file = File::options().create(true).append(true).open(log).map_err(failed)?;
        let child = Command::new(program)
            .args(["serve", "--listen", &format!("127.0.0.1:{port}"), "--data-dir"])
            .arg(data_dir)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log_file)
            .spawn()
            .map_err(failed)?;
        let mut server = Self { child, client: Client::new(format!("http://127.0.0.1:{port}")) };
        server.wait_ready(log)?;
        Ok(server)
    }

    fn wait_ready(&mut self, log: &Path) -> Outcome {
        let begun = Instant::now();
        while begun.elapsed() < START {
            if self.client.get("/readyz").is_ok() {
                return Ok(());
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                let text = std::fs::read_to_string(log).unwrap_or_default();
                let last = text.lines().last().unwrap_or("no log");
                return Err(Failure::new(format!("the server ended with {status}: {last}")));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Err(Failure::new(format!("the server was not ready after {} seconds", START.as_secs())))
    }

    /// Ends the process with SIGKILL: nothing is flushed, nothing is said.
    pub(super) fn kill(mut self) -> Outcome {
        self.child
            .kill()
            .map_err(|error| Failure::new(format!("the server could not be killed: {error}")))?;
        let status = self.child.wait();
        status.map(drop).map_err(|error| Failure::new(format!("the killed server did not end: {error}")))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already ended, or ended here; the demo leaves no process behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
