//! AWQ (Lin et al., arXiv 2306.00978): columns of important inputs are scaled up in the weight, and
//! the inputs down in the operation before it, so that rounding hurts them less; the function of the
//! layer stays the same.
//!
//! Scales are `rms(x)^a`, normalized, with `a` from a grid that includes 0, the identity; the
//! one with the least output error is folded into the weights. The scales of a product's inputs go
//! into the norm before it, for the down projection into the rows of up, and for the output
//! projection into the rows of the value heads: one scale per element of a key/value head, tied
//! over the query heads that share the head.

use super::method::{FloatLayer, Method, Needs, Outcome, Problem, TRIED_ROWS};
use super::rtn;
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, Grids};
use crate::linalg::Matrix;
use crate::second_order::LayerStats;
use crate::second_order::{Hessian, InputStats};
use nq_model::{InputSource, NormKind, Product};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Range;

/// AWQ's settings.
#[derive(Clone, Copy, Debug)]
pub struct Awq {
    /// Number of exponents tried from 0 to 1, both included.
    pub exponents: usize,
    /// Choice of ranges, during the search and for the final rounding.
    pub fit: Fit,
}

impl Default for Awq {
    fn default() -> Self {
        Awq {
            exponents: 11,
            fit: Fit::clip(),
        }
    }
}

/// For experts, a share of [`TRIED_ROWS`] each, but at least this.
const LEAST_SAMPLE: usize = 64;

impl Method for Awq {
    fn name(&self) -> &'static str {
        "awq"
    }

    fn settings(&self) -> Map<String, Value> {
        Map::from_iter([
            ("exponents".into(), self.exponents.into()),
            ("range".into(), self.fit.settings()),
        ])
    }

    fn needs(&self) -> Needs {
        Needs::Hessian
    }

    fn scales_inputs(&self) -> bool {
        true
    }

    fn trials(&self) -> usize {
        self.exponents
    }

    fn transform(
        &self,
        layer: &mut FloatLayer,
        inputs: &mut LayerStats,
        grids: &Grids,
    ) -> Result<bool> {
        let mut changed = false;
        // The scales of norms, by which a layer's other products with the same input are multiplied too.
        let mut folded: BTreeMap<NormKind, Vec<f32>> = BTreeMap::new();
        let products = layer.spec.products().into_iter().zip(inputs);
        let shares = products.flat_map(|(product, inputs)| {
            let experts = inputs.len();
            let each = inputs.iter_mut().enumerate();
            each.map(move |(expert, stats)| {
                (
                    ProductShare {
                        product,
                        expert,
                        experts,
                    },
                    stats,
                )
            })
        });
        for (share, stats) in shares {
            let heads = match share.product.source {
                InputSource::Heads(values) => {
                    let (queries, values) = (stats.mean_square.len(), layer.linear(values).rows);
                    Some((queries / layer.head_dim, values / layer.head_dim))
                }
                InputSource::Norm(kind) => {
                    if let Some(scales) = folded.get(&kind) {
                        stats.divide(scales)?;
                        continue;
                    }
                    None
                }
                // Nothing divides the input by scales.
                InputSource::Fixed => continue,
                InputSource::Rows(_) => None,
            };
            let rms = tie(&stats.mean_square, heads, layer.head_dim);
            let Some(scales) = self.search(layer, share, stats, &rms, grids)? else {
                continue;
            };
            fold(layer, share, &scales);
            stats.divide(&scales)?;
            changed = true;
            if let InputSource::Norm(kind) = share.product.source {
                folded.insert(kind, scales);
            }
        }
        Ok(changed)
    }

    fn round(&self, problem: &Problem<'_>) -> Result<Outcome> {
        let importance = problem.inputs.map_or(&[][..], |i| &i.mean_square);
        Ok(Outcome {
            rounded: rtn::round(problem.weight, problem.grid, self.fit, importance),
            method: "awq",
            fallbacks: Vec::new(),
        })
    }
}

impl Awq {
    /// The scales with the least output error; `None` for the identity.
    fn search(
        &self,
        layer: &FloatLayer,
        share: ProductShare<'_>,
        stats: &InputStats,
        rms: &[f32],
        grids: &Grids,
    ) -> Result<Option<Vec<f32>>> {
        let Some(hessian) = &stats.hessian else {
            return Ok(None);
        };
        let linears = share.product.linears.iter();
        let samples: Vec<(Matrix, Grid)> = linears
            .map(|l| {
                let weight = layer.linear(l.kind);
                let most = (TRIED_ROWS / share.experts).max(LEAST_SAMPLE);
                (
                    sample(weight, share.rows(weight.rows), most),
                    grids[&l.kind],
                )
            })
            .collect();
        let error = |scales: &[f32]| -> Result<f64> {
            let mut scaled = stats.mean_square.clone();
            for (m, s) in scaled.iter_mut().zip(scales) {
                *m /= s * s;
            }
            samples
                .iter()
                .map(|(w, grid)| self.output_error(w, *grid, scales, &scaled, hessian.as_ref()))
                .sum()
        };
        let mut best = (error(&vec![1.0; rms.len()])?, None);
        for i in 1..self.exponents {
            let exponent = i as f32 / (self.exponents - 1) as f32;
            let scales = powers(rms, exponent);
            let e = error(&scales)?;
            if e < best.0 {
                best = (e, Some(scales));
            }
        }
        Ok(best.1)
    }

