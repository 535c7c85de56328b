//! Trying the metadata in a child process, so that a panic, hang or abort inside sled becomes a verdict.

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Runs `command`; the error says why the metadata is doubtful.
pub(crate) fn run(command: &[OsString], timeout: Duration) -> Result<(), String> {
    let Some((program, arguments)) = command.split_first() else { return Ok(()) };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| format!("the probe {} could not be started: {e}", program.display()))?;
    let end = Instant::now() + timeout;
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("the probe of the metadata ended with {status}")),
            Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                // Both fail only if the child is already gone.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("the probe of the metadata took longer than {} s", timeout.as_secs()));
            }
            Err(e) => return Err(format!("the probe could not be waited for: {e}")),
        }
    }
}
