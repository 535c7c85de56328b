//! A histogram of durations on a logarithmic scale, from which follows how likely a return is.

/// Buckets for each doubling.
const PER_DOUBLING: f64 = 4.0;
/// Upper end of the first bucket, seconds.
const LEAST: f64 = 1e-3;
/// Buckets; the last one is open and begins after about ten days.
const BUCKETS: usize = 120;
/// Share of the past that each new duration takes away: tools change.
const FORGET: f64 = 0.005;
/// Weight of what is assumed before anything is known.
const PRIOR: f64 = 1.0;

/// How long something took, over and over.
#[derive(Clone, Debug)]
pub(super) struct Durations {
    counts: Vec<f64>,
    total: f64,
}

impl Default for Durations {
    fn default() -> Self {
        Self { counts: vec![0.0; BUCKETS], total: 0.0 }
    }
}

/// The bucket a duration belongs to, with the part of the bucket that lies below it.
fn place(seconds: f64) -> (usize, f64) {
    if seconds <= LEAST {
        return (0, (seconds / LEAST).max(0.0));
    }
    let place = (seconds / LEAST).log2() * PER_DOUBLING + 1.0;
    let bucket = (place as usize).min(BUCKETS - 1);
    (bucket, (place - bucket as f64).clamp(0.0, 1.0))
}

/// The duration at a part of a bucket.
fn duration(bucket: usize, part: f64) -> f64 {
    match bucket {
        0 => LEAST * part,
        bucket => LEAST * ((bucket as f64 - 1.0 + part) / PER_DOUBLING).exp2(),
    }
}

impl Durations {
    /// Learns one.
    pub(super) fn observe(&mut self, seconds: f64) {
        for count in &mut self.counts {
            *count *= 1.0 - FORGET;
        }
        self.counts[place(seconds).0] += 1.0;
        self.total = self.total * (1.0 - FORGET) + 1.0;
    }

    /// How many are remembered.
    pub(super) fn weight(&self) -> f64 {
        self.total
    }

    /// The share that took longer. What is assumed before anything is known has a heavy tail around `scale` seconds.
    pub(super) fn longer(&self, seconds: f64, scale: f64) -> f64 {
        let (bucket, part) = place(seconds);
        let above: f64 = self.counts[bucket + 1..].iter().sum();
        let known = above + self.counts[bucket] * (1.0 - part);
        (known + PRIOR * scale / (scale + seconds)) / (self.total + PRIOR)
    }

    /// The chance that one which has taken `seconds` ends within the next `more`.
    pub(super) fn ends_within(&self, seconds: f64, more: f64, scale: f64) -> f64 {
        let now = self.longer(seconds, scale);
        if now <= 0.0 { 0.0 } else { (1.0 - self.longer(seconds + more, scale) / now).clamp(0.0, 1.0) }
    }

    /// The duration below which a share of them lies; 0 without any.
    pub(super) fn quantile(&self, share: f64) -> f64 {
        let mut left = share * self.total;
        for (bucket, count) in self.counts.iter().enumerate() {
            if *count > 0.0 && left <= *count {
                return duration(bucket, left / count);
            }
            left -= count;
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(seconds: &[f64]) -> Durations {
        let mut durations = Durations::default();
        seconds.iter().for_each(|seconds| durations.observe(*seconds));
        durations
    }

    #[test]
    fn chances_follow_what_was_seen() {
        // Half of the calls take a second, half take a hundred.
        let durations = of(&[1.0, 100.0].repeat(40));
        let within = |seconds, more| durations.ends_within(seconds, more, 1.0);
        assert!((within(0.0, 2.0) - 0.5).abs() < 0.03, "{}", within(0.0, 2.0));
        assert!(within(2.0, 20.0) < 0.03, "who is not back after two seconds is away for long");
        assert!(within(80.0, 50.0) > 0.9);
    }

    #[test]
    fn an_unknown_tool_has_a_heavy_tail() {
        let durations = Durations::default();
        // The survivors of `1 / (1 + t)`: (1 + t) / (1 + t + more).
        assert!((durations.ends_within(9.0, 10.0, 1.0) - 0.5).abs() < 1e-9);
        assert!((durations.ends_within(99.0, 10.0, 1.0) - 10.0 / 110.0).abs() < 1e-9);
    }

    #[test]
    fn what_a_tool_does_now_replaces_what_it_did() {
        let mut durations = of(&[100.0; 50]);
        (0..1000).for_each(|_| durations.observe(1.0));
        assert!(durations.quantile(0.9) < 1.2, "{}", durations.quantile(0.9));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// A quantile is the duration it is the quantile of, to the width of a bucket.
        #[test]
        fn a_quantile_is_within_a_bucket(mut seconds in prop::collection::vec(2e-3..1e5_f64, 1..60)) {
            // Few enough that forgetting does not move the ranks by one.
            let durations = of(&seconds);
            seconds.sort_by(f64::total_cmp);
            let bucket = (1.0 / PER_DOUBLING).exp2();
            for share in [0.1, 0.5, 0.9] {
                let rank = share * seconds.len() as f64;
                let least = seconds[(rank - 0.25 * rank - 1.0).floor().max(0.0) as usize];
                let most = seconds[((rank + 0.25 * (seconds.len() as f64 - rank)).ceil() as usize).min(seconds.len() - 1)];
                let quantile = durations.quantile(share);
                prop_assert!(quantile >= least / bucket && quantile <= most * bucket, "{share}: {least} {quantile} {most}");
            }
        }

        /// The share that took longer falls from one, and chances are chances.
        #[test]
        fn chances_are_chances(
            past in prop::collection::vec(1e-5..1e7_f64, 0..50),
            mut times in prop::array::uniform2(0.0..1e7_f64),
        ) {
            let durations = of(&past);
            times.sort_by(f64::total_cmp);
            let [early, late] = times.map(|seconds| durations.longer(seconds, 1.0));
            prop_assert!(late <= early + 1e-12 && early <= 1.0 + 1e-12 && late >= 0.0);
            let chance = durations.ends_within(times[0], times[1] - times[0], 1.0);
            prop_assert!((0.0..=1.0).contains(&chance));
        }
    }
}
