//! What sampling needs of a vocabulary: the first of the highest logits, softmax weights, where a cumulative sum is
//! reached, and a bound that leaves few weights to sort. A set of tokens is a bit a token, 32 to a word; `None` is all.
//!
//! Every sum has one order, and every instruction set gives the same bits.

use super::Isa;
use super::exp::exp;
use super::lanes::{Kernel, LANES, Lanes, dispatch};

/// Tokens of a word of a set.
const WORD: usize = 32;
/// Weights added up before they join the running sum.
const CHUNK: usize = 256;
/// Weights are counted by their exponent and the first bits of their fraction.
const BUCKET_SHIFT: u32 = 19;
const BUCKETS: usize = 1 << (32 - BUCKET_SHIFT);

/// The first of the highest values among the allowed ones; the first allowed one where none compares.
pub fn highest(values: &[f32], allowed: Option<&[u32]>) -> Option<(usize, f32)> {
    let mut best: Option<(usize, f32)> = None;
    for (index, chunk) in values.chunks(WORD).enumerate() {
        let word = allowed.map_or(u32::MAX, |words| words.get(index).copied().unwrap_or(0));
        let top = chunk.iter().fold(f32::NEG_INFINITY, |top, value| if *value > top { *value } else { top });
        let higher = |value: f32| best.is_none_or(|(_, best)| value > best);
        if word == 0 || !higher(top) {
            continue;
        }
        for (bit, value) in chunk.iter().enumerate() {
            if word >> bit & 1 == 1 && best.is_none_or(|(_, best)| *value > best) {
                best = Some((index * WORD + bit, *value));
            }
        }
    }
    best
}

/// Turns logits into the weights `exp((logit - highest) / temperature)`, zero where not allowed. Below `e^-87` a
/// weight stays at that.
pub fn weights(isa: Isa, logits: &mut [f32], highest: f32, temperature: f32, allowed: Option<&[u32]>) {
    dispatch(isa, Exp { values: logits, highest, factor: 1.0 / temperature });
    let Some(words) = allowed else { return };
    for (index, chunk) in logits.chunks_mut(WORD).enumerate() {
        let word = words.get(index).copied().unwrap_or(0);
        for (bit, weight) in chunk.iter_mut().enumerate() {
            if word >> bit & 1 == 0 {
                *weight = 0.0;
            }
        }
    }
}

struct Exp<'a> {
    values: &'a mut [f32],
    highest: f32,
    factor: f32,
}

