//! Keep for as long as moving the KV once takes. That is the break-even of renting and buying: whoever decides so pays at
//! most twice what knowing the return would have cost (ski rental). No history, no prediction.

use super::{IdlePolicy, Resting};

#[derive(Debug)]
pub(super) struct BreakEven;

impl IdlePolicy for BreakEven {
    fn deadline(&self, resting: &Resting<'_>) -> f64 {
        resting.move_seconds
    }

    fn price(&self, resting: &Resting<'_>) -> f64 {
        resting.price(resting.chance_after(self.deadline(resting)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::RestReason;
    use super::super::tests::resting;
    use super::*;

    #[test]
    fn the_price_holds_until_the_move_is_paid_and_then_falls() {
        let reason = RestReason::EndOfTurn;
        let per_byte = 2.0 / f64::from(1 << 20);
        // Moving takes half a second.
        for (rested, share) in [(0.0, 1.0), (0.5, 1.0), (1.0, 0.5), (5.0, 0.1)] {
            assert_eq!(BreakEven.price(&resting(&reason, rested)), share * per_byte, "{rested}");
        }
        assert_eq!(BreakEven.deadline(&resting(&reason, 9.0)), 0.5);
    }

    #[test]
    fn what_is_dear_to_bring_back_stays() {
        let reason = RestReason::EndOfTurn;
        let cheap = resting(&reason, 3.0);
        let dear = Resting { restore_seconds: 4.0, ..cheap.clone() };
        let unsaved = Resting { save_seconds: 1.0, ..cheap.clone() };
        let price = |resting| BreakEven.price(resting);
        assert!(price(&dear) > price(&unsaved) && price(&unsaved) > price(&cheap));
    }
}
