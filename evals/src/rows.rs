//! KL divergence of given rows of logits, for measurements without an engine.

use crate::error::{Error, Result};
use crate::softmax;
use rayon::prelude::*;

/// `KL(softmax(reference) || softmax(model))` in nats, row by row, for logits `[rows, vocab]`.
///
/// # Errors
/// [`Error::NotFinite`] for a logit that is not finite, with its row as the position.
///
/// # Panics
/// If the two differ in length or are not a whole number of rows.
pub fn kld_rows(model: &[f32], reference: &[f32], vocab: usize) -> Result<Vec<f64>> {
    assert_eq!(model.len(), reference.len());
    assert_eq!(model.len() % vocab, 0);
    let peak = |role, row: &[f32], position| {
        softmax::peak(row).map(|p| p.1).ok_or(Error::NotFinite {
            role,
            window: 0,
            position,
        })
    };
    model
        .par_chunks_exact(vocab)
        .zip(reference.par_chunks_exact(vocab))
        .enumerate()
        .map(|(i, (y, x))| {
            let (y_max, x_max) = (peak("model", y, i)?, peak("reference", x, i)?);
            Ok(softmax::divergence(y, y_max, x, x_max).kld)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_by_hand() {
        let ln = |p: [f32; 2]| p.map(f32::ln);
        let reference = [ln([0.5, 0.5]), ln([0.9, 0.1])].concat();
        let model = [ln([0.25, 0.75]), ln([0.9, 0.1])].concat();
        let found = kld_rows(&model, &reference, 2).unwrap();
        let want = 0.5 * (2f64.ln() + (0.5f64 / 0.75).ln());
        assert!(
            (found[0] - want).abs() < 1e-6 && found[1].abs() < 1e-9,
            "{found:?}"
        );
        let error = kld_rows(&[0.0, f32::NAN], &[0.0, 0.0], 2).unwrap_err();
        assert!(error.to_string().contains("model"), "{error}");
    }
}
