//! On the host: faer's factorizations, and rows in tiles on all threads.

use super::{ColumnBlock, Columns, Damped, Errors, Factor, Hessian};
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, GroupParams, Rounded};
use crate::linalg::{Matrix, add_product, inverse_factor, quadratic_error};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Rows that one thread takes through all columns.
const TILE: usize = 64;
/// Columns between updates of the rest of the row.
const BLOCK: usize = 64;

impl Hessian for Matrix {
    fn width(&self) -> usize {
        self.cols
    }

    fn host(&self) -> Option<&Matrix> {
        Some(self)
    }

    fn is_finite(&self) -> bool {
        self.data.par_iter().all(|v| v.is_finite())
    }

    fn quadratic_error(&self, e: &Matrix) -> Result<f64> {
        Ok(quadratic_error(e, self))
    }

    fn errors(&self, weight: &Matrix, rounded: &Rounded) -> Result<Errors> {
        let change = rounded.change(weight);
        Ok(Errors {
            weight: weight.square_norm(),
            change: change.square_norm(),
            outputs: quadratic_error(weight, self),
            output_change: quadratic_error(&change, self),
        })
    }

    fn divided(&self, s: &[f32]) -> Result<Arc<dyn Hessian>> {
        let mut h = self.clone();
        for (i, row) in h.data.chunks_exact_mut(s.len()).enumerate() {
            for (h, &sj) in row.iter_mut().zip(s) {
                *h /= s[i] * sj;
            }
        }
        Ok(Arc::new(h))
    }

    fn inverse_factor(&self, d: &Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>> {
        let factor = match d.dead {
            [] => inverse_factor(self, d.order, d.damping),
            dead => {
                let n = self.cols;
                let mut h = self.clone();
                for &i in dead {
                    for j in 0..n {
                        (h.data[i * n + j], h.data[j * n + i]) = (0.0, 0.0);
                    }
                    h.data[i * n + i] = d.fill;
                }
                inverse_factor(&h, d.order, d.damping)
            }
        };
        Ok(factor.map(|u| Box::new(HostFactor(u)) as Box<dyn Factor>))
    }
}

/// `U`, on the host.
struct HostFactor(Matrix);

impl Factor for HostFactor {
    fn block(&self) -> usize {
        BLOCK
    }

    fn diagonal(&self) -> Result<Vec<f32>> {
        Ok((0..self.0.cols).map(|i| self.0.row(i)[i]).collect())
    }

    fn round(&self, columns: &Columns<'_>) -> Result<Rounded> {
        let n = columns.weight.cols;
        let mut rounded = Rounded::new(columns.grid, columns.weight.rows, n);
        let widest = columns.blocks.iter().map(|b| b.places.len()).max();
        let tile = Tile {
            grid: columns.grid,
            n,
            groups: rounded.groups(),
            order: columns.order,
            blocks: columns.blocks,
            widest: widest.unwrap_or(0),
            factor: &self.0,
            fit: columns.fit,
            importance: columns.importance,
        };
        let fits_before = columns.fits_before();
        rounded
            .codes
            .par_chunks_mut(TILE * n)
            .zip(rounded.params.par_chunks_mut(TILE * tile.groups))
            .zip(columns.weight.data.par_chunks(TILE * n))
            .for_each(|((codes, params), weight)| {
                if fits_before {
                    tile.fit_groups(weight, params);
                }
                tile.round(weight, codes, params);
            });
        Ok(rounded)
    }
}

/// Rows that are rounded together; what all tiles share.
struct Tile<'a> {
    grid: Grid,
    n: usize,
    groups: usize,
    order: &'a [usize],
    blocks: &'a [ColumnBlock],
    widest: usize,
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
        let mut errors = vec![0f32; rows * self.widest];
        for block in self.blocks {
            let Range { start, end } = block.places.clone();
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
