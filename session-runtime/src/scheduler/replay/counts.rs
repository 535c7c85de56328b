//! Counting what became of KV: hits by tier, moves, bytes, and how long messages waited for their first token.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::Serialize;

use crate::scheduler::trace::{Effect, SessionNumber};

/// What became of KV in a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Counts {
    /// Messages that began.
    pub messages: u64,
    /// Tokens that stood before them.
    pub input_tokens: u64,
    /// Of these, tokens whose KV was on the device when the message came.
    pub device_hit_tokens: u64,
    /// Tokens that were loaded for the message, none of their layers from below host memory.
    pub host_hit_tokens: u64,
    /// Tokens that were loaded for the message, some of their layers from disk.
    pub disk_hit_tokens: u64,
    /// Tokens that were computed, in some layers at least.
    pub computed_tokens: u64,
    /// Changes of state.
    pub transitions: u64,
    /// KV that left the device, by reason.
    pub evictions: BTreeMap<String, u64>,
    /// KV that left the device and was not kept, or was lost before it left.
    pub drops: u64,
    /// Restores that ended, by what they were for.
    pub restores: BTreeMap<String, u64>,
    /// Restores that were given up.
    pub abandoned: u64,
    /// Tokens of restores that were loaded whole.
    pub restored_loaded_tokens: u64,
    /// Tokens of restores that were partly loaded.
    pub restored_mixed_tokens: u64,
    /// Tokens of restores that were recomputed.
    pub restored_recomputed_tokens: u64,
    /// Bytes that were written to disk.
    pub bytes_to_disk: u64,
    /// Bytes that were loaded from host memory.
    pub bytes_from_host: u64,
    /// Bytes that were loaded from disk.
    pub bytes_from_disk: u64,
    /// Nanoseconds that messages waited for their first token, together.
    pub wait_ns: u64,
}

impl Counts {
    /// Mean milliseconds that a message waited for its first token; none without messages.
    pub fn mean_wait_ms(&self) -> Option<f64> {
        (self.messages > 0).then(|| self.wait_ns as f64 / 1e6 / self.messages as f64)
    }

    /// KV that left the device.
    pub fn evicted(&self) -> u64 {
        self.evictions.values().sum()
    }

    /// Restores that ended.
    pub fn restored(&self) -> u64 {
        self.restores.values().sum()
    }
}

/// What is known of a session's message until it has begun.
#[derive(Default)]
struct Waiting {
    since: Duration,
    /// Tokens loaded for it from host memory, and from disk.
    loaded: [u64; 2],
    /// What the restore that ends next was for.
    reason: String,
}

/// Counts effects as they come.
#[derive(Default)]
pub(super) struct Counter {
    pub counts: Counts,
    waiting: HashMap<SessionNumber, Waiting>,
}

impl Counter {
    /// A message of a session was asked for.
    pub(super) fn asked(&mut self, session: SessionNumber, now: Duration) {
        self.waiting.insert(session, Waiting { since: now, ..Waiting::default() });
    }

    /// Something became of KV.
    pub(super) fn count(&mut self, effect: &Effect, now: Duration) {
        match effect {
            Effect::Moved { session, from, to, reason, .. } => self.moved(*session, from, to, reason),
            Effect::Restored { session, restored } => {
                let counts = &mut self.counts;
                counts.restored_loaded_tokens += restored.host.tokens + restored.disk.tokens;
                counts.restored_mixed_tokens += restored.mixed;
                counts.restored_recomputed_tokens += restored.recomputed;
                counts.bytes_from_host += restored.host.bytes;
                counts.bytes_from_disk += restored.disk.bytes;
                let waiting = self.waiting.entry(*session).or_default();
                if waiting.reason == "turn" {
                    waiting.loaded = [restored.host.tokens, restored.disk.tokens];
                }
            }
            Effect::Started { session, input, cached } => {
                let Waiting { since, loaded: [host, disk], .. } =
                    self.waiting.remove(session).unwrap_or_default();
                let counts = &mut self.counts;
                counts.messages += 1;
                counts.input_tokens += input;
                counts.device_hit_tokens += cached.saturating_sub(host + disk);
                counts.host_hit_tokens += host;
                counts.disk_hit_tokens += disk;
                counts.computed_tokens += input - cached.min(input);
                counts.wait_ns += u64::try_from(now.saturating_sub(since).as_nanos()).unwrap_or(u64::MAX);
            }
            Effect::Saved { bytes } => self.counts.bytes_to_disk += bytes,
            // Nothing was moved between tiers.
            Effect::Relocated { .. } => {}
        }
    }

    fn moved(&mut self, session: SessionNumber, from: &str, to: &str, reason: &str) {
        let counts = &mut self.counts;
        counts.transitions += 1;
        match (from, to) {
            ("restoring", "evicted") => counts.abandoned += 1,
            ("none", "evicted") => {}
            (_, "evicted") => *counts.evictions.entry(reason.to_owned()).or_default() += 1,
            (_, "lost") => {
                *counts.evictions.entry(reason.to_owned()).or_default() += 1;
                counts.drops += 1;
            }
            (_, "restored") => {
                *counts.restores.entry(reason.to_owned()).or_default() += 1;
                let waiting = self.waiting.entry(session).or_default();
                reason.clone_into(&mut waiting.reason);
            }
            _ => {}
        }
    }
}
