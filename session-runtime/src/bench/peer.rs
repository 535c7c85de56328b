//! Another engine as a child process: it answers commands on its standard input with numbers on its standard output, so
//! that both take turns in one run. The programs are under `benches/peers`.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::error::Error;

/// A running peer.
pub(super) struct Peer {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts a peer on a model file and waits until it has loaded it.
    pub(super) fn start(
        program: &Path,
        model: &Path,
        threads: usize,
        context: usize,
        sessions: usize,
    ) -> Result<Self, Error> {
        let mut child = Command::new(program)
            .arg(model)
            .args([threads, context, sessions].map(|number| number.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| failed(format!("'{}' could not be started: {error}", program.display())))?;
        let (Some(commands), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("it has no pipes".to_owned()));
        };
        let mut peer = Self { child, commands, answers: BufReader::new(answers) };
        match peer.line()?.as_str() {
            "ready" => Ok(peer),
            other => Err(failed(format!("it said '{other}' instead of 'ready'"))),
        }
    }

    fn line(&mut self) -> Result<String, Error> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(1..) => Ok(line.trim().to_owned()),
            Ok(0) => Err(failed("it ended".to_owned())),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// Sends a command; the numbers it answers.
    pub(super) fn ask(&mut self, command: &str) -> Result<Vec<f64>, Error> {
        writeln!(self.commands, "{command}").map_err(|error| failed(error.to_string()))?;
        let line = self.line()?;
        let numbers: Result<Vec<f64>, _> = line.split_whitespace().map(str::parse).collect();
        numbers.map_err(|_| failed(format!("it answered '{line}'")))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It holds nothing that a signal could harm.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn failed(detail: String) -> Error {
    Error::invalid("bench_peer_failed", format!("the peer failed: {detail}"))
}
