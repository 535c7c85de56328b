//! Making the host tier slow or faulty on demand, as the disk can be: its throttle, its faults, and the pipe that its
//! transfers share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use store::{Throttle, TierFault};

#[derive(Clone, Copy, Debug, Default)]
struct Settings {
    throttle: Throttle,
    fault: TierFault,
}

/// Throttle and fault of a host tier. Cloning shares them.
#[derive(Clone, Debug, Default)]
pub struct HostControl(Arc<Mutex<Settings>>);

impl HostControl {
    fn settings(&self) -> MutexGuard<'_, Settings> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the tier as slow as told, from the next transfer on.
    pub fn set_throttle(&self, throttle: Throttle) {
        self.settings().throttle = throttle;
    }

    /// How slow it was made.
    pub fn throttle(&self) -> Throttle {
        self.settings().throttle
    }

    /// Makes reads of the tier fail as told, from the next read on.
    pub fn set_fault(&self, fault: TierFault) {
        self.settings().fault = fault;
    }

    /// How reads fail.
    pub fn fault(&self) -> TierFault {
        self.settings().fault
    }

    /// Makes the tier as another one is made.
    pub(super) fn follow(&self, other: &Self) {
        let settings = *other.settings();
        *self.settings() = settings;
    }
}

/// When transfers end.
#[derive(Debug, Default)]
pub(super) struct HostPipe {
    throttle: Throttle,
    /// When the pipe is free again, on the monotonic clock.
    free: Option<Duration>,
}

impl HostPipe {
    /// When a transfer of `bytes` that is asked for now ends. Times are those of the monotonic clock.
    pub(super) fn ready(&mut self, control: &HostControl, bytes: usize, now: Duration) -> Duration {
        let Settings { throttle, fault } = *control.settings();
        if throttle != self.throttle {
            *self = Self { throttle, free: None };
        }
        let start = self.free.map_or(now, |free| free.max(now));
        let busy = throttle.bytes_per_s.map_or(0.0, |rate| bytes as f64 / rate.max(1) as f64);
        let delay = match fault {
            TierFault::DelayReads(time) => time,
            _ => Duration::ZERO,
        };
        // Endless times must not overflow the clock.
        let day = Duration::from_secs(86_400);
        let busy = Duration::from_secs_f64(busy.min(day.as_secs_f64()));
        let end = start + busy;
        self.free = throttle.bytes_per_s.map(|_| end.min(now + day));
        end + (throttle.latency + delay).min(day)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_share_the_pipe_and_latency_is_added_to_each() {
        let control = HostControl::default();
        let (mut pipe, now) = (HostPipe::default(), Duration::from_secs(3));
        let mut after = |bytes| pipe.ready(&control, bytes, now) - now;
        assert_eq!(after(1 << 40), Duration::ZERO);
        let latency = Duration::from_millis(5);
        control.set_throttle(Throttle { bytes_per_s: Some(1000), latency });
        assert_eq!(after(500), Duration::from_millis(505));
        assert_eq!(after(1500), Duration::from_millis(2005), "it ends behind the first");
        control.set_throttle(Throttle { bytes_per_s: Some(1), latency });
        let day = Duration::from_secs(86_400);
        assert_eq!(after(usize::MAX), day + latency, "it does not end, but no clock overflows");
        control.set_throttle(Throttle::default());
        control.set_fault(TierFault::DelayReads(Duration::MAX));
        assert_eq!(after(1), day);
        control.set_fault(TierFault::None);
        assert_eq!(after(1), Duration::ZERO, "an earlier throttle is forgotten");
    }
}
