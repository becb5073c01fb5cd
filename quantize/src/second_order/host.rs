//! Rounding on the host: factors of [`crate::linalg`], and rows in tiles on all threads.

use super::{Changes, ColumnBlock, Columns, Damped, Factor, Hessian, TrellisRounded};
use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, Rounded, RowsMut};
use crate::linalg::{Matrix, add_product, inverse_factor, quadratic_error};
use crate::trellis::{Trellis, on_host, turned_moments};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Rows that one thread takes through all columns together.
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

    fn errors(&self, weight: &Matrix, rounded: &Rounded) -> Result<Changes> {
        let change = rounded.change(weight);
        Ok(Changes {
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

    fn transformed(&self, signs: &[f32], diagonal: &[f32]) -> Result<Arc<dyn Hessian>> {
        Ok(Arc::new(turned_moments(self, signs, diagonal)))
    }

    fn inverse_factor(&self, d: &Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>> {
        let factor = match d.dead {
            [] => inverse_factor(self, d.order, d.damping, d.noise),
            dead => {
                let n = self.cols;
                let mut h = self.clone();
                for &i in dead {
                    for j in 0..n {
                        (h.data[i * n + j], h.data[j * n + i]) = (0.0, 0.0);
                    }
                    h.data[i * n + i] = d.fill;
                }
                inverse_factor(&h, d.order, d.damping, d.noise)
            }
        };
        Ok(factor.map(|u| Box::new(HostFactor { moments: self, u }) as Box<dyn Factor>))
    }
}

/// `U`, on the host, and the moments that it is of.
struct HostFactor<'a> {
    moments: &'a Matrix,
    u: Matrix,
}

impl Factor for HostFactor<'_> {
    fn block(&self) -> usize {
        BLOCK
    }

    fn diagonal(&self) -> Result<Vec<f32>> {
        Ok((0..self.u.cols).map(|i| self.u.row(i)[i]).collect())
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
            factor: &self.u,
            fit: columns.fit,
            importance: columns.importance,
        };
        // Even if ranges of groups are chosen along the way, factors of spans are needed beforehand.
        let fits_before = columns.fits_before() || columns.grid.two_level().is_some();
        (rounded.rows_mut(TILE).into_par_iter())
            .zip(columns.weight.data.par_chunks(TILE * n))
            .for_each(|(mut rows, weight)| {
                if fits_before {
                    tile.fit_groups(weight, &mut rows);
                }
                tile.round(weight, rows);
            });
        Ok(rounded)
    }

    fn round_to_trellis(
        &self,
        trellis: &Trellis,
        weight: &Matrix,
        scales: &[f32],
    ) -> Result<TrellisRounded> {
        let moments = Some((&self.u, self.moments));
        Ok(on_host(trellis, weight, scales, moments))
    }
}

/// Data shared by all tiles, which are rows that are rounded together.
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
    /// Chooses the parameters of all groups from the original weights.
    fn fit_groups(&self, weight: &[f32], rows: &mut RowsMut<'_>) {
        let spans = self.grid.spans(self.n);
        let of_rows = weight
            .chunks_exact(self.n)
            .zip(rows.params.chunks_exact_mut(self.groups));
        for (r, (w, params)) in of_rows.enumerate() {
            let spans = &mut rows.spans[r * spans..(r + 1) * spans];
            self.fit.row(&self.grid, w, self.importance, params, spans);
        }
    }

    /// Chooses the parameters of `group`, whose columns begin at place `at` of the order, from the
    /// compensated and permuted rows `w` `[rows, n]`.
    fn fit_group(&self, group: usize, at: usize, w: &[f32], rows: &mut RowsMut<'_>) {
        let size = self.grid.group().size(self.n);
        let places = at..at + size.min(self.n - group * size);
        let h: Vec<f32> = self.order[places.clone()]
            .iter()
            .map(|&i| self.importance[i])
            .collect();
        let (spans, per_span) = (self.grid.spans(self.n), self.grid.groups_of_span(self.n));
        let of_rows = w
            .chunks_exact(self.n)
            .zip(rows.params.chunks_exact_mut(self.groups));
        for (r, (w, params)) in of_rows.enumerate() {
            let w = &w[places.clone()];
            let p = self.fit.params(&self.grid, w, &h);
            params[group] = match spans {
                0 => p,
                _ => {
                    let factors = rows.spans[r * spans + group / per_span];
                    self.fit.in_span(&self.grid, factors, p, w, &h)
                }
            };
        }
    }

    /// Rounds the rows `weight` `[rows, n]`.
    fn round(&self, weight: &[f32], mut out: RowsMut<'_>) {
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
                self.fit_group(group, start, &w, &mut out);
            }
            let len = end - start;
            let errors = &mut errors[..rows * len];
            for r in 0..rows {
                let w = &mut w[r * n + start..r * n + end];
                let codes = &mut out.codes[r * n..(r + 1) * n];
                let params = &out.params[r * self.groups..(r + 1) * self.groups];
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
