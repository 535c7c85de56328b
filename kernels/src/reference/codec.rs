//! Groups of values between their smallest and their largest, one value at a time.

use half::f16;

/// Zero, step and codes of one group, `levels` steps apart at most (KIVI: `round((x - zero) / step)`).
pub fn quantise(group: &[f32], levels: u8) -> (f16, f16, Vec<u8>) {
    let mut sorted = group.to_vec();
    sorted.sort_by(f32::total_cmp);
    // A zero of either sign is the positive one.
    let (smallest, largest) = (sorted[0] + 0.0, sorted[sorted.len() - 1] + 0.0);
    let zero = f16::from_f32(smallest);
    let step = f16::from_f32((largest - zero.to_f32()) / f32::from(levels));
    if step == f16::ZERO || step.is_nan() {
        return (zero, if step.is_nan() { f16::ZERO } else { step }, vec![0; group.len()]);
    }
    let mut codes = Vec::new();
    for value in group {
        let mut code = 0;
        // The nearest code, the even one of two that are as near.
        let exact = (value - zero.to_f32()) / step.to_f32();
        for candidate in 0..=levels {
            let (distance, best) = ((exact - f32::from(candidate)).abs(), (exact - f32::from(code)).abs());
            if distance < best || (distance == best && candidate % 2 == 0) {
                code = candidate;
            }
        }
        codes.push(code);
    }
    (zero, step, codes)
}
