//! Rounding a weight to its scheme, whatever kind that is: a grid by a method, or a trellis by a search.

use crate::error::Result;
use crate::fit::Fit;
use crate::grid::Grid;
use crate::layers::PIECE;
use crate::linalg::{Matrix, read_row};
use crate::methods::rtn::{self, Rtn};
use crate::methods::{Method, Needs, Problem};
use crate::packer::Packer;
use crate::report::LayerReport;
use crate::second_order::{Errors, InputStats};
use crate::trellis::{Code, Trellis};
use half::f16;
use nq_formats::trellis::STRIP;
use nq_formats::{QuantizedWeight, Scheme, TrellisScheme, TrellisWeight, Weight};
use rayon::prelude::*;
use std::sync::Arc;

/// A weight, or its rows so far, rounded and packed.
enum Rows {
    Affine(Packer),
    Trellis(TrellisRows),
}

/// Rows of a trellis, of which all but the last are whole strips.
struct TrellisRows {
    scheme: TrellisScheme,
    words: Vec<u8>,
    row_scales: Vec<f16>,
    input_scales: Arc<[f16]>,
}

/// A rounded weight and how it was made.
pub(crate) struct Rounding {
    rows: Rows,
    bits: u32,
    errors: Errors,
    method: &'static str,
    /// The method that was asked for, which names what was made by several.
    asked: &'static str,
    /// Deviations from the request, with their reasons.
    fallbacks: Vec<String>,
}

/// Rounds the rows `weight` of the weight `name` to `scheme` by `method`. A trellis takes from a method only whether
/// errors are fed to later columns, which methods that need [`Needs::Hessian`] do.
///
/// # Errors
/// Errors of the method, or of a device that keeps the moments.
pub(crate) fn round(
    method: &dyn Method,
    name: &str,
    weight: &Matrix,
    inputs: Option<&InputStats>,
    scheme: Scheme,
) -> Result<Rounding> {
    let asked = method.name();
    match scheme {
        Scheme::Affine(scheme) => {
            let problem = Problem {
                name,
                weight,
                inputs,
                grid: Grid::new(scheme)?,
            };
            let outcome = method.round(&problem)?;
            let errors = match inputs.and_then(|i| i.hessian.as_ref()) {
                Some(hessian) => hessian.errors(weight, &outcome.rounded)?,
                None => Errors {
                    weight: weight.square_norm(),
                    change: outcome.rounded.change(weight).square_norm(),
                    ..Errors::default()
                },
            };
            let mut packer = Packer::new(outcome.rounded.grid, weight.cols);
            packer.push(&outcome.rounded);
            Ok(Rounding {
                rows: Rows::Affine(packer),
                bits: scheme.bits.into(),
                errors,
                method: outcome.method,
                asked,
                fallbacks: outcome.fallbacks,
            })
        }
        Scheme::Trellis(scheme) => {
            let feeds = method.needs() == Needs::Hessian;
            let (rounded, fallbacks) =
                trellis_rows(name, weight, inputs.filter(|_| feeds), scheme)?;
            let mut change = Matrix::zeros(weight.rows, weight.cols);
            for i in 0..weight.rows {
                rounded.dequantize_row(i, change.row_mut(i));
            }
            for (c, w) in change.data.iter_mut().zip(&weight.data) {
                *c -= w;
            }
            let mut errors = Errors {
                weight: weight.square_norm(),
                change: change.square_norm(),
                ..Errors::default()
            };
            if let Some(hessian) = inputs.and_then(|i| i.hessian.as_ref()) {
                errors.outputs = hessian.quadratic_error(weight)?;
                errors.output_change = hessian.quadratic_error(&change)?;
            }
            Ok(Rounding {
                rows: Rows::Trellis(TrellisRows {
                    scheme,
                    words: rounded.words().to_vec(),
                    row_scales: rounded.row_scales().to_vec(),
                    input_scales: rounded.input_scales().into(),
                }),
                bits: scheme.bits().ceil() as u32,
                errors,
                method: asked,
                asked,
                fallbacks,
            })
        }
    }
}

/// Rounds a large weight by `method`, in pieces of rows. Returns also what the method could not do, once each.
///
/// # Errors
/// Errors of [`round`]; a weight that is not finite.
pub(crate) fn by_pieces(
    method: &dyn Method,
    name: &str,
    source: &Weight,
    inputs: Option<&InputStats>,
    scheme: Scheme,
) -> Result<(Weight, LayerReport, Vec<String>)> {
    let (out, cols) = source.dims();
    // Whole strips of a trellis.
    let piece = (PIECE / cols).next_multiple_of(STRIP);
    let mut all: Option<Rounding> = None;
    for start in (0..out).step_by(piece) {
        let mut weight = Matrix::zeros(piece.min(out - start), cols);
        (weight.data.par_chunks_mut(cols).enumerate())
            .try_for_each(|(i, row)| read_row(name, source, start + i, row))?;
        let rounded = round(method, name, &weight, inputs, scheme)?;
        match &mut all {
            None => all = Some(rounded),
            Some(all) => all.append(rounded),
        }
    }
    let Some(all) = all else {
        unreachable!("a matrix has rows")
    };
    let row = all.report(name);
    let (weight, fallbacks) = all.finish()?;
    Ok((weight, row, fallbacks))
}

