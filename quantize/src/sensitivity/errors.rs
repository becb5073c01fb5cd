//! Errors of rounding, and a group's losses computed from them.

use super::probe::PROBE;
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, Rounded};
use crate::linalg::{Matrix, read_row};
use crate::methods::rtn;
use crate::schemes::not_made;
use crate::second_order::InputStats;
use nq_formats::trellis::BLOCK;
use nq_formats::{Scheme, TrellisScheme, Weight};
use nq_model::Dims;

/// Most rows of a weight on which its output errors are sampled.
pub(super) const SAMPLE: usize = 256;

/// Measurements of a group.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// KL divergence with the group rounded to the probe's scheme.
    pub(super) kld: f64,
    /// True if the group is in a layer.
    pub(super) in_layer: bool,
    /// Output error of the probe's scheme.
    probe: f64,
    /// Output error of each candidate.
    pub(super) candidates: Vec<f64>,
    /// Output errors in the probe's scheme, rounded to nearest and by the method, if that was tried.
    nearest: f64,
    by_method: f64,
}

impl Found {
    /// The expected divergence per unit of a candidate's error. `together` is the ratio of the divergence
    /// of all layers rounded at once to the sum over them.
    pub(super) fn unit(&self, together: f64) -> f64 {
        let method = if self.nearest > 0.0 {
            self.by_method / self.nearest
        } else {
            1.0
        };
        let together = if self.in_layer { together } else { 1.0 };
        self.kld.max(0.0) * method * together / self.probe.max(f64::MIN_POSITIVE)
    }

    /// Adds the output errors of `weight`, sampled on `rows`, under the probe's scheme and every
    /// candidate.
    pub(super) fn add_weight(
        &mut self,
        weight: &Weight,
        rows: &Matrix,
        importance: &[f32],
        candidates: &[Scheme],
    ) -> Result<()> {
        let scale = weight.dims().rows as f64 / rows.rows.max(1) as f64;
        let error = |scheme: Scheme| -> Result<f64> {
            let scheme = match scheme {
                Scheme::Affine(scheme) => scheme,
                Scheme::Trellis(scheme) => {
                    return Ok(scale * of_trellis(scheme, rows, importance));
                }
                Scheme::Exl3(scheme) => return Err(not_made(scheme)),
            };
            let rounded = rtn::round(rows, Grid::new(scheme)?, Fit::clip(), importance);
            Ok(scale * weighted(&rounded.change(rows), importance))
        };
        self.probe += error(PROBE.into())?;
        self.candidates.resize(candidates.len(), 0.0);
        for (sum, &scheme) in self.candidates.iter_mut().zip(candidates) {
            *sum += error(scheme)?;
        }
        Ok(())
    }

    /// Adds the output errors of `rows` of a weight in the probe's scheme, on inputs with the statistics
    /// `stats`: rounded to nearest, and rounded by the method as `tried`.
    pub(super) fn add_method(
        &mut self,
        rows: &Matrix,
        tried: &Rounded,
        stats: &InputStats,
    ) -> Result<()> {
        let output = |rounded: &Rounded| match &stats.hessian {
            Some(h) => h.quadratic_error(&rounded.change(rows)),
            None => Ok(weighted(&rounded.change(rows), &stats.mean_square)),
        };
        let nearest = rtn::round(rows, tried.grid, Fit::clip(), &stats.mean_square);
        self.nearest += output(&nearest)?;
        self.by_method += output(tried)?;
        Ok(())
    }
}

/// The expected output error of rows in a trellis: a transform spreads the error of each block of inputs evenly.
fn of_trellis(scheme: TrellisScheme, rows: &Matrix, importance: &[f32]) -> f64 {
    let square = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
    let mean = |h: &[f32]| match h.len() {
        0 => 1.0,
        n => h.iter().map(|&h| f64::from(h)).sum::<f64>() / n as f64,
    };
    let of_row = |row: &[f32]| -> f64 {
        // The row has one scale, so its blocks have errors of one size.
        let each = square(row) / row.len().max(1) as f64;
        let blocks = row.chunks(BLOCK).enumerate();
        let of_block = |(i, block): (usize, &[f32])| {
            let h = importance.chunks(BLOCK).nth(i).unwrap_or_default();
            block.len() as f64 * each * mean(h)
        };
        blocks.map(of_block).sum()
    };
    scheme.squared_error() * rows.iter_rows().map(of_row).sum::<f64>()
}

/// Up to [`SAMPLE`] rows of the weight `name`, evenly spread.
pub(super) fn sample(name: &str, weight: &Weight) -> Result<Matrix> {
    sample_of(name, weight, SAMPLE)
}

/// Up to `most` rows of the weight `name`, evenly spread.
pub(super) fn sample_of(name: &str, weight: &Weight, most: usize) -> Result<Matrix> {
    let Dims { rows: out, cols } = weight.dims();
    let n = out.min(most);
    let mut rows = Matrix::zeros(n, cols);
    for i in 0..n {
        read_row(name, weight, i * out / n, rows.row_mut(i))?;
    }
    Ok(rows)
}

/// `sum(h_j e_ij^2)`; an empty `h` counts as ones.
fn weighted(e: &Matrix, h: &[f32]) -> f64 {
    let of_row = |row: &[f32]| -> f64 {
        let h = h.iter().copied().chain(std::iter::repeat(1.0));
        let terms = row.iter().zip(h);
        terms
            .map(|(&e, h)| f64::from(h) * f64::from(e).powi(2))
            .sum()
    };
    e.iter_rows().map(of_row).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_formats::{AffineScheme, Bits, Group, Tensor, Zeros};

    fn rows() -> Matrix {
        let mut m = Matrix::zeros(4, 64);
        for (i, v) in m.data.iter_mut().enumerate() {
            *v = ((i * 37 % 101) as f32 - 50.0) / 25.0;
        }
        m
    }

    /// Losses are in proportion to errors; a method that halves them halves the losses.
    #[test]
    fn losses_follow_errors_and_the_method() {
        let rows = rows();
        let tensor = Tensor::from_f32(vec![4, 64], rows.data.clone()).unwrap();
        let eight = AffineScheme::new(Bits::B8, Group::Size(32), Zeros::None);
        let mut found = Found {
            kld: 0.01,
            ..Found::default()
        };
        let weight = Weight::Dense(tensor);
        found
            .add_weight(&weight, &rows, &[], &[PROBE.into(), eight.into()])
            .unwrap();
        assert!((found.unit(0.5) * found.candidates[0] - 0.01).abs() < 1e-12);
        assert!(found.candidates[1] < found.candidates[0] / 100.0);
        let plain = found.unit(1.0);

        // Rounding to nearest again saves nothing; a method without any error saves everything.
        let stats = InputStats {
            mean_square: vec![1.0; 64],
            ..InputStats::default()
        };
        let grid = Grid::new(PROBE).unwrap();
        let nearest = rtn::round(&rows, grid, Fit::clip(), &stats.mean_square);
        found.add_method(&rows, &nearest, &stats).unwrap();
        assert!((found.unit(1.0) - plain).abs() < 1e-12 * plain);
        (found.in_layer, found.by_method) = (true, found.by_method / 2.0);
        assert!((found.unit(1.5) - 0.75 * plain).abs() < 1e-12 * plain);
    }
}
