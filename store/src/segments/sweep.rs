//! Expiring segments, without being fooled by the wall clock.
//!
//! Wall time is what deadlines are written in, and it jumps. The sweeper remembers, durably, the last time it
//! believed, and compares how far the wall clock moved with the monotonic clock: a step back expires nothing until
//! the clock has caught up, a step forward by more than ten minutes stops expiry until someone confirms the clock.
//! Time during which no process ran cannot be measured and is believed.

use serde::{Deserialize, Serialize};

use super::{Segment, SegmentError, SegmentStore, removal};
use crate::clock::Clock;
use crate::limits::MAX_SWEEP;
use crate::meta::keys::{self, be64};
use crate::meta::{MetaError, MetaStore, Op};
use crate::sync::lock;

/// How far the wall clock may step ahead of the monotonic clock and still be believed.
const JUMP_MS: u64 = 10 * 60 * 1000;
/// How often the believed time is stored when nothing expires.
const STORE_EVERY_MS: u64 = 60 * 1000;

/// What a sweep thought of the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum ClockState {
    /// It is believed.
    Steady,
    /// It is behind what was believed before: nothing expires until it has caught up.
    Behind {
        /// Milliseconds it lacks.
        by_ms: u64,
    },
    /// It stepped ahead: nothing expires until [`SegmentStore::confirm_clock`].
    Ahead {
        /// Milliseconds it moved more than time passed.
        by_ms: u64,
    },
}

/// What a sweep did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweepReport {
    /// Segments that expired and are removed, the earliest deadline first; at most [`MAX_SWEEP`].
    pub expired: Vec<Segment>,
    /// Segments past their deadline that stay because a tool call depends on them.
    pub pinned: usize,
    /// Index entries without a matching segment, cleared away.
    pub stale: usize,
    /// Whether more may have expired than one sweep takes: sweep again.
    pub more: bool,
    /// What was thought of the clock.
    pub clock: ClockState,
}

/// The time that is believed, and when that was on the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SweepClock {
    wall: u64,
    monotonic: u64,
    /// A forward step waits for confirmation.
    paused: bool,
    stored: Option<Stored>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    last_now_ms: u64,
    paused: bool,
}

impl SweepClock {
    pub(crate) fn load(meta: &dyn MetaStore, clock: &dyn Clock) -> Result<Self, MetaError> {
        let stored: Option<Stored> = match meta.get(keys::SWEEP_CLOCK)? {
            Some(bytes) => Some(serde_json::from_slice(&bytes).map_err(|e| MetaError::Corrupt {
                key: keys::SWEEP_CLOCK.escape_ascii().to_string(),
                detail: e.to_string(),
            })?),
            None => None,
        };
        let now = clock.now_ms();
        let wall = match stored {
            // Ahead at the last close and not confirmed since: still ahead.
            Some(stored) if stored.paused => stored.last_now_ms,
            Some(stored) => stored.last_now_ms.max(now),
            None => now,
        };
        let paused = stored.is_some_and(|s| s.paused);
        Ok(Self { wall, monotonic: clock.monotonic_ms(), paused, stored })
    }

    fn judge(&self, now: u64, monotonic: u64) -> ClockState {
        if now < self.wall {
            return ClockState::Behind { by_ms: self.wall - now };
        }
        let passed = monotonic.saturating_sub(self.monotonic);
        let step = (now - self.wall).saturating_sub(passed);
        if step > JUMP_MS { ClockState::Ahead { by_ms: step } } else { ClockState::Steady }
    }
}

impl SegmentStore {
    /// Expires segments whose deadline is at or before `now` (wall milliseconds): removes them and returns them.
    /// At most [`MAX_SWEEP`] go at once; each is read again first, and one with a pin stays. Call it about once a
    /// second.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn sweep(&self, now: u64) -> Result<SweepReport, SegmentError> {
        let mut believed = lock(&self.sweep);
        let monotonic = self.clock.monotonic_ms();
        let clock = believed.judge(now, monotonic);
        let mut report = SweepReport { expired: Vec::new(), pinned: 0, stale: 0, more: false, clock };
        if clock != ClockState::Steady {
            believed.paused = matches!(clock, ClockState::Ahead { .. });
            self.store_clock(&mut believed, Vec::new())?;
            return Ok(report);
        }
        believed.wall = now;
        believed.monotonic = monotonic;
        believed.paused = false;
        let held = self.all_stripes();
        let ops = self.collect(now, &mut report)?;
        self.store_clock(&mut believed, ops)?;
        drop(held);
        Ok(report)
    }

    /// Believes the wall clock as it is now, after a step was reported.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn confirm_clock(&self) -> Result<(), SegmentError> {
        let mut believed = lock(&self.sweep);
        believed.wall = self.clock.now_ms();
        believed.monotonic = self.clock.monotonic_ms();
        believed.paused = false;
        // Stored even if little changed: after a step back the old time must go.
        believed.stored = None;
        self.store_clock(&mut believed, Vec::new())
    }

    /// Finds what has expired; returns the changes that remove it.
    fn collect(&self, now: u64, report: &mut SweepReport) -> Result<Vec<Op>, SegmentError> {
        let mut ops = Vec::new();
        let mut after: Option<Vec<u8>> = None;
        let mut taken = 0;
        loop {
            let page = self.meta.raw().scan_prefix(&[keys::DEADLINE], after.as_deref(), MAX_SWEEP)?;
            if page.is_empty() {
                return Ok(ops);
            }
            for (key, _) in page {
                let deadline = be64(&key[1..]).unwrap_or(0);
                if deadline > now {
                    return Ok(ops);
                }
                if taken >= MAX_SWEEP {
                    report.more = true;
                    return Ok(ops);
                }
                let id = key.get(9..).and_then(|id| std::str::from_utf8(id).ok()).unwrap_or_default();
                let segment = if id.is_empty() { None } else { self.get(id)? };
                match segment.filter(|s| s.deadline_ms == Some(deadline)) {
                    Some(segment) if segment.pinned_by.is_some() => report.pinned += 1,
                    Some(segment) => {
                        taken += 1;
                        ops.extend(removal(&segment));
                        report.expired.push(segment);
                    }
                    None => {
                        taken += 1;
                        report.stale += 1;
                        ops.push(Op::delete(key.clone()));
                    }
                }
                after = Some(key);
            }
        }
    }

    /// Applies `ops` and stores the believed time with them, if either is needed.
    fn store_clock(&self, believed: &mut SweepClock, mut ops: Vec<Op>) -> Result<(), SegmentError> {
        let new = Stored { last_now_ms: believed.wall, paused: believed.paused };
        let due = match believed.stored {
            None => true,
            Some(old) => {
                old.paused != new.paused || new.last_now_ms.saturating_sub(old.last_now_ms) >= STORE_EVERY_MS
            }
        };
        if due || !ops.is_empty() {
            let value = serde_json::to_vec(&new)
                .map_err(|e| SegmentError::BadField { field: "clock", detail: e.to_string() })?;
            ops.push(Op::put(keys::SWEEP_CLOCK, value));
            self.meta.apply(ops)?;
            believed.stored = Some(new);
        }
        Ok(())
    }
}