/// Rounds a weight without regard to what its inputs have in common, and returns the relative error of its values.
/// `importance` weighs errors in the search for the ranges of groups, by input; empty: all alike.
///
/// # Errors
/// A weight that is not finite.
pub(crate) fn to_nearest(
    name: &str,
    source: &Weight,
    importance: &[f32],
    scheme: Scheme,
) -> Result<(Weight, f64)> {
    match scheme {
        Scheme::Affine(scheme) => {
            rtn::round_rows(name, source, Grid::new(scheme)?, Fit::clip(), importance)
        }
        Scheme::Trellis(_) => {
            let nearest = Rtn::new(Fit::clip());
            let (weight, row, _) = by_pieces(&nearest, name, source, None, scheme)?;
            Ok((weight, row.rel_error))
        }
    }
}

impl Rounding {
    /// Appends more rows of the weight, made by the same request.
    pub(crate) fn append(&mut self, more: Rounding) {
        match (&mut self.rows, more.rows) {
            (Rows::Affine(rows), Rows::Affine(more)) => rows.append(more),
            (Rows::Trellis(rows), Rows::Trellis(more)) => {
                debug_assert!(rows.row_scales.len().is_multiple_of(STRIP));
                debug_assert!(rows.input_scales == more.input_scales);
                rows.words.extend(more.words);
                rows.row_scales.extend(more.row_scales);
            }
            _ => unreachable!("rows of one weight have one scheme"),
        }
        if self.method != more.method {
            self.method = self.asked;
        }
        self.errors += more.errors;
        for fallback in more.fallbacks {
            if !self.fallbacks.contains(&fallback) {
                self.fallbacks.push(fallback);
            }
        }
    }

    /// The weight's row of the report.
    pub(crate) fn report(&self, name: &str) -> LayerReport {
        self.errors.report(name, self.bits, self.method)
    }

    /// The weight in canonical form, and deviations from the request.
    ///
    /// # Errors
    /// Errors of assembling a weight; what is made here causes none.
    pub(crate) fn finish(self) -> Result<(Weight, Vec<String>)> {
        let weight = match self.rows {
            Rows::Affine(packer) => packer.finish()?,
            Rows::Trellis(rows) => {
                let dims = (rows.row_scales.len(), rows.input_scales.len());
                let words = rows.words.into();
                let of_rows = rows.row_scales.into();
                let weight =
                    TrellisWeight::new(rows.scheme, dims, words, of_rows, rows.input_scales)?;
                Weight::Quantized(QuantizedWeight::Trellis(weight))
            }
        };
        Ok((weight, self.fallbacks))
    }
}

/// Rounds rows to a trellis, each sequence on its own.
fn trellis_rows(
    _name: &str,
    weight: &Matrix,
    _inputs: Option<&InputStats>,
    scheme: TrellisScheme,
) -> Result<(TrellisWeight, Vec<String>)> {
    use nq_formats::trellis::{LANES, SEQUENCE, TILE, place, transform, word_place};
    let code = match scheme.code() {
        nq_formats::trellis::Code::Sum => Code::Sum,
        nq_formats::trellis::Code::Octagon => Code::Octagon,
    };
    let trellis = Trellis::new(code, scheme.step_bits())?;
    let (rows, cols) = (weight.rows, weight.cols);
    let sign = |i: usize| match (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 63 {
        0 => 1.0f32,
        _ => -1.0,
    };
    let mut turned = weight.data.clone();
    let mut scales = vec![0f32; rows];
    for (row, scale) in turned.chunks_exact_mut(cols).zip(&mut scales) {
        row.iter_mut().enumerate().for_each(|(i, v)| *v *= sign(i));
        transform(row);
        let square: f32 = row.iter().map(|v| v * v).sum::<f32>() / cols as f32;
        let unit = trellis.unit() * 128.0;
        *scale = f16::from_f32(square.sqrt() * unit).to_f32().max(1e-7);
    }
    let strips = rows.div_ceil(STRIP);
    let mut words = vec![0u32; strips * scheme.strip_bytes(cols) / 4];
    let each = LANES * scheme.words();
    words
        .par_chunks_exact_mut(each)
        .enumerate()
        .for_each(|(tile, out)| {
            let (strip, tile) = (tile / (cols / TILE), tile % (cols / TILE));
            let mut targets = vec![0f32; LANES * SEQUENCE];
            for (lane, targets) in targets.chunks_exact_mut(SEQUENCE).enumerate() {
                for (step, to) in targets.chunks_exact_mut(scheme.code().width()).enumerate() {
                    let (r, c) = place(scheme.code(), lane, step);
                    let row = strip * STRIP + r;
                    for (i, to) in to.iter_mut().enumerate() {
                        let at = row * cols + tile * TILE + c + i;
                        *to = if row < rows {
                            128.0 * turned[at] / scales[row]
                        } else {
                            0.0
                        };
                    }
                }
            }
            let mut plain = vec![0u32; each];
            trellis.encode(&targets, 1.0, &mut plain);
            for lane in 0..LANES {
                for word in 0..scheme.words() {
                    out[word_place(scheme.words(), lane, word)] =
                        plain[lane * scheme.words() + word];
                }
            }
        });
    let words: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let scales = scales.into_iter().map(f16::from_f32).collect();
    let inputs = (0..cols).map(|i| f16::from_f32(sign(i))).collect();
    Ok((
        TrellisWeight::new(scheme, (rows, cols), words.into(), scales, inputs)?,
        Vec::new(),
    ))
}
