//! On a GPU: moments stay where they were summed, and only a weight, its codes and its groups'
//! parameters travel.

use super::{Columns, Damped, Errors, Factor, Hessian, InputStats};
use crate::error::Result;
use crate::fit::{Fit, Power};
use crate::grid::{Grid, GroupParams, Rounded};
use crate::linalg::Matrix;
use nq_kernels::cuda::{self, Buffer, Codes, ColumnBlock, CudaOps, FitShape, Groups};
use nq_kernels::grad::{Gemm, LayerOps};
use std::fmt;
use std::sync::Arc;

/// Columns that the device rounds between updates of the rest: as many as its kernel takes.
const BLOCK: usize = 128;

/// [`Hessian`] in a GPU's memory.
pub struct DeviceHessian {
    ops: Arc<CudaOps>,
    moments: Buffer<f32>, // [n, n]
    diagonal: Vec<f32>,
}

impl fmt::Debug for DeviceHessian {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.diagonal.len();
        write!(f, "DeviceHessian([{n}, {n}])")
    }
}

/// Statistics of `n` inputs whose second moments are `moments`.
///
/// # Errors
/// The device's.
pub fn input_stats(ops: &Arc<CudaOps>, moments: Buffer<f32>, n: usize) -> Result<InputStats> {
    let hessian = DeviceHessian::new(ops, moments, n)?;
    Ok(InputStats {
        mean_square: hessian.diagonal.clone(),
        hessian: Some(Arc::new(hessian)),
    })
}

/// How the device is to search ranges.
fn fit_shape(fit: Fit, grid: Grid) -> FitShape {
    FitShape {
        least: fit.least,
        steps: fit.steps,
        power: match fit.power {
            Power::Two => 2,
            Power::Three => 3,
        },
        refits: fit.refits,
        symmetric: grid.symmetric(),
    }
}

impl DeviceHessian {
    fn new(ops: &Arc<CudaOps>, moments: Buffer<f32>, n: usize) -> Result<Self> {
        let diagonal = ops.diagonal(&moments, n)?;
        Ok(DeviceHessian {
            ops: Arc::clone(ops),
            moments,
            diagonal,
        })
    }

    /// `tr(E H E^T)` for `e` `[rows, n]`.
    fn quadratic(&self, e: &Buffer<f32>, rows: usize) -> Result<f64> {
        let n = self.width();
        let mut product = self.ops.gpu().zeros("errors of outputs", rows * n)?;
        // H is symmetric: as the weight of a Linear it is its own transpose.
        (self.ops).gemm(Gemm::linear(rows, n, n), e, &self.moments, &mut product)?;
        Ok(self.ops.dot(&product, e, rows * n)?)
    }

    fn groups(&self, grid: Grid, rows: usize) -> Result<Groups> {
        let n = self.width();
        let size = grid.group().size(n);
        Ok(Groups::new(&self.ops, (rows, n), size, grid.max_code())?)
    }
}

impl Hessian for DeviceHessian {
    fn width(&self) -> usize {
        self.diagonal.len()
    }

    /// By the diagonal alone: `E[x_i x_j]^2` is at most `E[x_i^2] E[x_j^2]`, and what is no
    /// number in an input is none in its square.
    fn is_finite(&self) -> bool {
        self.diagonal.iter().all(|v| v.is_finite())
    }

    fn quadratic_error(&self, e: &Matrix) -> Result<f64> {
        let buffer = self.ops.gpu().upload("errors of weights", &e.data)?;
        self.quadratic(&buffer, e.rows)
    }

