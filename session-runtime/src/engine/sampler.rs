//! Choosing the next token.
//!
//! The generator is counter-based: the draw at a position depends on (seed, position) alone, so a
//! replay needs no generator state and a restored session draws what it would have drawn.

use kernels::cpu::{best_isa, sampling};

use crate::models::constraint::TokenMask;

/// How the next token is chosen; every field is set.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: usize,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// Key of the draws.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

/// Tokens looked back at by the repetition penalty.
pub const PENALTY_WINDOW: usize = 64;

/// Uniform draw in `[0, 1)` for a position: the first 53 bits of BLAKE3 over (seed, position).
pub fn draw(seed: u64, position: u64) -> f64 {
    let mut hasher = blake3::Hasher::new_derive_key("session-runtime sampling 1");
    hasher.update(&seed.to_le_bytes());
    hasher.update(&position.to_le_bytes());
    let hash = hasher.finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&hash.as_bytes()[..8]);
    (u64::from_le_bytes(first) >> 11) as f64 / (1_u64 << 53) as f64
}

/// Chooses a token from `logits`. `recent` are the last tokens of the sequence (for the penalty),
/// `mask` the tokens a constraint allows, `position` the index the token will have.
///
/// Returns `None` when the mask allows nothing.
pub fn sample(
    logits: &mut [f32],
    params: &SamplingParams,
    recent: &[u32],
    mask: Option<&TokenMask>,
    position: u64,
) -> Option<u32> {
    penalise(logits, params.repetition_penalty, recent);
    let allowed = mask.map(TokenMask::words);
    let (first, highest) = sampling::highest(logits, allowed)?;
    if params.temperature <= 0.0 {
        return Some(first as u32);
    }
    sampling::weights(best_isa(), logits, highest, params.temperature, allowed);
    let weights = &*logits;
    if params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0 {
        let target = draw(params.seed, position) * sampling::total(weights);
        return sampling::reached(weights, target).map(|id| id as u32);
    }
    Some(filtered(weights, params, position).unwrap_or(first as u32))
}

/// Draws among the highest weights, as `top_k`, then `top_p` and `min_p` leave them.
fn filtered(weights: &[f32], params: &SamplingParams, position: u64) -> Option<u32> {
    let (top_k, top_p) = (params.top_k, f64::from(params.top_p));
    let mut kept = if top_k > 0 {
        sampling::from_bound(weights, sampling::bound(weights, |count, _| count >= top_k))
    } else {
        let total = sampling::total(weights);
        // A little more than is needed, because the sums are in another order.
        let bound = sampling::bound(weights, |_, sum| sum >= top_p * total * (1.0 + 1e-9));
        sampling::from_bound(weights, bound.max(params.min_p))
    };
    if top_k > 0 {
        kept.truncate(top_k);
    }
    let total = match top_k {
        0 => sampling::total(weights),
        _ => kept.iter().map(|(_, weight)| f64::from(*weight)).sum(),
    };
    let (mut sum, mut keep) = (0.0, 0);
    for (_, weight) in &kept {
        if keep > 0 && (sum >= top_p * total || *weight < params.min_p) {
            break;
        }
        sum += f64::from(*weight);
        keep += 1;
    }
    kept.truncate(keep);
    let mut left = draw(params.seed, position) * sum;
    for (id, weight) in &kept {
        left -= f64::from(*weight);
        if left < 0.0 {
            return Some(*id);
        }
    }
    kept.last().map(|(id, _)| *id)
}

/// Divides positive logits of recent tokens by the penalty and multiplies negative ones (CTRL, arXiv
/// 1909.05858, section 4.1), each token once.
fn penalise(logits: &mut [f32], penalty: f32, recent: &[u32]) {
    if penalty == 1.0 {
        return;
    }
    let mut seen: Vec<u32> = recent[recent.len().saturating_sub(PENALTY_WINDOW)..].to_vec();
    seen.sort_unstable();
    seen.dedup();
    for id in seen {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(temperature: f32) -> SamplingParams {
        SamplingParams { temperature, ..SamplingParams::default() }
    }

    #[test]
    fn greedy_takes_the_first_of_the_highest() {
        assert_eq!(sample(&mut [0.0, 3.0, 3.0], &params(0.0), &[], None, 0), Some(1));
    }

    #[test]
    fn draws_follow_the_distribution() {
        // Softmax of ln(1), ln(2), ln(5): shares 1/8, 2/8, 5/8.
        let logits = [1.0_f32.ln(), 2.0_f32.ln(), 5.0_f32.ln()];
        let mut counts = [0_u32; 3];
        for position in 0..20_000 {
            let id = sample(&mut logits.clone(), &params(1.0), &[], None, position).unwrap();
            counts[id as usize] += 1;
        }
        for (count, share) in counts.iter().zip([0.125, 0.25, 0.625]) {
            assert!((f64::from(*count) / 20_000.0 - share).abs() < 0.015, "{counts:?}");
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        let logits = [4.0_f32.ln(), 3.0_f32.ln(), 2.0_f32.ln(), 1.0_f32.ln()];
        let kept = |params: SamplingParams| {
            let mut ids: Vec<u32> = (0..2000)
                .map(|position| sample(&mut logits.clone(), &params, &[], None, position).unwrap())
                .collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        assert_eq!(kept(SamplingParams { top_k: 2, ..params(1.0) }), [0, 1]);
        assert_eq!(kept(SamplingParams { top_p: 0.65, ..params(1.0) }), [0, 1]);
        assert_eq!(kept(SamplingParams { min_p: 0.4, ..params(1.0) }), [0, 1, 2]);
        assert_eq!(kept(SamplingParams { top_k: 3, top_p: 0.7, ..params(1.0) }), [0, 1]);
        assert_eq!(kept(SamplingParams { top_k: 9, min_p: 0.6, ..params(1.0) }), [0, 1]);
        // Low temperatures leave the highest alone.
        assert_eq!(kept(params(0.01)), [0]);
    }

    #[test]
    fn i1_a_draw_depends_on_seed_and_position_alone() {
        assert_eq!(draw(1, 2).to_bits(), draw(1, 2).to_bits());
        assert_ne!(draw(1, 2).to_bits(), draw(1, 3).to_bits());
        assert_ne!(draw(1, 2).to_bits(), draw(2, 2).to_bits());
    }

    #[test]
    fn the_penalty_lowers_recent_tokens_once() {
        let mut logits = [2.0, -2.0, 2.0];
        penalise(&mut logits, 2.0, &[0, 0, 1]);
        assert_eq!(logits, [1.0, -4.0, 2.0]);
    }
}
