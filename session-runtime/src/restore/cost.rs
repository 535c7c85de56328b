//! Measured costs: seconds of compute per (token, layer), bandwidth and latency of each tier.
//!
//! Nothing is assumed for long: the first steps and the first transfers replace the starting values, and
//! what was measured is kept for the next start.

use kernels::backend::PAGE_TOKENS;
use serde::{Deserialize, Serialize};

/// The costs of one machine and model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Costs {
    /// The device that computing and loading from host memory were measured on, in its own words. Costs that were kept
    /// before it was told lack it.
    #[serde(default)]
    device: String,
    /// Of computing.
    pub compute: ComputeCost,
    /// Of loading from disk.
    pub load: LoadCost,
    /// Of loading from host memory. Costs that were kept before there was a host tier lack it.
    #[serde(default = "LoadCost::of_memory")]
    pub host: LoadCost,
    /// Of unpacking cells that were packed without loss, in addition to loading them; its bytes are those of packed cells.
    #[serde(default = "LoadCost::of_unpacking")]
    pub unpacking: LoadCost,
    /// Bytes of cells packed without loss, for each byte of theirs on the device.
    #[serde(default = "packed_share")]
    packed_share: f64,
}

/// What a byte of a cell takes, packed without loss, before it is measured.
fn packed_share() -> f64 {
    0.85
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            device: String::new(),
            compute: ComputeCost::default(),
            load: LoadCost::default(),
            host: LoadCost::of_memory(),
            unpacking: LoadCost::of_unpacking(),
            packed_share: packed_share(),
        }
    }
}

impl Costs {
    /// What is known of `device`, given what an earlier process kept: of another device only what its disk costs.
    pub fn on(device: String, kept: Option<Self>) -> Self {
        match kept {
            Some(kept) if kept.device == device => kept,
            Some(kept) => Self { device, load: kept.load, ..Self::default() },
            None => Self { device, ..Self::default() },
        }
    }

    /// Learns what cells of `raw` bytes take when they are packed without loss.
    pub fn observe_packed(&mut self, raw: usize, packed: usize) {
        if raw > 0 {
            self.packed_share += 0.1 * (packed as f64 / raw as f64 - self.packed_share);
        }
    }

    /// Predicted bytes of cells of `raw` bytes, packed without loss.
    pub fn packed_bytes(&self, raw: usize) -> usize {
        (raw as f64 * self.packed_share).round() as usize
    }
}

/// Seconds of a step over `rows` rows in `layers` layers at a mean context of `context` tokens:
/// `rows * layers * (base + slope * context)`, fitted by least squares with exponential forgetting.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ComputeCost {
    /// Sums of the normal equations: weights of (1, 1), (1, context), (context, context), and right sides.
    normal: [f64; 5],
    base: f64,
    slope: f64,
    samples: u64,
}

/// How much of the past one new sample forgets.
const FORGET: f64 = 0.02;
/// Rows below which a step is ruled by weights' bandwidth and says nothing of the cost of a chunk.
const ROWS_MIN: usize = 16;

impl Default for ComputeCost {
    fn default() -> Self {
        Self { normal: [0.0; 5], base: 1.5e-4, slope: 1e-8, samples: 0 }
    }
}

impl ComputeCost {
    /// Learns from a step.
    pub fn observe(&mut self, rows: usize, layers: usize, context: f64, seconds: f64) {
        if rows < ROWS_MIN || layers == 0 || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let cost = seconds / (rows * layers) as f64;
        let weight = (rows * layers) as f64;
        for (sum, value) in
            self.normal.iter_mut().zip([1.0, context, context * context, cost, cost * context])
        {
            *sum = *sum * (1.0 - FORGET) + weight * value;
        }
        self.samples += 1;
        self.fit();
    }

    fn fit(&mut self) {
        let [n, c, cc, y, cy] = self.normal;
        let mean = y / n;
        let determinant = n * cc - c * c;
        let slope = if determinant > 1e-9 * n * cc { (n * cy - c * y) / determinant } else { 0.0 };
        // A cost never falls with context; noise that says so is taken as flat.
        self.slope = slope.max(0.0);
        self.base = (mean - self.slope * c / n).max(mean * 0.05);
    }

    /// Predicted seconds.
    pub fn seconds(&self, rows: usize, layers: usize, context: f64) -> f64 {
        (rows * layers) as f64 * (self.base + self.slope * context)
    }

    /// The most rows, in whole pages and at least one, that are predicted to take no longer than `seconds`.
    pub fn rows_within(&self, seconds: f64, layers: usize, context: f64) -> usize {
        let row = self.seconds(1, layers, context);
        let rows = if row > 0.0 { (seconds / row) as usize } else { usize::MAX };
        (rows / PAGE_TOKENS).max(1).saturating_mul(PAGE_TOKENS)
    }

    /// Steps learned from.
    pub fn samples(&self) -> u64 {
        self.samples
    }
}

/// Seconds to load cells from a tier: `latency * requests + bytes / bandwidth`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LoadCost {
    latency: f64,
    bytes_per_second: f64,
    samples: u64,
}

impl Default for LoadCost {
    fn default() -> Self {
        Self { latency: 2e-4, bytes_per_second: 5e8, samples: 0 }
    }
}

impl LoadCost {
    /// What memory costs before it is measured: one thread that checks and copies.
    pub fn of_memory() -> Self {
        Self { latency: 0.0, bytes_per_second: 2e9, samples: 0 }
    }

