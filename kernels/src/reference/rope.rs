//! Rotary position embedding in f64.

use crate::backend::RopePairing;

/// Rotates every head of `head_dim` channels in one row to `position`.
pub fn rope(row: &[f32], head_dim: usize, base: f64, pairing: RopePairing, position: u32) -> Vec<f64> {
    let mut out = vec![0.0; row.len()];
    for (head, channels) in row.chunks_exact(head_dim).enumerate() {
        for i in 0..head_dim / 2 {
            let angle = f64::from(position) * base.powf(-2.0 * i as f64 / head_dim as f64);
            let (a, b) = match pairing {
                RopePairing::Adjacent => (2 * i, 2 * i + 1),
                RopePairing::Halves => (i, i + head_dim / 2),
            };
            let (x, y) = (f64::from(channels[a]), f64::from(channels[b]));
            out[head * head_dim + a] = x * angle.cos() - y * angle.sin();
            out[head * head_dim + b] = x * angle.sin() + y * angle.cos();
        }
    }
    out
}
