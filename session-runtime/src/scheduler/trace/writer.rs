//! Writing a trace beside the engine: records are gathered in memory and handed to a thread of their own. Where the file takes no
//! more, or is too slow for longer than memory allows, the trace ends with one warning and everything else goes on.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, ErrorKind};

/// Bytes that are handed over at once.
const BLOCK: usize = 64 << 10;
/// Blocks that may wait for the file.
const WAITING: usize = 16;
/// Most bytes that are gathered while the file is slow.
const GATHERED: usize = 32 << 20;
/// The longest that records stay in memory while the loop turns.
const HELD: Duration = Duration::from_millis(200);

/// Creates the file of a trace.
///
/// # Errors
/// `trace_exists`, `trace_unwritable`.
pub(super) fn create(path: &Path) -> Result<File, Error> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(|error| {
        match error.kind() {
            io::ErrorKind::AlreadyExists => Error::new(
                ErrorKind::Conflict,
                "trace_exists",
                format!(
                    "{} exists already: give --trace the name of a new file, or remove it",
                    path.display()
                ),
            ),
            _ => Error::invalid(
                "trace_unwritable",
                format!(
                    "the trace {} cannot be written: {error}; give --trace a file in a directory that exists",
                    path.display()
                ),
            ),
        }
    })
}

/// The near end of the writing thread.
pub(super) struct Writer {
    blocks: Option<SyncSender<Vec<u8>>>,
    thread: Option<JoinHandle<()>>,
    failed: Arc<AtomicBool>,
    gathered: Vec<u8>,
    handed: Duration,
}

impl Writer {
    /// Starts the thread.
    ///
    /// # Errors
    /// It cannot be started.
    pub(super) fn start(out: impl Write + Send + 'static, now: Duration) -> Result<Self, Error> {
        let (blocks, inbox) = sync_channel(WAITING);
        let failed = Arc::new(AtomicBool::new(false));
        let failing = Arc::clone(&failed);
        let thread = std::thread::Builder::new()
            .name("trace-write".to_owned())
            .spawn(move || write(out, &inbox, &failing))
            .map_err(Error::internal)?;
        Ok(Self { blocks: Some(blocks), thread: Some(thread), failed, gathered: Vec::new(), handed: now })
    }

    /// Where records are added.
    pub(super) fn gathered(&mut self) -> &mut Vec<u8> {
        &mut self.gathered
    }

    /// Hands over what is due at a time. False: the trace is over.
    pub(super) fn pass_on(&mut self, now: Duration) -> bool {
        if self.failed.load(Ordering::Relaxed) {
            return false;
        }
        let due = self.gathered.len() >= BLOCK || now.saturating_sub(self.handed) >= HELD;
        let (Some(blocks), true) = (&self.blocks, due && !self.gathered.is_empty()) else { return true };
        match blocks.try_send(std::mem::take(&mut self.gathered)) {
            Ok(()) => self.handed = now,
            Err(TrySendError::Full(block)) if block.len() <= GATHERED => self.gathered = block,
            Err(TrySendError::Full(_)) => {
                tracing::warn!("the trace ends here: its file is slower than what is to be written");
                return false;
            }
            Err(TrySendError::Disconnected(_)) => return false,
        }
        true
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(blocks) = self.blocks.take()
            && !self.failed.load(Ordering::Relaxed)
        {
            // The engine is at its end and can wait for the last block.
            let _ = blocks.send(std::mem::take(&mut self.gathered));
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn write(mut out: impl Write, inbox: &Receiver<Vec<u8>>, failed: &AtomicBool) {
    while let Ok(block) = inbox.recv() {
        if let Err(error) = out.write_all(&block).and_then(|()| out.flush()) {
            tracing::warn!(%error, "the trace ends here: its file cannot be written");
            failed.store(true, Ordering::Relaxed);
            return;
        }
    }
}
