//! Second moments in GPU memory, and rounding with them.

use super::{Groups, Permutation};
use crate::driver::Buffer;
use crate::grad::CudaOps;
use nq_kernels::Result;
use nq_kernels::grad::{Gemm, LayerOps};
use nq_kernels::second_order::{
    Changes, Damped, DeviceMoments, Factor, Rounded, SecondOrder, TrellisRounded, TrellisRows,
    WeightCodes, WeightColumns,
};
use nq_model::Dims;
use std::fmt;
use std::sync::Arc;

/// Columns that are rounded between updates of the rest: as many as the kernel takes.
const BLOCK: usize = 128;

struct GpuMoments {
    ops: Arc<CudaOps>,
    moments: Buffer<f32>, // [n, n]
    diagonal: Vec<f32>,
}

impl fmt::Debug for GpuMoments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.diagonal.len();
        write!(f, "GpuMoments([{n}, {n}])")
    }
}

impl SecondOrder for CudaOps {
    type Floats = Buffer<f32>;

    fn moments(self: Arc<Self>, sums: Buffer<f32>, n: usize) -> Result<Arc<dyn DeviceMoments>> {
        Ok(Arc::new(GpuMoments::new(&self, sums, n)?))
    }
}

impl GpuMoments {
    fn new(ops: &Arc<CudaOps>, moments: Buffer<f32>, n: usize) -> Result<Self> {
        let diagonal = ops.diagonal(&moments, n)?;
        Ok(GpuMoments {
            ops: Arc::clone(ops),
            moments,
            diagonal,
        })
    }

    fn width(&self) -> usize {
        self.diagonal.len()
    }

    /// `tr(E H E^T)` for `e` `[rows, n]`.
    fn quadratic(&self, e: &Buffer<f32>, rows: usize) -> Result<f64> {
        let n = self.width();
        let mut product = self.ops.gpu().zeros("errors of outputs", rows * n)?;
        // H is symmetric: used as the weight of a Linear, it is its own transpose.
        (self.ops).gemm(Gemm::linear(rows, n, n), e, &self.moments, &mut product)?;
        self.ops.dot(&product, e, rows * n)
    }
}

impl DeviceMoments for GpuMoments {
    fn diagonal(&self) -> &[f32] {
        &self.diagonal
    }

    fn quadratic_error(&self, e: &[f32], rows: usize) -> Result<f64> {
        let buffer = self.ops.gpu().upload("errors of weights", e)?;
        self.quadratic(&buffer, rows)
    }

    fn errors(&self, weight: &[f32], rounded: WeightCodes<'_>) -> Result<Changes> {
        let (ops, n) = (&self.ops, weight.len());
        let rows = n / self.width().max(1);
        let w = ops.gpu().upload("a weight", weight)?;
        let codes = ops.gpu().upload("codes", rounded.codes)?;
        let shape = Dims::new(rows, self.width());
        let mut groups = Groups::new(ops, shape, rounded.group, rounded.max_code)?;
        groups.scales.write(0, rounded.scales)?;
        groups.zeros.write(0, rounded.zeros)?;
        let change = ops.rounding_error(&w, &codes, &groups)?;
        Ok(Changes {
            weight: ops.dot(&w, &w, n)?,
            change: ops.dot(&change, &change, n)?,
            outputs: self.quadratic(&w, rows)?,
            output_change: self.quadratic(&change, rows)?,
        })
    }

    fn divided(&self, s: &[f32]) -> Result<Arc<dyn DeviceMoments>> {
        let moments = self.ops.divide_moments(&self.moments, s)?;
        Ok(Arc::new(Self::new(&self.ops, moments, s.len())?))
    }

    fn transformed(&self, signs: &[f32], diagonal: &[f32]) -> Result<Arc<dyn DeviceMoments>> {
        let moments = (self.ops).transform_moments(&self.moments, signs, diagonal)?;
        Ok(Arc::new(Self::new(&self.ops, moments, signs.len())?))
    }

    fn inverse_factor(&self, damped: Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>> {
        let factor = self.ops.inverse_factor(&self.moments, damped)?;
        Ok(factor.map(|u| Box::new(GpuFactor { source: self, u }) as Box<dyn Factor>))
    }
}

struct GpuFactor<'a> {
    source: &'a GpuMoments,
    u: Buffer<f32>, // [n, n]
}

impl Factor for GpuFactor<'_> {
    fn block(&self) -> usize {
        BLOCK
    }

    fn diagonal(&self) -> Result<Vec<f32>> {
        self.source.ops.diagonal(&self.u, self.source.width())
    }

    fn round(&self, c: &WeightColumns<'_>) -> Result<Rounded> {
        let (ops, n, fit) = (&self.source.ops, self.source.width(), c.fit);
        let order = Permutation::new(ops, c.order)?;
        let weight = ops.gpu().upload("a weight", c.weight)?;
        let mut groups = Groups::new(ops, Dims::new(c.rows, n), c.group, c.max_code)?;
        let mut importance = ops.gpu().upload("importance of columns", c.importance)?;
        if let Some((scales, zeros)) = c.chosen {
            groups.scales.write(0, scales)?;
            groups.zeros.write(0, zeros)?;
        } else if c.blocks.iter().all(|b| b.begins.is_none()) {
            ops.fit_groups(fit, &weight, 0..n, &importance, &mut groups, 0)?;
        } else {
            let permuted: Vec<f32> = (c.order.iter())
                .map(|&i| c.importance[i as usize])
                .collect();
            importance.write(0, &permuted)?;
        }
        let permuted = ops.permute_columns(&weight, &order, c.rows)?;
        drop(weight);
        let codes = ops.round_columns(
            permuted,
            &self.u,
            &order,
            c.blocks,
            fit,
            &importance,
            &mut groups,
        )?;
        let mut rounded = Rounded {
            codes: vec![0; c.rows * n],
            scales: vec![0.0; c.rows * groups.groups()],
            zeros: vec![0.0; c.rows * groups.groups()],
        };
        codes.read(0, &mut rounded.codes)?;
        groups.scales.read(0, &mut rounded.scales)?;
        groups.zeros.read(0, &mut rounded.zeros)?;
        Ok(rounded)
    }

    fn round_to_trellis(&self, weight: &TrellisRows<'_>) -> Result<TrellisRounded> {
        (self.source.ops).round_to_trellis(&self.source.moments, &self.u, weight)
    }
}
