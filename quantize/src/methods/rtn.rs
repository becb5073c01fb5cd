//! Rounding to nearest: every element on its own, with the range of each group either whole
//! or searched ([`Fit`]).

use super::{Method, Needs, Outcome, Problem};
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, Rounded};
use crate::linalg::{Matrix, read_row};
use bytes::Bytes;
use half::f16;
use nq_formats::{AffineWeight, QuantizedWeight, Weight, ZeroPoints, Zeros, pack};
use rayon::prelude::*;
use serde_json::{Map, Value};

/// Rounding to nearest.
#[derive(Clone, Copy, Debug)]
pub struct Rtn {
    fit: Fit,
}

impl Rtn {
    /// With ranges chosen by `fit`.
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

/// Rounds `weight` to the nearest points of `grid`, each group's range chosen by `fit` with
/// `importance` per input (empty: all alike).
pub fn round(weight: &Matrix, grid: Grid, fit: Fit, importance: &[f32]) -> Rounded {
    let cols = weight.cols;
    let size = grid.group().size(cols);
    let mut rounded = Rounded::new(grid, weight.rows, cols);
    let groups = rounded.groups();
    rounded
        .codes
        .par_chunks_mut(cols)
        .zip(rounded.params.par_chunks_mut(groups))
        .zip(weight.data.par_chunks(cols))
        .for_each(|((codes, params), row)| {
            for (g, ((codes, w), p)) in codes
                .chunks_mut(size)
                .zip(row.chunks(size))
                .zip(params)
                .enumerate()
            {
                let at = g * size;
                let h = importance.get(at..at + w.len()).unwrap_or(&[]);
                *p = fit.params(&grid, w, h);
                grid.round(*p, w, codes);
            }
        });
    rounded
}

/// As [`round`], row by row from a weight that may be too large to be held in f32 (an
/// embedding). Also returns `|W - Q|_F / |W|_F`.
///
/// # Errors
/// [`crate::Error::NotFinite`] naming `name`; a dense weight whose type is no float.
pub fn round_rows(
    name: &str,
    weight: &Weight,
    grid: Grid,
    fit: Fit,
    importance: &[f32],
) -> Result<(Weight, f64)> {
    let (rows, cols) = weight.dims();
    let scheme = grid.scheme();
    let groups = scheme.group.count(cols);
    let width = scheme.bits.bytes(cols);
    let zeros_width = match scheme.zeros {
        Zeros::Integer => scheme.bits.bytes(groups),
        _ => 0,
    };
    // Rows in one piece of work: enough to hide the hand-over, few enough to share evenly.
    const PIECE: usize = 16;
    let mut codes = vec![0u8; rows * width];
    let mut scales = vec![f16::ZERO; rows * groups];
    let pieces: Vec<(Vec<u8>, f64, f64)> = codes
        .par_chunks_mut(PIECE * width)
        .zip(scales.par_chunks_mut(PIECE * groups))
        .enumerate()
        .map(|(piece, (codes, scales))| -> Result<_> {
            let mut w = vec![0f32; cols];
            let mut unpacked = vec![0u8; cols];
            let mut zeros = vec![0u8; groups];
            let mut packed_zeros = vec![0u8; codes.len() / width * zeros_width];
            let (mut error, mut norm) = (0f64, 0f64);
            let size = scheme.group.size(cols);
            for (r, (codes, scales)) in codes
                .chunks_exact_mut(width)
                .zip(scales.chunks_exact_mut(groups))
                .enumerate()
            {
                read_row(name, weight, piece * PIECE + r, &mut w)?;
                for (g, (w, q)) in w.chunks(size).zip(unpacked.chunks_mut(size)).enumerate() {
                    let h = importance.get(g * size..g * size + w.len()).unwrap_or(&[]);
                    let p = fit.params(&grid, w, h);
                    grid.round(p, w, q);
                    (scales[g], zeros[g]) = (f16::from_f32(p.scale), p.zero);
                    for (&w, &q) in w.iter().zip(q.iter()) {
                        error += f64::from(w - p.value(q)).powi(2);
                        norm += f64::from(w).powi(2);
                    }
                }
                pack::pack_row(scheme.bits, &unpacked, codes);
                if zeros_width > 0 {
                    let out = &mut packed_zeros[r * zeros_width..(r + 1) * zeros_width];
                    pack::pack_row(scheme.bits, &zeros, out);
                }
            }
            Ok((packed_zeros, error, norm))
        })
        .collect::<Result<_>>()?;
    let error: f64 = pieces.iter().map(|p| p.1).sum();
    let norm: f64 = pieces.iter().map(|p| p.2).sum();
    let zeros = match scheme.zeros {
        Zeros::Integer => {
            let zeros: Vec<u8> = pieces.into_iter().flat_map(|p| p.0).collect();
            ZeroPoints::Integer(Bytes::from(zeros))
        }
        _ => ZeroPoints::None,
    };
    let codes = Bytes::from(codes);
    let weight = AffineWeight::new(scheme, (rows, cols), codes, scales.into(), zeros, None)?;
    let rel_error = (error / norm.max(f64::MIN_POSITIVE)).sqrt();
    Ok((
        Weight::Quantized(QuantizedWeight::Affine(weight)),
        rel_error,
    ))
}
