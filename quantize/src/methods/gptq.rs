//! GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one after another, and the
//! error of each is compensated by the columns still to be rounded, using the inverse of the
//! inputs' second moments.
//!
//! Columns go in descending order of `E[x^2]`, so that the most important inputs are rounded
//! while the most columns can still compensate. Groups keep their place in the weight
//! (their parameters are fixed beforehand), so the order costs nothing in the file.

use super::method::{Method, Needs, Outcome, Problem};
use super::rtn;
use crate::error::{Error, Result};
use crate::fit::Fit;
use crate::grid::Grid;
use crate::second_order::{ColumnBlock, Columns, Damped};
use serde_json::{Map, Value};

/// Order in which columns are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActOrder {
    /// By descending `E[x^2]` over all columns; group parameters come from the original weights.
    Columns,
    /// Group after group, by descending mean of `E[x^2]`, and by descending `E[x^2]` within each;
    /// a group's parameters come from its weights as compensated so far.
    Groups,
}

/// Weighting of errors in the search for a group's range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Importance {
    /// `E[x^2]`: the error of each column on its own.
    Squares,
    /// `1 / U_jj^2`: the loss that remains after later columns have compensated for the error.
    Remaining,
}

/// GPTQ's settings.
#[derive(Clone, Copy, Debug)]
pub struct Gptq {
    /// Added to the diagonal, as a share of its mean.
    pub damping: f64,
    /// Order of columns.
    pub order: ActOrder,
    /// Choice of ranges.
    pub fit: Fit,
    /// Weighting of errors in that choice.
    pub importance: Importance,
}

impl Default for Gptq {
    fn default() -> Self {
        Gptq {
            damping: 0.01,
            order: ActOrder::Columns,
            fit: Fit::clip(),
            importance: Importance::Squares,
        }
    }
}

/// Share of itself that is added to each element of the diagonal, for moments of as many rows as an input has elements;
/// with more rows it is less. Moments of few rows show correlations that other text does not have.
const NOISE: f64 = 0.5;

/// The first damping to try if the settings have none.
const LEAST_RAISE: f64 = 1e-3;
/// If even this much damping fails, the Hessian is given up.
const MOST_DAMPING: f64 = 1.0;

/// The share of itself that is added to each element of the diagonal of moments of `n` inputs over `rows` rows; 0 rows:
/// not known.
pub(crate) fn noise(n: usize, rows: usize) -> f64 {
    match rows {
        0 => 0.0,
        rows => (NOISE * n as f64 / rows as f64).min(1.0),
    }
}

/// Tries `factor` with `damping`, then with more until it finds something; with what damping it did.
pub(crate) fn damped<F>(
    mut damping: f64,
    mut factor: impl FnMut(f64) -> Result<Option<F>>,
) -> Result<Option<(F, f64)>> {
    loop {
        if let Some(found) = factor(damping)? {
            return Ok(Some((found, damping)));
        }
        damping = (4.0 * damping).max(LEAST_RAISE);
        if damping > MOST_DAMPING {
            return Ok(None);
        }
    }
}

impl Method for Gptq {
    fn name(&self) -> &'static str {
        "gptq"
    }

    fn settings(&self) -> Map<String, Value> {
        let order = match self.order {
            ActOrder::Columns => "columns",
            ActOrder::Groups => "groups",
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

    fn corrects(&self) -> bool {
        true
    }

    fn round(&self, problem: &Problem<'_>) -> Result<Outcome> {
        let n = problem.weight.cols;
        let hessian = problem.inputs.and_then(|i| i.hessian.as_ref());
        let (hessian, diagonal) = (hessian.zip(problem.inputs))
            .map(|(h, i)| (h, &i.mean_square[..]))
            .filter(|(h, _)| h.width() == n)
            .ok_or(Error::Request {
                what: "statistics of the inputs for gptq",
                expected: format!("second moments of {n} inputs of {}", problem.name),
                found: hessian.map_or("none".into(), |h| h.width().to_string()),
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
        if !hessian.is_finite() {
            return Ok(give_up(fallbacks, "the inputs' moments are not finite"));
        }

        // An input that was always zero gives no information: its column must neither absorb errors
        // nor lose its weight, since other text may use it.
        let mean = diagonal.iter().map(|&d| f64::from(d)).sum::<f64>() / n as f64;
        let dead: Vec<usize> = (0..n).filter(|&i| diagonal[i] <= 0.0).collect();
        if dead.len() == n {
            return Ok(give_up(fallbacks, "all inputs are zero in calibration"));
        }
        if !dead.is_empty() {
            fallbacks.push(format!(
                "{name}: {} of {n} inputs are zero in calibration: their weights are rounded to nearest",
                dead.len()
            ));
        }

        let order = self.columns(diagonal, problem.grid);
        let noise = noise(n, problem.inputs.map_or(0, |i| i.rows));
        let found = damped(self.damping, |damping| {
            hessian.inverse_factor(&Damped {
                order: &order,
                dead: &dead,
                fill: mean as f32,
                damping: damping * mean,
                noise,
            })
        })?;
        let Some((factor, damping)) = found else {
            return Ok(give_up(fallbacks, "the Hessian cannot be inverted"));
        };
        if damping > self.damping {
            fallbacks.push(format!(
                "{name}: the Hessian could be inverted only with damping {damping} instead of {}",
                self.damping
            ));
        }
        let importance = match self.importance {
            Importance::Squares => diagonal.to_vec(),
            Importance::Remaining => {
                let mut importance = vec![0.0; n];
                for (&i, u) in order.iter().zip(factor.diagonal()?) {
                    importance[i] = u.powi(-2);
                }
                importance
            }
        };
        let columns = Columns {
            weight: problem.weight,
            grid: problem.grid,
            order: &order,
            blocks: &self.blocks(&order, problem.grid, factor.block()),
            fit: self.fit,
            importance: &importance,
        };
        Ok(Outcome {
            rounded: factor.round(&columns)?,
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
            ActOrder::Columns => order.sort_by(|&a, &b| diagonal[b].total_cmp(&diagonal[a])),
            ActOrder::Groups => {
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

    /// Runs of at most `most` columns whose errors are collected before the rest of the row is
    /// updated with one product.
    fn blocks(&self, order: &[usize], grid: Grid, most: usize) -> Vec<ColumnBlock> {
        let n = order.len();
        let size = grid.group().size(n);
        let mut blocks = Vec::new();
        let mut start = 0;
        while start < n {
            let whole = match self.order {
                ActOrder::Columns => n - start,
                ActOrder::Groups => size.min(n - order[start] / size * size),
            };
            let group = (self.order == ActOrder::Groups).then(|| order[start] / size);
            for at in (start..start + whole).step_by(most) {
                blocks.push(ColumnBlock {
                    places: at..(at + most).min(start + whole),
                    begins: group.filter(|_| at == start),
                });
            }
            start += whole;
        }
        blocks
    }
}
