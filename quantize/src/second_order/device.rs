//! Rounding on a device that keeps second moments: they stay where they were summed, and only a
//! weight, its codes and its groups' parameters are transferred.

use super::{ColumnBlock, Columns, Damped, Errors, Factor, Hessian};
use crate::error::Result;
use crate::fit::{Fit, Power};
use crate::grid::{Grid, GroupParams, Rounded};
use crate::linalg::Matrix;
use nq_kernels::second_order as kernels;
use rayon::prelude::*;
use std::sync::Arc;

/// [`Hessian`] in a device's memory.
#[derive(Debug)]
pub(super) struct DeviceHessian(pub(super) Arc<dyn kernels::Moments>);

/// The device's settings for the search of ranges.
fn fit_shape(fit: Fit, grid: Grid) -> kernels::FitShape {
    kernels::FitShape {
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

impl Hessian for DeviceHessian {
    fn width(&self) -> usize {
        self.0.diagonal().len()
    }

    /// Checks the diagonal alone: `E[x_i x_j]^2` is at most `E[x_i^2] E[x_j^2]`, and NaN or infinity in
    /// an input remains in its square.
    fn is_finite(&self) -> bool {
        self.0.diagonal().iter().all(|v| v.is_finite())
    }

    fn quadratic_error(&self, e: &Matrix) -> Result<f64> {
        Ok(self.0.quadratic_error(&e.data, e.rows)?)
    }

    fn errors(&self, weight: &Matrix, rounded: &Rounded) -> Result<Errors> {
        let scales: Vec<f32> = rounded.params.iter().map(|p| p.scale).collect();
        let zeros: Vec<f32> = rounded.params.iter().map(|p| f32::from(p.zero)).collect();
        let codes = kernels::Codes {
            codes: &rounded.codes,
            scales: &scales,
            zeros: &zeros,
            group: rounded.grid.group().size(self.width()),
            max_code: rounded.grid.max_code(),
        };
        let found = self.0.errors(&weight.data, codes)?;
        Ok(Errors {
            weight: found.weight,
            change: found.change,
            outputs: found.outputs,
            output_change: found.output_change,
        })
    }

    fn divided(&self, s: &[f32]) -> Result<Arc<dyn Hessian>> {
        Ok(Arc::new(DeviceHessian(self.0.divided(s)?)))
    }

    fn inverse_factor(&self, d: &Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>> {
        let mut dead = vec![0; self.width()];
        d.dead.iter().for_each(|&i| dead[i] = 1);
        let factor = self.0.inverse_factor(kernels::Damped {
            order: &places(d.order),
            dead: &dead,
            fill: f64::from(d.fill),
            damping: d.damping,
        })?;
        Ok(factor.map(|factor| Box::new(DeviceFactor(factor)) as Box<dyn Factor>))
    }
}

fn places(order: &[usize]) -> Vec<u32> {
    order.iter().map(|&i| i as u32).collect()
}

struct DeviceFactor<'a>(Box<dyn kernels::Factor + 'a>);

impl Factor for DeviceFactor<'_> {
    fn block(&self) -> usize {
        self.0.block()
    }

    fn diagonal(&self) -> Result<Vec<f32>> {
        Ok(self.0.diagonal()?)
    }

    fn round(&self, c: &Columns<'_>) -> Result<Rounded> {
        // Devices search ranges group by group; two levels look at whole rows, here. They are chosen
        // before the first column then, whatever the blocks say.
        let mut rounded = Rounded::new(c.grid, c.weight.rows, c.weight.cols);
        let two_level = c.grid.two_level().is_some();
        if two_level {
            (rounded.rows_mut(1).into_par_iter())
                .zip(c.weight.data.par_chunks(c.weight.cols))
                .for_each(|(out, w)| {
                    c.fit.row(&c.grid, w, c.importance, out.params, out.spans);
                });
        }
        let scales: Vec<f32> = rounded.params.iter().map(|p| p.scale).collect();
        let zeros: Vec<f32> = rounded.params.iter().map(|p| f32::from(p.zero)).collect();
        let begins_nothing = |b: &ColumnBlock| ColumnBlock {
            places: b.places.clone(),
            begins: b.begins.filter(|_| !two_level),
        };
        let blocks: Vec<ColumnBlock> = c.blocks.iter().map(begins_nothing).collect();
        let found = self.0.round(&kernels::Columns {
            weight: &c.weight.data,
            rows: c.weight.rows,
            group: c.grid.group().size(c.weight.cols),
            max_code: c.grid.max_code(),
            order: &places(c.order),
            blocks: &blocks,
            chosen: two_level.then_some((&scales[..], &zeros[..])),
            fit: fit_shape(c.fit, c.grid),
            importance: c.importance,
        })?;
        let params = found.scales.iter().zip(&found.zeros);
        let params = params.map(|(&scale, &zero)| GroupParams {
            scale,
            zero: zero as u8,
        });
        rounded.codes = found.codes;
        rounded.params = params.collect();
        Ok(rounded)
    }
}
