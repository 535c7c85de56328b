//! Multiplication by one factor in f64.

/// `x * factor`, element by element.
pub fn scale(x: &[f32], factor: f32) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x) * f64::from(factor)).collect()
}
