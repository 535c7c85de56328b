//! Making the disk tier slow or faulty on demand, and giving up on a read that takes too long.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::sync::{lock, wait_for};

/// How slow the tier is made. The default is not at all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Throttle {
    /// Bytes a second, shared by all transfers; `None` is no limit. Zero counts as one.
    pub bytes_per_s: Option<u64>,
    /// Added to each transfer.
    pub latency: Duration,
}

/// How reads of the tier fail.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TierFault {
    /// They do not.
    #[default]
    None,
    /// Every read is a miss.
    DropReads,
    /// Every read waits first; a cancelled one gives up.
    DelayReads(Duration),
    /// Every read has one bit turned over, which verification must find.
    FlipBit,
    /// Every read ends half way.
    Tear,
    /// Every read finds a cell of another contract.
    Stale,
}

/// Tells a waiting read to give up. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag(Arc<(Mutex<bool>, Condvar)>);

impl CancelFlag {
    /// A flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises the flag, for good.
    pub fn cancel(&self) {
        *lock(&self.0.0) = true;
        self.0.1.notify_all();
    }

    /// Whether it is raised.
    pub fn is_cancelled(&self) -> bool {
        *lock(&self.0.0)
    }

    /// Waits until `end` or until the flag is raised; whether it is raised.
    pub(crate) fn wait_until(&self, end: Instant) -> bool {
        let mut raised = lock(&self.0.0);
        while !*raised {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            raised = wait_for(&self.0.1, raised, left);
        }
        *raised
    }
}

/// The tier's throttle and fault, and the pipe that transfers share.
#[derive(Default)]
pub(crate) struct Tier {
    state: Mutex<TierState>,
}

#[derive(Default)]
struct TierState {
    throttle: Throttle,
    fault: TierFault,
    /// When the pipe is free again.
    free: Option<Instant>,
}

impl Tier {
    pub(crate) fn set_throttle(&self, throttle: Throttle) {
        let mut state = lock(&self.state);
        state.throttle = throttle;
        state.free = None;
    }

    pub(crate) fn throttle(&self) -> Throttle {
        lock(&self.state).throttle
    }

    pub(crate) fn set_fault(&self, fault: TierFault) {
        lock(&self.state).fault = fault;
    }

    pub(crate) fn fault(&self) -> TierFault {
        lock(&self.state).fault
    }

    /// Waits as long as a transfer of `bytes` takes; whether it was cancelled meanwhile.
    pub(crate) fn transfer(&self, bytes: u64, cancel: &CancelFlag) -> bool {
        let end = {
            let mut state = lock(&self.state);
            let Throttle { bytes_per_s, latency } = state.throttle;
            if bytes_per_s.is_none() && latency.is_zero() {
                return cancel.is_cancelled();
            }
            let now = Instant::now();
            let start = state.free.map_or(now, |free| free.max(now));
            let busy = bytes_per_s.map_or(Duration::ZERO, |rate| {
                Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1))) as u64)
            });
            state.free = Some(start + busy);
            start + busy + latency
        };
        cancel.wait_until(end)
    }

    /// Waits for an injected delay; whether it was cancelled meanwhile.
    pub(crate) fn delay(&self, time: Duration, cancel: &CancelFlag) -> bool {
        // An endless delay must not overflow the clock.
        let day = Duration::from_secs(86_400);
        cancel.wait_until(Instant::now() + time.min(day))
    }
}
