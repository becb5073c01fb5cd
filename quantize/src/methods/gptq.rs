//! GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one after another, and the
//! error of each is made up for by the columns that are still to come, as the inverse of the
//! inputs' second moments says.
//!
//! Columns go in descending order of `E[x^2]`, so that the inputs that matter most are
//! rounded while most can still be made up for; groups stay where they are in the weight
//! (their parameters are fixed beforehand), so the order costs nothing in the file.

use super::{Method, Needs, Outcome, Problem, rtn};
use crate::error::{Error, Result};
use crate::fit::Fit;
use crate::grid::{Grid, GroupParams, Rounded};
use crate::linalg::{Matrix, add_product, inverse_factor};
use rayon::prelude::*;
use serde_json::{Map, Value};
use std::ops::Range;

/// In which order columns are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By descending `E[x^2]` over all columns; group parameters from the original weights.
    Columns,
    /// Group after group, by descending mean of `E[x^2]`, and so within each; a group's
    /// parameters from its weights as compensated so far.
    Groups,
}

/// What weighs the errors in the search for a group's range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Importance {
    /// `E[x^2]`: the error of each column on its own.
    Squares,
    /// The loss that remains after later columns have made up for the error, `1 / U_jj^2`.
    Remaining,
}

/// GPTQ's settings.
#[derive(Clone, Copy, Debug)]
pub struct Gptq {
    /// Added to the diagonal, as a share of its mean.
    pub damping: f64,
    /// Order of columns.
    pub order: Order,
    /// Choice of ranges.
    pub fit: Fit,
    /// Weights of that choice.
    pub importance: Importance,
}

impl Default for Gptq {
    fn default() -> Self {
        Gptq {
            damping: 0.01,
            order: Order::Columns,
            fit: Fit::clip(),
            importance: Importance::Squares,
        }
    }
}

/// Columns whose errors are gathered before the rest of the row is updated with one product.
const BLOCK: usize = 64;
/// Rows that one thread takes through all columns.
const TILE: usize = 64;
/// The first damping tried where none was asked for.
const LEAST_RAISE: f64 = 1e-3;
/// Damping beyond which the Hessian is given up.
const MOST_DAMPING: f64 = 1.0;

