//! Gated activation in f64.

/// `silu(gate) * up`, element by element.
pub fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f64> {
    let silu = |g: f64| g / (1.0 + (-g).exp());
    gate.iter().zip(up).map(|(g, u)| silu(f64::from(*g)) * f64::from(*u)).collect()
}
