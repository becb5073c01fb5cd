//! Rounding to nearest: every element on its own, with the range of each group either whole
//! or searched ([`Fit`]).

use super::method::{Method, Needs, Outcome, Problem};
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, Rounded};
use crate::linalg::{Matrix, read_row};
use crate::packer::Packer;
use nq_formats::Weight;
use nq_model::Dims;
use rayon::prelude::*;
use serde_json::{Map, Value};

/// Rounding to nearest.
#[derive(Clone, Copy, Debug)]
pub struct Rtn {
    fit: Fit,
}

impl Rtn {
    /// Rounding with ranges chosen by `fit`.
    pub const fn new(fit: Fit) -> Self {
        Rtn { fit }
    }
}

impl Method for Rtn {
    fn name(&self) -> &'static str {
        if self.fit.steps == 0 {
            "rtn"
        } else {
            "rtn-clip"
        }
    }

    fn settings(&self) -> Map<String, Value> {
        Map::from_iter([("range".into(), self.fit.settings())])
    }

    fn needs(&self) -> Needs {
        if self.fit.steps == 0 {
            Needs::Nothing
        } else {
            Needs::Squares
        }
    }

    fn round(&self, problem: &Problem<'_>) -> Result<Outcome> {
        let importance = problem.inputs.map_or(&[][..], |i| &i.mean_square);
        Ok(Outcome {
            rounded: round(problem.weight, problem.grid, self.fit, importance),
            method: self.name(),
            fallbacks: Vec::new(),
        })
    }
}

/// Rounds `weight` to the nearest points of `grid`; each group's range is chosen by `fit` with
/// `importance` per input (empty: all equal).
pub fn round(weight: &Matrix, grid: Grid, fit: Fit, importance: &[f32]) -> Rounded {
    let cols = weight.cols;
    let size = grid.group().size(cols);
    let mut rounded = Rounded::new(grid, weight.rows, cols);
    (rounded.rows_mut(1).into_par_iter())
        .zip(weight.data.par_chunks(cols))
        .for_each(|(rounded, row)| {
            fit.row(&grid, row, importance, rounded.params, rounded.spans);
            let groups = rounded.codes.chunks_mut(size).zip(row.chunks(size));
            for ((codes, w), p) in groups.zip(rounded.params) {
                grid.round(*p, w, codes);
            }
        });
    rounded
}

/// Like [`round`], but row by row from a weight that may be too large for f32 (an
/// embedding). Also returns `|W - Q|_F / |W|_F`.
///
/// # Errors
/// [`crate::Error::NotFinite`], which names `name`; a dense weight that is not of a float type.
pub(crate) fn round_rows(
    name: &str,
    weight: &Weight,
    grid: Grid,
    fit: Fit,
    importance: &[f32],
) -> Result<(Weight, f64)> {
    let Dims { rows, cols } = weight.dims();
    // Rows per work item: enough to hide the hand-over, few enough to share evenly.
    const PIECE: usize = 16;
    let starts: Vec<usize> = (0..rows).step_by(PIECE).collect();
    let piece = |&start: &usize| -> Result<(Packer, f64, f64)> {
        let mut w = Matrix::zeros(PIECE.min(rows - start), cols);
        for (r, row) in w.data.chunks_mut(cols.max(1)).enumerate() {
            read_row(name, weight, start + r, row)?;
        }
        let rounded = round(&w, grid, fit, importance);
        let (mut error, mut value) = (0f64, vec![0f32; cols]);
        for (r, w) in w.iter_rows().enumerate() {
            rounded.dequantize_row(r, &mut value);
            let difference = |(w, v): (&f32, &f32)| f64::from(w - v).powi(2);
            error += w.iter().zip(&value).map(difference).sum::<f64>();
        }
        let mut packer = Packer::new(grid, cols);
        packer.push(&rounded);
        Ok((packer, error, w.square_norm()))
    };
    let pieces: Vec<_> = starts.par_iter().map(piece).collect::<Result<_>>()?;
    let error: f64 = pieces.iter().map(|p| p.1).sum();
    let norm: f64 = pieces.iter().map(|p| p.2).sum();
    let mut packer = Packer::new(grid, cols);
    pieces.into_iter().for_each(|piece| packer.append(piece.0));
    let weight = packer.finish()?;
    let rel_error = (error / norm.max(f64::MIN_POSITIVE)).sqrt();
    Ok((weight, rel_error))
}