impl Method for Gptq {
    fn name(&self) -> &'static str {
        "gptq"
    }

    fn settings(&self) -> Map<String, Value> {
        let order = match self.order {
            Order::Columns => "columns",
            Order::Groups => "groups",
        };
        let importance = match self.importance {
            Importance::Squares => "squares",
            Importance::Remaining => "remaining",
        };
        Map::from_iter([
            ("damping".into(), self.damping.into()),
            ("order".into(), order.into()),
            ("importance".into(), importance.into()),
            ("range".into(), self.fit.settings()),
        ])
    }

    fn needs(&self) -> Needs {
        Needs::Hessian
    }

    fn round(&self, problem: &Problem<'_>) -> Result<Outcome> {
        let n = problem.weight.cols;
        let hessian = problem.inputs.and_then(|i| i.hessian.as_ref());
        let hessian = hessian.filter(|h| h.cols == n).ok_or(Error::Request {
            what: "statistics of the inputs for gptq",
            expected: format!("second moments of {n} inputs of {}", problem.name),
            found: hessian.map_or("none".into(), |h| format!("{}", h.cols)),
        })?;
        let mut fallbacks = Vec::new();
        let name = problem.name;
        let give_up = |mut fallbacks: Vec<String>, why: &str| {
            fallbacks.push(format!("{name}: {why}: rounded to nearest instead of gptq"));
            Outcome {
                rounded: rtn::round(problem.weight, problem.grid, Fit::clip(), &[]),
                method: "rtn-clip",
                fallbacks,
            }
        };
        if !hessian.data.par_iter().all(|v| v.is_finite()) {
            return Ok(give_up(fallbacks, "the inputs' moments are not finite"));
        }

        // An input that was always zero says nothing: it must neither take up errors nor
        // lose its weight, since other text may use it.
        let mut h = hessian.clone();
        let diagonal: Vec<f32> = (0..n).map(|i| h.data[i * n + i]).collect();
        let mean = diagonal.iter().map(|&d| f64::from(d)).sum::<f64>() / n as f64;
        let dead: Vec<usize> = (0..n).filter(|&i| diagonal[i] <= 0.0).collect();
        if dead.len() == n {
            return Ok(give_up(fallbacks, "all inputs are zero in calibration"));
        }
        for &i in &dead {
            for j in 0..n {
                (h.data[i * n + j], h.data[j * n + i]) = (0.0, 0.0);
            }
            h.data[i * n + i] = mean as f32;
        }
        if !dead.is_empty() {
            fallbacks.push(format!(
                "{name}: {} of {n} inputs are zero in calibration: their weights are rounded to nearest",
                dead.len()
            ));
        }

        let order = self.columns(&diagonal, problem.grid);
        let mut damping = self.damping;
        let factor = loop {
            if let Some(u) = inverse_factor(&h, &order, damping * mean) {
                break u;
            }
            damping = (4.0 * damping).max(LEAST_RAISE);
            if damping > MOST_DAMPING {
                return Ok(give_up(fallbacks, "the Hessian cannot be inverted"));
            }
        };
        if damping > self.damping {
            fallbacks.push(format!(
                "{name}: the Hessian could be inverted only with damping {damping} instead of {}",
                self.damping
            ));
        }
        let importance = match self.importance {
            Importance::Squares => diagonal,
            Importance::Remaining => {
                let mut importance = vec![0.0; n];
                for (at, &i) in order.iter().enumerate() {
                    importance[i] = factor.data[at * n + at].powi(-2);
                }
                importance
            }
        };
        Ok(Outcome {
            rounded: self.round_columns(problem, &order, &factor, &importance),
            method: "gptq",
            fallbacks,
        })
    }
}

impl Gptq {
    /// The order in which columns are rounded.
    fn columns(&self, diagonal: &[f32], grid: Grid) -> Vec<usize> {
        let n = diagonal.len();
        let mut order: Vec<usize> = (0..n).collect();
        match self.order {
            Order::Columns => order.sort_by(|&a, &b| diagonal[b].total_cmp(&diagonal[a])),
            Order::Groups => {
                let size = grid.group().size(n);
                let mean: Vec<f32> = diagonal
                    .chunks(size)
                    .map(|d| d.iter().sum::<f32>() / d.len() as f32)
                    .collect();
                order.sort_by(|&a, &b| {
                    let (ga, gb) = (a / size, b / size);
                    mean[gb]
                        .total_cmp(&mean[ga])
                        .then(ga.cmp(&gb))
                        .then(diagonal[b].total_cmp(&diagonal[a]))
                });
            }
        }
        order
    }

    /// Runs of columns between updates of the rest.
    fn blocks(&self, order: &[usize], grid: Grid) -> Vec<Block> {
        let n = order.len();
        let size = grid.group().size(n);
        let mut blocks = Vec::new();
        let mut start = 0;
        while start < n {
            let whole = match self.order {
                Order::Columns => n - start,
                Order::Groups => size.min(n - order[start] / size * size),
            };
            let group = (self.order == Order::Groups).then(|| order[start] / size);
            for at in (start..start + whole).step_by(BLOCK) {
                blocks.push(Block {
                    places: at..(at + BLOCK).min(start + whole),
                    begins: group.filter(|_| at == start),
                });
            }
            start += whole;
        }
        blocks
    }