impl Kernel for Exp<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (highest, factor) = (l.splat(self.highest), l.splat(self.factor));
        let (whole, rest) = self.values.as_chunks_mut::<LANES>();
        for values in whole {
            let weight = exp(l, l.mul(l.sub(l.load(values), highest), factor));
            l.store(weight, values);
        }
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let weight = exp(l, l.mul(l.sub(l.load(&last), highest), factor));
        l.store(weight, &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// Sum of a chunk: four partial sums by index modulo four, then those in order.
fn chunk_sum(chunk: &[f32]) -> f64 {
    let (quads, rest) = chunk.as_chunks::<4>();
    let mut sums = [0.0; 4];
    for quad in quads {
        for (sum, weight) in sums.iter_mut().zip(quad) {
            *sum += f64::from(*weight);
        }
    }
    for (sum, weight) in sums.iter_mut().zip(rest) {
        *sum += f64::from(*weight);
    }
    sums.iter().sum()
}

/// Sum of all weights, chunk by chunk.
pub fn total(weights: &[f32]) -> f64 {
    weights.chunks(CHUNK).map(chunk_sum).sum()
}

/// The token at which the running sum of the weights, in the order of the ids, exceeds `target`; the last one with a
/// weight where none does. `None` where all weights are zero.
pub fn reached(weights: &[f32], target: f64) -> Option<usize> {
    let mut before = 0.0;
    for (index, chunk) in weights.chunks(CHUNK).enumerate() {
        let sum = chunk_sum(chunk);
        if before + sum > target {
            let mut running = before;
            let found = chunk.iter().position(|weight| {
                running += f64::from(*weight);
                *weight > 0.0 && running > target
            });
            // The sum of the chunk was rounded in another order: its last weight is then the one.
            let last = || chunk.iter().rposition(|weight| *weight > 0.0);
            if let Some(place) = found.or_else(last) {
                return Some(index * CHUNK + place);
            }
        }
        before += sum;
    }
    weights.iter().rposition(|weight| *weight > 0.0)
}

/// A bound such that the weights from it up are `enough`: it is asked with how many there are and their sum, from the
/// highest down. Zero where even all of them are not.
pub fn bound(weights: &[f32], mut enough: impl FnMut(usize, f64) -> bool) -> f32 {
    let mut counts = vec![0_usize; BUCKETS];
    let mut sums = vec![0.0_f64; BUCKETS];
    for weight in weights.iter().filter(|weight| **weight > 0.0) {
        let bucket = (weight.to_bits() >> BUCKET_SHIFT) as usize;
        counts[bucket] += 1;
        sums[bucket] += f64::from(*weight);
    }
    let (mut count, mut sum) = (0, 0.0);
    for bucket in (0..BUCKETS).rev().filter(|bucket| counts[*bucket] > 0).collect::<Vec<_>>() {
        count += counts[bucket];
        sum += sums[bucket];
        if enough(count, sum) {
            return f32::from_bits((bucket as u32) << BUCKET_SHIFT);
        }
    }
    0.0
}

/// Ids and weights of those of at least `bound`, the highest first, equal ones by id.
pub fn from_bound(weights: &[f32], bound: f32) -> Vec<(u32, f32)> {
    let mut kept: Vec<(u32, f32)> = (0..)
        .zip(weights)
        .filter(|(_, weight)| **weight > 0.0 && **weight >= bound)
        .map(|(id, weight)| (id, *weight))
        .collect();
    kept.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    kept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The words of a set.
    fn words(allowed: &[bool]) -> Vec<u32> {
        let word = |bits: &[bool]| (0..).zip(bits).map(|(bit, set)| u32::from(*set) << bit).sum();
        allowed.chunks(WORD).map(word).collect()
    }

    proptest! {
        #[test]
        fn the_highest_is_the_first_of_the_highest_allowed(
            values in prop::collection::vec(prop_oneof![-3..3_i32, Just(i32::MAX)], 0..200),
            set in prop::collection::vec(any::<bool>(), 200),
        ) {
            // The odd one stands for NaN, which is nobody's highest.
            let values: Vec<f32> =
                values.iter().map(|value| if *value == i32::MAX { f32::NAN } else { *value as f32 }).collect();
            let plain = |allowed: &dyn Fn(usize) -> bool| {
                let mut best: Option<(usize, f32)> = None;
                for (id, value) in values.iter().enumerate().filter(|(id, _)| allowed(*id)) {
                    if best.is_none_or(|(_, best)| *value > best) {
                        best = Some((id, *value));
                    }
                }
                best.map(|(id, _)| id)
            };
            prop_assert_eq!(highest(&values, None).map(|best| best.0), plain(&|_| true));
            let some = words(&set[..values.len()]);
            prop_assert_eq!(highest(&values, Some(&some)).map(|best| best.0), plain(&|id| set[id]));
        }

        #[test]
        fn i1_weights_are_right_and_the_same_everywhere(
            logits in prop::collection::vec(-40.0..40.0_f32, 1..100),
            temperature in 0.05..3.0_f32,
            set in prop::collection::vec(any::<bool>(), 100),
        ) {
            let some = words(&set[..logits.len()]);
            let of = |isa: Isa| {
                let mut weights = logits.clone();
                super::weights(isa, &mut weights, 40.0, temperature, Some(&some));
                weights
            };
            let plain = of(Isa::Scalar);
            for isa in Isa::available() {
                prop_assert!(of(isa).iter().zip(&plain).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
            for ((logit, weight), set) in logits.iter().zip(&plain).zip(&set) {
                let want = ((f64::from(*logit) - 40.0) / f64::from(temperature)).exp().max((-87.0_f64).exp());
                let want = if *set { want } else { 0.0 };
                prop_assert!((f64::from(*weight) - want).abs() <= want * 2e-5, "{weight} for {want}");
            }
        }

        #[test]
        fn sums_reach_what_they_should(weights in prop::collection::vec(0..5_u32, 0..1500), share in 0.0..1.1_f64) {
            // Small whole numbers add up exactly in any order.
            let floats: Vec<f32> = weights.iter().map(|weight| *weight as f32).collect();
            let all: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
            prop_assert_eq!(total(&floats), all as f64);
            let target = share * all as f64;
            let mut running = 0_u64;
            let want = weights.iter().position(|weight| { running += u64::from(*weight); running as f64 > target });
            let last = weights.iter().rposition(|weight| *weight > 0);
            prop_assert_eq!(reached(&floats, target), want.or(last));
        }

        #[test]
        fn a_bound_keeps_enough_and_sorted(
            weights in prop::collection::vec(prop_oneof![Just(0.0_f32), 0.0..1.0_f32], 0..300),
            count in 1..50_usize,
        ) {
            let least = bound(&weights, |have, _| have >= count);
            let kept = from_bound(&weights, least);
            let positive = weights.iter().filter(|weight| **weight > 0.0).count();
            prop_assert!(kept.len() >= count.min(positive));
            let mut sorted: Vec<(u32, f32)> =
                (0..).zip(weights.iter().copied()).filter(|(_, weight)| *weight > 0.0).collect();
            sorted.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
            prop_assert_eq!(&kept[..], &sorted[..kept.len()]);
        }
    }
}