    fn errors(&self, weight: &Matrix, rounded: &Rounded) -> Result<Errors> {
        let (ops, rows, n) = (&self.ops, weight.rows, weight.data.len());
        let w = ops.gpu().upload("a weight", &weight.data)?;
        let codes = ops.gpu().upload("codes", &rounded.codes)?;
        let mut groups = self.groups(rounded.grid, rows)?;
        let scales: Vec<f32> = rounded.params.iter().map(|p| p.scale).collect();
        let zeros: Vec<f32> = rounded.params.iter().map(|p| f32::from(p.zero)).collect();
        groups.scales.write(0, &scales)?;
        groups.zeros.write(0, &zeros)?;
        let change = ops.rounding_error(&w, &codes, &groups)?;
        Ok(Errors {
            weight: ops.dot(&w, &w, n)?,
            change: ops.dot(&change, &change, n)?,
            outputs: self.quadratic(&w, rows)?,
            output_change: self.quadratic(&change, rows)?,
        })
    }

    fn divided(&self, s: &[f32]) -> Result<Arc<dyn Hessian>> {
        let moments = self.ops.divide_moments(&self.moments, s)?;
        Ok(Arc::new(Self::new(&self.ops, moments, s.len())?))
    }

    fn inverse_factor(&self, d: &Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>> {
        let mut dead = vec![0; self.width()];
        d.dead.iter().for_each(|&i| dead[i] = 1);
        let order: Vec<u32> = d.order.iter().map(|&i| i as u32).collect();
        let damped = cuda::Damped {
            order: &order,
            dead: &dead,
            fill: f64::from(d.fill),
            damping: d.damping,
        };
        let factor = self.ops.inverse_factor(&self.moments, damped)?;
        Ok(factor.map(|u| Box::new(DeviceFactor { of: self, u }) as Box<dyn Factor>))
    }
}

struct DeviceFactor<'a> {
    of: &'a DeviceHessian,
    u: Buffer<f32>, // [n, n]
}

impl Factor for DeviceFactor<'_> {
    fn block(&self) -> usize {
        BLOCK
    }

    fn diagonal(&self) -> Result<Vec<f32>> {
        Ok(self.of.ops.diagonal(&self.u, self.of.width())?)
    }

    fn round(&self, c: &Columns<'_>) -> Result<Rounded> {
        let (ops, n, rows) = (&self.of.ops, self.of.width(), c.weight.rows);
        let fit = fit_shape(c.fit, c.grid);
        let order: Vec<u32> = c.order.iter().map(|&i| i as u32).collect();
        let order = cuda::Order::new(ops, &order)?;
        let weight = ops.gpu().upload("a weight", &c.weight.data)?;
        let mut groups = self.of.groups(c.grid, rows)?;
        let mut importance = ops.gpu().upload("importance of columns", c.importance)?;
        if c.fits_before() {
            ops.fit_groups(fit, &weight, 0..n, &importance, &mut groups, 0)?;
        } else {
            let permuted: Vec<f32> = c.order.iter().map(|&i| c.importance[i]).collect();
            importance.write(0, &permuted)?;
        }
        let permuted = ops.permute_columns(&weight, &order, rows)?;
        drop(weight);
        let blocks: Vec<ColumnBlock> = (c.blocks.iter())
            .map(|b| ColumnBlock {
                places: b.places.clone(),
                begins: b.begins,
            })
            .collect();
        let codes: Codes = ops.round_columns(
            permuted,
            &self.u,
            &order,
            &blocks,
            fit,
            &importance,
            &mut groups,
        )?;
        read_rounded(c.grid, &codes, &groups)
    }
}

/// What the device rounded, on the host.
fn read_rounded(grid: Grid, codes: &Codes, groups: &Groups) -> Result<Rounded> {
    let mut rounded = Rounded::new(grid, groups.rows, groups.cols);
    codes.read(0, &mut rounded.codes)?;
    let mut scales = vec![0.0; rounded.params.len()];
    let mut zeros = scales.clone();
    groups.scales.read(0, &mut scales)?;
    groups.zeros.read(0, &mut zeros)?;
    for ((p, &scale), &zero) in rounded.params.iter_mut().zip(&scales).zip(&zeros) {
        *p = GroupParams {
            scale,
            zero: zero as u8,
        };
    }
    Ok(rounded)
}
