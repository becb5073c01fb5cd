//! Rounding on a device that keeps second moments: they stay where they were summed, and only a
//! weight, its codes and its groups' parameters are transferred.

use super::{Changes, ColumnBlock, Columns, Damped, Factor, Hessian, TrellisRounded};
use crate::error::Result;
use crate::fit::{Fit, Power};
use crate::grid::{Grid, GroupParams, Rounded};
use crate::linalg::Matrix;
use crate::trellis::Trellis;
use nq_kernels::second_order as kernels;
use rayon::prelude::*;
use std::borrow::Cow;
use std::sync::Arc;

/// [`Hessian`] in a device's memory.
#[derive(Debug)]
pub(super) struct DeviceHessian(pub(super) Arc<dyn kernels::DeviceMoments>);

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

    fn errors(&self, weight: &Matrix, rounded: &Rounded) -> Result<Changes> {
        let scales: Vec<f32> = rounded.params.iter().map(|p| p.scale).collect();
        let zeros: Vec<f32> = rounded.params.iter().map(zero_of).collect();
        let codes = kernels::WeightCodes {
            codes: &rounded.codes,
            scales: &scales,
            zeros: &zeros,
            group: rounded.grid.group().size(self.width()),
            max_code: rounded.grid.max_code(),
        };
        Ok(self.0.errors(&weight.data, codes)?)
    }

    fn divided(&self, s: &[f32]) -> Result<Arc<dyn Hessian>> {
        Ok(Arc::new(DeviceHessian(self.0.divided(s)?)))
    }

    fn transformed(&self, signs: &[f32], diagonal: &[f32]) -> Result<Arc<dyn Hessian>> {
        Ok(Arc::new(DeviceHessian(
            self.0.transformed(signs, diagonal)?,
        )))
    }

    fn inverse_factor(&self, d: &Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>> {
        let mut dead = vec![0; self.width()];
        d.dead.iter().for_each(|&i| dead[i] = 1);
        let factor = self.0.inverse_factor(kernels::Damped {
            order: &places(d.order),
            dead: &dead,
            fill: f64::from(d.fill),
            damping: d.damping,
            noise: d.noise,
        })?;
        Ok(factor.map(|factor| Box::new(DeviceFactor(factor)) as Box<dyn Factor>))
    }
}

/// What stands for zero, between codes where there is an offset.
fn zero_of(p: &GroupParams) -> f32 {
    match p.offset == 0.0 {
        true => f32::from(p.zero),
        false => -p.offset / p.scale,
    }
}

/// `weight` with the offsets of its groups taken off: rounded with a zero-point of 0, it gives the same
/// codes and errors.
fn without_offsets<'w>(weight: &'w Matrix, rounded: &Rounded) -> Cow<'w, [f32]> {
    if !rounded.grid.offsets() {
        return Cow::Borrowed(&weight.data);
    }
    let mut values = weight.data.clone();
    let groups = rounded.groups();
    let size = rounded.grid.group().size(weight.cols);
    (values.par_chunks_mut(weight.cols))
        .zip(rounded.params.par_chunks(groups))
        .for_each(|(w, params)| {
            for (w, p) in w.chunks_mut(size).zip(params) {
                w.iter_mut().for_each(|w| *w -= p.offset);
            }
        });
    Cow::Owned(values)
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
        // Devices search ranges group by group and know no offsets; two levels look at whole rows. Such
        // parameters are chosen here, before the first column, whatever the blocks say.
        let mut rounded = Rounded::new(c.grid, c.weight.rows, c.weight.cols);
        let here = c.grid.two_level().is_some() || c.grid.offsets();
        if here {
            (rounded.rows_mut(1).into_par_iter())
                .zip(c.weight.data.par_chunks(c.weight.cols))
                .for_each(|(out, w)| {
                    c.fit.row(&c.grid, w, c.importance, out.params, out.spans);
                });
        }
        let scales: Vec<f32> = rounded.params.iter().map(|p| p.scale).collect();
        let zeros: Vec<f32> = rounded.params.iter().map(|p| f32::from(p.zero)).collect();
        let weight = without_offsets(c.weight, &rounded);
        let begins_nothing = |b: &ColumnBlock| ColumnBlock {
            places: b.places.clone(),
            begins: b.begins.filter(|_| !here),
        };
        let blocks: Vec<ColumnBlock> = c.blocks.iter().map(begins_nothing).collect();
        let found = self.0.round(&kernels::WeightColumns {
            weight: &weight,
            rows: c.weight.rows,
            group: c.grid.group().size(c.weight.cols),
            max_code: c.grid.max_code(),
            order: &places(c.order),
            blocks: &blocks,
            chosen: here.then_some((&scales[..], &zeros[..])),
            fit: fit_shape(c.fit, c.grid),
            importance: c.importance,
        })?;
        rounded.codes = found.codes;
        if !here {
            let params = found.scales.iter().zip(&found.zeros);
            let params = params.map(|(&scale, &zero)| GroupParams {
                scale,
                zero: zero as u8,
                offset: 0.0,
            });
            rounded.params = params.collect();
        }
        Ok(rounded)
    }

    fn round_to_trellis(
        &self,
        trellis: &Trellis,
        weight: &Matrix,
        scales: &[f32],
    ) -> Result<TrellisRounded> {
        Ok(self.0.round_to_trellis(&kernels::TrellisRows {
            weight: &weight.data,
            scales,
            scheme: trellis.scheme(),
            window: trellis.window(),
        })?)
    }
}
