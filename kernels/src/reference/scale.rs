//! Multiplication by one factor, and by a factor for each channel, in f64.

/// `x * factor`, element by element.
pub fn scale(x: &[f32], factor: f32) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x) * f64::from(factor)).collect()
}

/// Rows of `x` times `factors`, channel by channel.
pub fn scale_channels(x: &[f32], factors: &[f32]) -> Vec<f64> {
    x.iter().zip(factors.iter().cycle()).map(|(x, factor)| f64::from(*x) * f64::from(*factor)).collect()
}
