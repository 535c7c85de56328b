//! Gated activation of Gemma in f64.

/// `gelu(gate) * up`, element by element, with `gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))`.
pub fn geglu(gate: &[f32], up: &[f32]) -> Vec<f64> {
    let inner = |g: f64| (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
    let gelu = |g: f64| g / 2.0 * (1.0 + inner(g).tanh());
    gate.iter().zip(up).map(|(g, u)| gelu(f64::from(*g)) * f64::from(*u)).collect()
}
