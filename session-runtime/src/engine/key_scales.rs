//! Scales of key channels, for KV that is rounded to int8 with one scale for a block of channels.
//!
//! Where the projection of the keys has a bias (`qwen2`), some channels are far larger than the others at every token, and the
//! block's scale would leave the others no precision. Such channels are divided by a power of two before they are
//! stored, and the queries multiplied by it: scores are the same, bit for bit, as far as nothing is rounded. Both
//! channels that rotary embedding pairs get the same one, so that it does not matter that they are rotated. (Xiao et al.,
//! "SmoothQuant", arXiv 2211.10438, section 4, moves scales between factors of a product in the same way.)

use kernels::backend::RopePairing;

use crate::models::architecture::ModelConfig;

/// How large a channel may be before it is divided: about what keys are without a bias.
const USUAL: f32 = 4.0;

/// Factors of the channels of K (`kv_heads * head_dim`) and of Q (`heads * head_dim`).
pub(super) struct KeyScales {
    pub key: Vec<f32>,
    pub query: Vec<f32>,
}

/// The factors for a bias of the keys.
pub(super) fn of_bias(config: &ModelConfig, bias: &[f32]) -> KeyScales {
    let (dim, half) = (config.head_dim, config.rope_dims / 2);
    let partner = |channel: usize| match config.rope_pairing {
        _ if channel >= 2 * half => channel,
        RopePairing::Halves => (channel + half) % (2 * half),
        RopePairing::Adjacent => channel ^ 1,
    };
    let divisors: Vec<f32> = bias
        .chunks(dim)
        .flat_map(|head| {
            (0..head.len()).map(|channel| power(head[channel].abs().max(head[partner(channel)].abs())))
        })
        .collect();
    let group = config.heads / config.kv_heads;
    KeyScales {
        key: divisors.iter().map(|divisor| 1.0 / divisor).collect(),
        query: divisors.chunks(dim).flat_map(|head| head.repeat(group)).collect(),
    }
}

/// The largest power of two that leaves a channel no smaller than usual; 1 for a usual one. From the bits of the
/// exponent, which are the same on every machine.
fn power(magnitude: f32) -> f32 {
    const EXPONENT: u32 = 0x7f80_0000;
    let times = magnitude / USUAL;
    if times > 1.0 { f32::from_bits(times.to_bits() & EXPONENT) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_the_powers_of_two_that_leave_what_is_usual() {
        let of = [(0.0, 1.0), (3.9, 1.0), (7.9, 1.0), (8.0, 2.0), (100.0, 16.0), (-0.0, 1.0)];
        for (magnitude, divisor) in of {
            assert_eq!(power(magnitude), divisor, "{magnitude}");
        }
    }
}
