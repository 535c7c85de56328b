//! Root mean square normalisation in f64.

/// Normalises rows of `weight.len()` channels.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let mut out = Vec::new();
    for row in x.chunks_exact(weight.len()) {
        let square: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / weight.len() as f64;
        let norm = (square + f64::from(eps)).sqrt();
        out.extend(row.iter().zip(weight).map(|(v, w)| f64::from(*v) / norm * f64::from(*w)));
    }
    out
}

/// Normalises every head of `weight.len()` channels of rows of any number of heads.
pub fn head_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    rms_norm(x, weight, eps)
}
