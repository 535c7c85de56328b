//! What the other policies are measured against: a fixed TTL, and least recently used.

use super::{IdlePolicy, Resting};

/// Keeps until the soft TTL, then least recently used first.
#[derive(Debug)]
pub(super) struct Fixed;

impl IdlePolicy for Fixed {
    fn deadline(&self, resting: &Resting<'_>) -> f64 {
        resting.ttl_seconds
    }

    fn price(&self, resting: &Resting<'_>) -> f64 {
        let within = if resting.rested < resting.ttl_seconds { 1.0 } else { 0.0 };
        within + recency(resting)
    }
}

/// Least recently used first, at need only. Where it does not save, KV that leaves is lost and recomputed.
#[derive(Debug)]
pub(super) struct Lru {
    pub saves: bool,
}

impl IdlePolicy for Lru {
    fn deadline(&self, _: &Resting<'_>) -> f64 {
        f64::INFINITY
    }

    fn price(&self, resting: &Resting<'_>) -> f64 {
        recency(resting)
    }

    fn saves(&self) -> bool {
        self.saves
    }
}

/// At most one, and the less the longer the rest.
fn recency(resting: &Resting<'_>) -> f64 {
    1.0 / (1.0 + resting.rested)
}

#[cfg(test)]
mod tests {
    use super::super::RestReason;
    use super::super::tests::resting;
    use super::*;

    #[test]
    fn within_the_ttl_comes_before_everything_else() {
        let reason = RestReason::EndOfTurn;
        let within = resting(&reason, 299.0);
        let after = Resting { ttl_seconds: 1.0, ..resting(&reason, 1.0) };
        assert!(Fixed.price(&within) > Fixed.price(&after));
        assert!(Fixed.price(&within) > Fixed.price(&resting(&reason, 299.5)), "older first");
        assert_eq!(Fixed.deadline(&within), 300.0);
    }

    #[test]
    fn least_recently_used_looks_at_nothing_else() {
        let reason = RestReason::EndOfTurn;
        let lru = Lru { saves: true };
        let dear = Resting { restore_seconds: 1e6, ..resting(&reason, 2.0) };
        assert!(lru.price(&dear) < lru.price(&resting(&reason, 1.0)));
        assert!(lru.saves() && !Lru { saves: false }.saves());
    }
}
