//! How the host tier is made slow or faulty, in the words of a trace.

use std::time::Duration;

use store::{Throttle, TierFault};

use super::record::HostSettings;
use crate::scheduler::host_control::HostControl;

impl HostSettings {
    /// As it is made.
    pub(super) fn of(control: &HostControl) -> Self {
        let (throttle, fault) = (control.throttle(), control.fault());
        let delay = match fault {
            TierFault::DelayReads(delay) => delay,
            _ => Duration::ZERO,
        };
        let word = match fault {
            TierFault::None => "none",
            TierFault::DropReads => "drop",
            TierFault::DelayReads(_) => "delay",
            TierFault::FlipBit => "flip_bit",
            TierFault::Tear => "tear",
            TierFault::Stale => "stale",
        };
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            bytes_per_s: throttle.bytes_per_s,
            latency_ns: nanos(throttle.latency),
            fault: word.to_owned(),
            delay_ns: nanos(delay),
        }
    }

    /// Makes a tier so.
    pub(in crate::scheduler) fn apply(&self, control: &HostControl) {
        let latency = Duration::from_nanos(self.latency_ns);
        control.set_throttle(Throttle { bytes_per_s: self.bytes_per_s, latency });
        control.set_fault(match self.fault.as_str() {
            "drop" => TierFault::DropReads,
            "delay" => TierFault::DelayReads(Duration::from_nanos(self.delay_ns)),
            "flip_bit" => TierFault::FlipBit,
            "tear" => TierFault::Tear,
            "stale" => TierFault::Stale,
            _ => TierFault::None,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_back() {
        for fault in [
            TierFault::None,
            TierFault::DropReads,
            TierFault::DelayReads(Duration::from_millis(7)),
            TierFault::FlipBit,
            TierFault::Tear,
            TierFault::Stale,
        ] {
            let (control, copy) = (HostControl::default(), HostControl::default());
            control.set_fault(fault);
            control.set_throttle(Throttle { bytes_per_s: Some(9), latency: Duration::from_micros(3) });
            HostSettings::of(&control).apply(&copy);
            assert_eq!((copy.fault(), copy.throttle()), (control.fault(), control.throttle()));
        }
    }
}
