//! Attention of one query over keys and values in f64.

/// Softmax of the scaled scores over all `keys`, the weighted mean of `values`, and the natural log-sum-exp of
/// the scores. Keys and values are rows of `q.len()` channels.
pub fn attention(q: &[f32], keys: &[f32], values: &[f32], scale: f32) -> (Vec<f64>, f64) {
    let dot = |key: &[f32]| q.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let scores: Vec<f64> = keys.chunks_exact(q.len()).map(|key| dot(key) * f64::from(scale)).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; q.len()];
    for (weight, value) in weights.iter().zip(values.chunks_exact(q.len())) {
        for (out, v) in out.iter_mut().zip(value) {
            *out += weight / sum * f64::from(*v);
        }
    }
    (out, max + sum.ln())
}

/// The last `tokens` rows of `head_dim` channels, or all where there are fewer: what a window lets a row see.
pub fn window(rows: &[f32], head_dim: usize, tokens: usize) -> &[f32] {
    let first = (rows.len() / head_dim).saturating_sub(tokens);
    &rows[first * head_dim..]
}