    /// Mean squared output error of `w`, rounded with its inputs divided by `scales`.
    fn output_error(
        &self,
        w: &Matrix,
        grid: Grid,
        scales: &[f32],
        importance: &[f32],
        hessian: &dyn Hessian,
    ) -> Result<f64> {
        let mut scaled = w.clone();
        scale_columns(&mut scaled.data, scales);
        let rounded = rtn::round(&scaled, grid, self.fit, importance);
        let mut error = scaled;
        let mut row = vec![0.0; w.cols];
        for i in 0..w.rows {
            rounded.dequantize_row(i, &mut row);
            for (((e, q), s), w) in error
                .row_mut(i)
                .iter_mut()
                .zip(&row)
                .zip(scales)
                .zip(w.row(i))
            {
                *e = q / s - w;
            }
        }
        hessian.quadratic_error(&error)
    }
}

/// Root mean squares, averaged over elements that must share a scale: `heads` is (query heads,
/// key/value heads) if the inputs are attention outputs.
fn tie(mean_square: &[f32], heads: Option<(usize, usize)>, head_dim: usize) -> Vec<f32> {
    let mut m = mean_square.to_vec();
    if let Some((queries, values)) = heads {
        let share = queries / values;
        for kv in 0..values {
            for d in 0..head_dim {
                let places = (0..share).map(|q| (kv * share + q) * head_dim + d);
                let mean = places.clone().map(|i| mean_square[i]).sum::<f32>() / share as f32;
                places.for_each(|i| m[i] = mean);
            }
        }
    }
    m.iter().map(|v| v.sqrt()).collect()
}

/// `rms^exponent`, scaled so that the greatest and the least multiply to 1; dead inputs get
/// scale 1.
fn powers(rms: &[f32], exponent: f32) -> Vec<f32> {
    let live = rms.iter().copied().filter(|&r| r > 0.0);
    let (low, high) = live.fold((f32::INFINITY, 0f32), |(l, h), r| (l.min(r), h.max(r)));
    if high == 0.0 {
        return vec![1.0; rms.len()];
    }
    // Largest ratio of scales: f16 scales and norms must be able to hold the result.
    const SPAN: f32 = 1e4;
    let low = low.max(high / SPAN);
    let middle = (low * high).sqrt();
    rms.iter()
        .map(|&r| {
            if r > 0.0 {
                (r.max(low) / middle).powf(exponent)
            } else {
                1.0
            }
        })
        .collect()
}

/// Up to `most` of these rows, evenly spaced.
fn sample(w: &Matrix, rows: Range<usize>, most: usize) -> Matrix {
    let step = rows.len().div_ceil(most);
    let mut m = Matrix::zeros(rows.len().div_ceil(step), w.cols);
    for (i, row) in rows.step_by(step).enumerate() {
        m.row_mut(i).copy_from_slice(w.row(row));
    }
    m
}

fn scale_columns(rows: &mut [f32], scales: &[f32]) {
    for row in rows.chunks_exact_mut(scales.len()) {
        for (w, s) in row.iter_mut().zip(scales) {
            *w *= s;
        }
    }
}

/// A product, or the part of it that belongs to expert `expert` of `experts`, which has its own input.
#[derive(Clone, Copy)]
struct ProductShare<'a> {
    product: &'a Product,
    expert: usize,
    experts: usize,
}

impl ProductShare<'_> {
    /// Its rows in a weight of `rows` rows.
    fn rows(&self, rows: usize) -> Range<usize> {
        let each = rows / self.experts;
        self.expert * each..(self.expert + 1) * each
    }

    /// The values of those rows.
    fn values<'m>(&self, w: &'m mut Matrix) -> &'m mut [f32] {
        let (rows, cols) = (self.rows(w.rows), w.cols);
        &mut w.data[rows.start * cols..rows.end * cols]
    }
}

/// Multiplies the columns of a product's weights by `scales` and divides whatever produces its
/// input by them. Other users of that input (a router, a shared expert) are multiplied too.
fn fold(layer: &mut FloatLayer, share: ProductShare<'_>, scales: &[f32]) {
    for linear in share.product.linears {
        scale_columns(share.values(layer.linear_mut(linear.kind)), scales);
    }
    let divide_rows = |w: &mut [f32], cols: usize, scale_of: &dyn Fn(usize) -> f32| {
        for (i, row) in w.chunks_exact_mut(cols).enumerate() {
            let s = scale_of(i);
            row.iter_mut().for_each(|v| *v /= s);
        }
    };
    match share.product.source {
        InputSource::Norm(kind) => {
            for (gain, s) in layer.norms.get_mut(&kind).into_iter().flatten().zip(scales) {
                *gain /= s;
            }
            let own = share.product;
            let all = (layer.spec.kept_products().into_iter()).chain(layer.spec.products());
            for other in all.filter(|p| p.source == own.source && *p != own) {
                for linear in other.linears {
                    scale_columns(&mut layer.linear_mut(linear.kind).data, scales);
                }
            }
        }
        InputSource::Heads(kind) => {
            let d = layer.head_dim;
            let values = layer.linear_mut(kind);
            let (rows, cols) = (values.rows, values.cols);
            let heads = scales.len() / rows;
            let scale_of = |i: usize| scales[i / d * heads * d + i % d];
            divide_rows(&mut values.data, cols, &scale_of);
            if let Some(bias) = layer.biases.get_mut(&kind) {
                divide_rows(bias, 1, &scale_of);
            }
        }
        InputSource::Rows(kind) => {
            let rows = layer.linear_mut(kind);
            let cols = rows.cols;
            divide_rows(share.values(rows), cols, &|i| scales[i]);
        }
        InputSource::Fixed => unreachable!("no scales are searched for it"),
    }
}
