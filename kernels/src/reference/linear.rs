//! `out = x * weights + bias` in f64.

/// `x` is `[rows, cols]`, `weights` `[outputs, cols]`, the result `[rows, outputs]`.
pub fn linear(x: &[f32], weights: &[f32], bias: Option<&[f32]>, cols: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for x in x.chunks_exact(cols) {
        for (output, row) in weights.chunks_exact(cols).enumerate() {
            let sum: f64 = x.iter().zip(row).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            out.push(sum + bias.map_or(0.0, |bias| f64::from(bias[output])));
        }
    }
    out
}
