//! Rounding a weight to its scheme, whatever kind that is: a grid by a method, or a trellis by a search.

use crate::error::Result;
use crate::fit::Fit;
use crate::grid::Grid;
use crate::linalg::{Matrix, read_row};
use crate::methods::rtn::{self, Rtn};
use crate::methods::{Method, Needs, Problem};
use crate::packer::Packer;
use crate::report::LayerReport;
use crate::schemes::not_made;
use crate::second_order::{Changes, InputStats};
use crate::trellis;
use half::f16;
use nq_formats::trellis::STRIP;
use nq_formats::{Progress, QuantizedWeight, Scheme, TrellisScheme, TrellisWeight, Weight};
use nq_model::Dims;
use rayon::prelude::*;
use std::sync::Arc;

/// A weight, or its rows so far, rounded and packed.
enum RoundedRows {
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
    packing: RoundedRows,
    bits: u32,
    errors: Changes,
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
                None => Changes {
                    weight: weight.square_norm(),
                    change: outcome.rounded.change(weight).square_norm(),
                    ..Changes::default()
                },
            };
            let mut packer = Packer::new(outcome.rounded.grid, weight.cols);
            packer.push(&outcome.rounded);
            let mut fallbacks = outcome.fallbacks;
            let scales = outcome.rounded.params.iter().map(|p| p.scale);
            fallbacks.extend(cut(name, weight, scales));
            Ok(Rounding {
                packing: RoundedRows::Affine(packer),
                bits: scheme.bits.into(),
                errors,
                method: outcome.method,
                asked,
                fallbacks,
            })
        }
        Scheme::Exl3(scheme) => Err(not_made(scheme)),
        Scheme::Trellis(scheme) => {
            let feeds = method.needs() == Needs::Hessian;
            let (rounded, mut fallbacks) =
                trellis::round(name, weight, inputs.filter(|_| feeds), scheme)?;
            let scales = rounded.row_scales().iter().map(|s| s.to_f32());
            fallbacks.extend(cut(name, weight, scales));
            let mut change = Matrix::zeros(weight.rows, weight.cols);
            (change.data.par_chunks_mut(weight.cols).enumerate()).for_each(|(i, change)| {
                rounded.dequantize_row(i, change);
                for (c, w) in change.iter_mut().zip(weight.row(i)) {
                    *c -= w;
                }
            });
            let mut errors = Changes {
                weight: weight.square_norm(),
                change: change.square_norm(),
                ..Changes::default()
            };
            if let Some(hessian) = inputs.and_then(|i| i.hessian.as_ref()) {
                errors.outputs = hessian.quadratic_error(weight)?;
                errors.output_change = hessian.quadratic_error(&change)?;
            }
            Ok(Rounding {
                packing: RoundedRows::Trellis(TrellisRows {
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

/// The share of the greatest f16 from which on a scale is one that had to be made smaller; products in two levels do
/// not reach it quite.
const SATURATED: f32 = 0.98;

/// Says that a weight has values which are cut, since an f16 holds no scale great enough for them.
fn cut(name: &str, weight: &Matrix, mut scales: impl Iterator<Item = f32>) -> Option<String> {
    let most = f16::MAX.to_f32();
    let found = scales.any(|scale| scale.abs() > SATURATED * most);
    found.then(|| {
        let greatest = weight.data.iter().fold(0.0, |most: f32, v| most.max(v.abs()));
        format!("{name}: values up to {greatest:.3e} are cut: their scales are beyond {most}, the greatest f16")
    })
}

/// Rounds a large weight by `method`, in pieces of rows, by which `progress` advances. Returns also what
/// the method could not do, once each.
///
/// # Errors
/// Errors of [`round`]; a weight that is not finite.
pub(crate) fn by_pieces(
    method: &dyn Method,
    name: &str,
    source: &Weight,
    inputs: Option<&InputStats>,
    scheme: Scheme,
    progress: &dyn Progress,
) -> Result<(Weight, LayerReport, Vec<String>)> {
    let Dims { rows: out, cols } = source.dims();
    // Whole strips of a trellis.
    let piece = (PIECE / cols).max(1).next_multiple_of(STRIP);
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
        progress.advance(weight.rows as u64);
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
            let (weight, row, _) = by_pieces(&nearest, name, source, None, scheme, &())?;
            Ok((weight, row.rel_error))
        }
        Scheme::Exl3(scheme) => Err(not_made(scheme)),
    }
}

impl Rounding {
    /// Appends more rows of the weight, made by the same request.
    pub(crate) fn append(&mut self, more: Rounding) {
        match (&mut self.packing, more.packing) {
            (RoundedRows::Affine(rows), RoundedRows::Affine(more)) => rows.append(more),
            (RoundedRows::Trellis(rows), RoundedRows::Trellis(more)) => {
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
        let ratio = |a: f64, b: f64| if b > 0.0 { (a / b).sqrt() } else { 0.0 };
        let e = &self.errors;
        LayerReport {
            name: name.into(),
            bits: self.bits,
            method: self.method.into(),
            rel_error: ratio(e.change, e.weight),
            output_error: (e.outputs > 0.0).then(|| ratio(e.output_change, e.outputs)),
        }
    }

    /// The weight in canonical form, and deviations from the request.
    ///
    /// # Errors
    /// Errors of assembling a weight; what is made here causes none.
    pub(crate) fn finish(self) -> Result<(Weight, Vec<String>)> {
        let weight = match self.packing {
            RoundedRows::Affine(packer) => packer.finish()?,
            RoundedRows::Trellis(rows) => {
                let dims = Dims::new(rows.row_scales.len(), rows.input_scales.len());
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

/// Most elements of a large weight held in f32 at once.
pub(crate) const PIECE: usize = 1 << 26;

#[cfg(test)]
mod tests {
    use super::*;
    use nq_formats::trellis::Code;
    use nq_formats::{AffineScheme, Bits, Group, Tensor, Zeros};

    #[test]
    fn values_beyond_the_greatest_scale_are_named() {
        let (rows, cols) = (16, 256);
        let four = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::None);
        let schemes: [Scheme; 4] = [
            four.into(),
            AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer).into(),
            four.two_level(Bits::B8).into(),
            TrellisScheme::of_bits(Code::Octagon, 4.0).unwrap().into(),
        ];
        for scheme in schemes {
            let notes = |greatest: f32| {
                let mut values: Vec<f32> = (0..rows * cols).map(|i| (i % 7) as f32 - 3.0).collect();
                values[5 * cols + 9] = greatest;
                let weight = Weight::Dense(Tensor::from_f32(vec![rows, cols], values).unwrap());
                let nearest = Rtn::new(Fit::clip());
                let made = by_pieces(&nearest, "model.w", &weight, None, scheme, &());
                made.unwrap().2
            };
            assert_eq!(notes(1000.0), Vec::<String>::new(), "{scheme}");
            let expected = "model.w: values up to 3.000e7 are cut: their scales are beyond 65504, the greatest f16";
            assert_eq!(notes(3e7), [expected], "{scheme}");
        }
    }
}
