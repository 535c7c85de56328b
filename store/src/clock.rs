//! The clock seam: wall time for what is stored, monotonic time for what is measured.
//!
//! Owns the only reads of time that reach stored data. Knows nothing of files.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A source of time. Wall time may jump in both directions; monotonic time never goes back.
pub trait Clock: Send + Sync {
    /// Milliseconds since the Unix epoch.
    fn now_ms(&self) -> u64;
    /// Time since an arbitrary start, never decreasing.
    fn monotonic(&self) -> Duration;
    /// [`Clock::monotonic`] in whole milliseconds.
    fn monotonic_ms(&self) -> u64 {
        u64::try_from(self.monotonic().as_millis()).unwrap_or(u64::MAX)
    }
}

/// The machine's own clocks.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock whose monotonic time starts at zero now.
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        // A wall clock before 1970 reads as zero: deadlines then never pass, which is the safe side.
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}

/// A clock that moves only when told to.
#[derive(Debug)]
pub struct ManualClock {
    /// Milliseconds that wall time is ahead of monotonic time, modulo 2^64.
    ahead_ms: AtomicU64,
    /// Nanoseconds.
    monotonic: AtomicU64,
}

impl ManualClock {
    /// A clock standing at `wall_ms`, with monotonic time zero.
    pub fn new(wall_ms: u64) -> Self {
        Self { ahead_ms: AtomicU64::new(wall_ms), monotonic: AtomicU64::new(0) }
    }

    /// Lets `ms` milliseconds pass: both times move.
    pub fn advance(&self, ms: u64) {
        self.pass(Duration::from_millis(ms));
    }

    /// Lets time pass, to the nanosecond: both times move.
    pub fn pass(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.monotonic.fetch_add(nanos, Ordering::SeqCst);
    }

    /// Makes the wall clock jump, as an operator or a time server would; monotonic time stays.
    pub fn set_wall(&self, ms: u64) {
        self.ahead_ms.store(ms.wrapping_sub(self.monotonic_ms()), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        self.ahead_ms.load(Ordering::SeqCst).wrapping_add(self.monotonic_ms())
    }

    fn monotonic(&self) -> Duration {
        Duration::from_nanos(self.monotonic.load(Ordering::SeqCst))
    }
}
