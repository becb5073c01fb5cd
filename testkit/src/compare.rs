//! How far values are from others.

/// Mean squared error relative to the mean square of the expected values.
pub fn nmse(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let (mut error, mut square) = (0f64, 0f64);
    for (&f, &e) in found.iter().zip(expected) {
        assert!(f.is_finite(), "{f} where {e} is expected");
        error += f64::from(f - e).powi(2);
        square += f64::from(e).powi(2);
    }
    if square == 0.0 { error } else { error / square }
}

/// The greatest difference between two lists of values.
#[track_caller]
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .fold(0.0, |m, (a, b)| f32::max(m, (a - b).abs()))
}

/// The cosine of the angle between two vectors.
pub fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