    /// What unpacking costs before it is measured.
    pub fn of_unpacking() -> Self {
        Self { latency: 0.0, bytes_per_second: 5e8, samples: 0 }
    }

    /// The cost of this and then of `next`, for the same bytes.
    #[must_use]
    pub fn then(&self, next: &Self) -> Self {
        Self {
            latency: self.latency + next.latency,
            bytes_per_second: 1.0 / (1.0 / self.bytes_per_second + 1.0 / next.bytes_per_second),
            samples: self.samples.min(next.samples),
        }
    }

    /// Learns from one request of `bytes` that took `seconds` of the tier's own time.
    pub fn observe(&mut self, bytes: usize, seconds: f64) {
        if bytes == 0 || !seconds.is_finite() || seconds <= 0.0 {
            return;
        }
        let rate = bytes as f64 / seconds;
        // The first sample replaces the guess; later ones are averaged.
        let weight = if self.samples == 0 { 1.0 } else { 0.1 };
        self.bytes_per_second = 1.0 / ((1.0 - weight) / self.bytes_per_second + weight / rate);
        self.latency = 0.0;
        self.samples += 1;
    }

    /// The cost over a tier that moves at most `limit` bytes a second, whatever was measured before it did.
    pub fn limited(&self, limit: Option<u64>) -> Self {
        let limit = limit.map_or(f64::INFINITY, |limit| limit as f64);
        Self { bytes_per_second: self.bytes_per_second.min(limit), ..self.clone() }
    }

    /// Predicted seconds for `requests` requests of `bytes` in all.
    pub fn seconds(&self, requests: usize, bytes: usize) -> f64 {
        self.latency * requests as f64 + bytes as f64 / self.bytes_per_second
    }

    /// Measured bytes per second, latency included.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes_per_second
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_within_a_time_are_as_many_whole_pages_as_fit() {
        let mut cost = ComputeCost::default();
        for _ in 0..50 {
            // A millisecond for a row of ten layers.
            cost.observe(64, 10, 100.0, 0.064);
        }
        for (seconds, rows) in [(0.1, 96), (0.0, 16), (0.0479, 32), (0.0481, 48)] {
            assert_eq!(cost.rows_within(seconds, 10, 100.0), rows, "{seconds}");
        }
    }

    #[test]
    fn compute_cost_recovers_the_line_it_was_fed() {
        let mut cost = ComputeCost::default();
        for step in 0..200 {
            let context = f64::from(step * 17 % 2000);
            cost.observe(64, 24, context, 64.0 * 24.0 * (2e-5 + 3e-9 * context));
        }
        let predicted = cost.seconds(128, 24, 1500.0);
        let expected = 128.0 * 24.0 * (2e-5 + 3e-9 * 1500.0);
        assert!((predicted / expected - 1.0).abs() < 0.01, "{predicted} against {expected}");
    }

    #[test]
    fn a_limit_is_known_before_it_is_measured() {
        let cost = LoadCost::default();
        assert_eq!(cost.limited(Some(1_000_000)).seconds(0, 2_000_000), 2.0);
        assert_eq!(cost.limited(None).seconds(3, 1000), cost.seconds(3, 1000));
    }

    #[test]
    fn of_another_device_only_the_disk_is_remembered() {
        let mut kept = Costs::on("one".to_owned(), None);
        for _ in 0..50 {
            kept.compute.observe(64, 24, 100.0, 1.0);
            kept.load.observe(1 << 20, 0.5);
            kept.host.observe(1 << 20, 0.25);
        }
        let facts = |costs: &Costs| {
            [
                costs.compute.seconds(64, 24, 100.0),
                costs.load.seconds(1, 1 << 20),
                costs.host.seconds(1, 1 << 20),
            ]
        };
        let same = Costs::on("one".to_owned(), Some(kept.clone()));
        assert_eq!(facts(&same), facts(&kept));
        let other = facts(&Costs::on("another".to_owned(), Some(kept.clone())));
        let [compute, _, host] = facts(&Costs::default());
        assert_eq!(other, [compute, facts(&kept)[1], host]);
        assert_ne!(other[0], facts(&kept)[0]);
    }

    #[test]
    fn unpacking_comes_after_loading() {
        let mut costs = Costs::default();
        for _ in 0..100 {
            costs.load.observe(1 << 20, 0.5);
            costs.unpacking.observe(1 << 20, 0.25);
            costs.observe_packed(1000, 600);
        }
        let seconds = costs.load.then(&costs.unpacking).seconds(3, 4 << 20);
        assert!((seconds - 3.0).abs() < 1e-3, "{seconds}");
        assert_eq!(costs.packed_bytes(10_000), 6000);
    }

    #[test]
    fn costs_kept_before_there_was_a_host_tier_are_read() {
        let mut kept = serde_json::to_value(Costs::default()).unwrap();
        for later in ["host", "unpacking", "packed_share"] {
            kept.as_object_mut().unwrap().remove(later);
        }
        let read: Costs = serde_json::from_value(kept).unwrap();
        assert_eq!(read.host.seconds(5, 4_000_000_000), 2.0, "what memory costs before it is measured");
    }

    #[test]
    fn load_cost_follows_the_tier() {
        let mut cost = LoadCost::default();
        for _ in 0..100 {
            cost.observe(1 << 20, 0.1);
        }
        let predicted = cost.seconds(10, 10 << 20);
        assert!((predicted - 1.0).abs() < 0.02, "{predicted}");
    }
}