    fn round_columns(
        &self,
        problem: &Problem<'_>,
        order: &[usize],
        factor: &Matrix,
        importance: &[f32],
    ) -> Rounded {
        let (weight, grid) = (problem.weight, problem.grid);
        let n = weight.cols;
        let mut rounded = Rounded::new(grid, weight.rows, n);
        let tile = Tile {
            grid,
            n,
            groups: rounded.groups(),
            order,
            blocks: &self.blocks(order, grid),
            factor,
            fit: self.fit,
            importance,
        };
        rounded
            .codes
            .par_chunks_mut(TILE * n)
            .zip(rounded.params.par_chunks_mut(TILE * tile.groups))
            .zip(weight.data.par_chunks(TILE * n))
            .for_each(|((codes, params), weight)| {
                if self.order == Order::Columns {
                    tile.fit_groups(weight, params);
                }
                tile.round(weight, codes, params);
            });
        rounded
    }
}

/// Columns that are rounded before the rest of the row is updated.
struct Block {
    /// Places in the order.
    places: Range<usize>,
    /// The group whose columns begin here and are whole in the order, if groups are.
    begins: Option<usize>,
}

/// Rows that are rounded together; what all tiles share.
struct Tile<'a> {
    grid: Grid,
    n: usize,
    groups: usize,
    order: &'a [usize],
    blocks: &'a [Block],
    factor: &'a Matrix,
    fit: Fit,
    importance: &'a [f32],
}

impl Tile<'_> {
    /// Parameters of all groups from the original weights.
    fn fit_groups(&self, weight: &[f32], params: &mut [GroupParams]) {
        let size = self.grid.group().size(self.n);
        for (w, p) in weight
            .chunks_exact(self.n)
            .zip(params.chunks_exact_mut(self.groups))
        {
            let h = self.importance.chunks(size);
            for ((w, h), p) in w.chunks(size).zip(h).zip(p) {
                *p = self.fit.params(&self.grid, w, h);
            }
        }
    }

    /// Parameters of `group`, whose columns begin at place `at` of the order, from the
    /// compensated and permuted rows `w` `[rows, n]`.
    fn fit_group(&self, group: usize, at: usize, w: &[f32], params: &mut [GroupParams]) {
        let size = self.grid.group().size(self.n);
        let places = at..at + size.min(self.n - group * size);
        let h: Vec<f32> = self.order[places.clone()]
            .iter()
            .map(|&i| self.importance[i])
            .collect();
        for (w, p) in w
            .chunks_exact(self.n)
            .zip(params.chunks_exact_mut(self.groups))
        {
            p[group] = self.fit.params(&self.grid, &w[places.clone()], &h);
        }
    }

    /// Rounds rows `weight` `[rows, n]`.
    fn round(&self, weight: &[f32], codes: &mut [u8], params: &mut [GroupParams]) {
        let n = self.n;
        let rows = weight.len() / n;
        let size = self.grid.group().size(n);
        let mut w = vec![0f32; rows * n]; // columns in `order`
        for (w, row) in w.chunks_exact_mut(n).zip(weight.chunks_exact(n)) {
            for (w, &i) in w.iter_mut().zip(self.order) {
                *w = row[i];
            }
        }
        let mut errors = vec![0f32; rows * BLOCK];
        for block in self.blocks {
            let Range { start, end } = block.places;
            if let Some(group) = block.begins {
                self.fit_group(group, start, &w, params);
            }
            let len = end - start;
            let errors = &mut errors[..rows * len];
            for r in 0..rows {
                let w = &mut w[r * n + start..r * n + end];
                let codes = &mut codes[r * n..(r + 1) * n];
                let params = &params[r * self.groups..(r + 1) * self.groups];
                let errors = &mut errors[r * len..(r + 1) * len];
                for j in 0..len {
                    let column = self.order[start + j];
                    let u = &self.factor.row(start + j)[start..end];
                    let p = params[column / size];
                    let q = self.grid.code(p, w[j]);
                    codes[column] = q;
                    let error = (w[j] - p.value(q)) / u[j];
                    errors[j] = error;
                    for (w, &u) in w[j + 1..].iter_mut().zip(&u[j + 1..]) {
                        *w -= error * u;
                    }
                }
            }
            if end < n {
                add_product(&mut w, n, -1.0, errors, self.factor, start..end, end);
            }
        }
    }
}
