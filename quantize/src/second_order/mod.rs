//! The dense algebra of second-order rounding, wherever the moments of inputs are kept: the
//! host ([`host`], any CPU) or a device that rounds by them (`device`). What is damped, in which order
//! columns go and what their ranges are searched by is the method's, and the same on both.

mod device;
pub mod host;

pub use nq_kernels::second_order::ColumnBlock;

use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, Rounded};
use crate::linalg::{Matrix, Moments};
use crate::report::LayerReport;
use std::fmt::Debug;
use std::ops::AddAssign;
use std::sync::Arc;

/// `E[x x^T]` of a Linear's inputs, `[in, in]`: half the Hessian of the output's squared error
/// in a row of the weight.
pub trait Hessian: Debug + Send + Sync {
    /// Elements of an input.
    fn width(&self) -> usize;

    /// The moments, where they are on the host.
    fn host(&self) -> Option<&Matrix> {
        None
    }

    /// False if a moment is NaN or infinite.
    fn is_finite(&self) -> bool;

    /// `tr(E H E^T)` for `e` `[rows, in]`: the mean squared output error that the weight error
    /// `e` makes, summed over outputs.
    ///
    /// # Errors
    /// Errors of the device.
    fn quadratic_error(&self, e: &Matrix) -> Result<f64>;

    /// The same of a weight and of what rounding it has changed.
    ///
    /// # Errors
    /// Errors of the device.
    fn errors(&self, weight: &Matrix, rounded: &Rounded) -> Result<Errors>;

    /// The moments of `x_i / s_i`.
    ///
    /// # Errors
    /// Errors of the device.
    fn divided(&self, s: &[f32]) -> Result<Arc<dyn Hessian>>;

    /// The upper triangular `U` with `(P H P^T + d I)^-1 = U^T U`; `None` if the damped matrix
    /// is not positive definite.
    ///
    /// # Errors
    /// Errors of the device.
    fn inverse_factor(&self, damped: &Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>>;
}

/// [`Hessian::inverse_factor`]'s result.
pub trait Factor {
    /// Columns that are best rounded between updates of the rest of the row.
    fn block(&self) -> usize;

    /// `U_jj` of each place.
    ///
    /// # Errors
    /// Errors of the device.
    fn diagonal(&self) -> Result<Vec<f32>>;

    /// Rounds the columns of a weight one after another, the error of each made up for by those
    /// after it.
    ///
    /// # Errors
    /// Errors of the device.
    fn round(&self, columns: &Columns<'_>) -> Result<Rounded>;
}

/// How moments are made fit to be inverted.
#[derive(Clone, Copy, Debug)]
pub struct Damped<'a> {
    /// The column of each place.
    pub order: &'a [usize],
    /// Inputs that were never seen: cut off from all others.
    pub dead: &'a [usize],
    /// The moment that they get.
    pub fill: f32,
    /// Added to the diagonal.
    pub damping: f64,
}

/// A weight and how its columns go.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// `[out, in]`
    pub weight: &'a Matrix,
    /// What it is rounded to.
    pub grid: Grid,
    /// The column of each place.
    pub order: &'a [usize],
    /// Runs of places, in order.
    pub blocks: &'a [ColumnBlock],
    /// How the ranges of groups are chosen: before the first column, but for those that blocks
    /// begin.
    pub fit: Fit,
    /// Weights of that choice, by column.
    pub importance: &'a [f32],
}

impl Columns<'_> {
    /// True if groups' ranges are chosen from the weights as they were.
    fn fits_before(&self) -> bool {
        self.blocks.iter().all(|b| b.begins.is_none())
    }
}

/// What calibration says about a Linear's inputs.
#[derive(Clone, Debug, Default)]
pub struct InputStats {
    /// `E[x_i^2]`, `[in]`.
    pub mean_square: Vec<f32>,
    /// `E[x x^T]`, `[in, in]`.
    pub hessian: Option<Arc<dyn Hessian>>,
}

impl InputStats {
    /// Of these second moments.
    pub fn of(moments: Matrix) -> Self {
        InputStats {
            mean_square: (0..moments.cols).map(|i| moments.row(i)[i]).collect(),
            hessian: Some(Arc::new(moments)),
        }
    }

    /// Of second moments that a device keeps.
    pub fn on_device(moments: Arc<dyn nq_kernels::second_order::Moments>) -> Self {
        InputStats {
            mean_square: moments.diagonal().to_vec(),
            hessian: Some(Arc::new(device::DeviceHessian(moments))),
        }
    }

    /// The statistics of `x_i / s_i`.
    ///
    /// # Errors
    /// The device's, where the moments are on one.
    pub fn divide(&mut self, s: &[f32]) -> Result<()> {
        for (m, &s) in self.mean_square.iter_mut().zip(s) {
            *m /= s * s;
        }
        if let Some(h) = &mut self.hessian {
            *h = h.divided(s)?;
        }
        Ok(())
    }
}

impl From<Moments> for InputStats {
    fn from(moments: Moments) -> Self {
        match moments.is_full() {
            true => InputStats::of(moments.matrix()),
            false => InputStats {
                mean_square: moments.mean_squares(),
                hessian: None,
            },
        }
    }
}

/// What rounding a weight changed: squared norms, of values and of mean outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Errors {
    /// Of the weight's values.
    pub weight: f64,
    /// Of the changes.
    pub change: f64,
    /// Of the weight's outputs.
    pub outputs: f64,
    /// Of the changes of outputs.
    pub output_change: f64,
}

impl Errors {
    /// The weight's row of the report. Without moments nothing is known of outputs.
    pub(crate) fn report(&self, name: &str, grid: Grid, method: &str) -> LayerReport {
        let ratio = |a: f64, b: f64| if b > 0.0 { (a / b).sqrt() } else { 0.0 };
        LayerReport {
            name: name.into(),
            bits: grid.bits().into(),
            method: method.into(),
            rel_error: ratio(self.change, self.weight),
            output_error: (self.outputs > 0.0).then(|| ratio(self.output_change, self.outputs)),
        }
    }
}

impl AddAssign for Errors {
    fn add_assign(&mut self, more: Errors) {
        self.weight += more.weight;
        self.change += more.change;
        self.outputs += more.outputs;
        self.output_change += more.output_change;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raised_moments_have_more_on_the_diagonal() {
        let (n, x) = (3, [1.0, 2.0, 3.0, 3.0, 2.0, 1.0]);
        for full in [false, true] {
            let finish = |share| {
                let mut moments = Moments::new(n, full);
                moments.add(&x);
                moments.raise(share);
                InputStats::from(moments)
            };
            let (plain, raised) = (finish(0.0), finish(0.5));
            // E[x^2] is 5, 4, 5.
            let more = 0.5 * 14.0 / 3.0;
            for (a, b) in plain.mean_square.iter().zip(&raised.mean_square) {
                assert!((b - a - more).abs() < 1e-5, "{a} {b}");
            }
            if let (Some(a), Some(b)) = (plain.hessian, raised.hessian) {
                let mut e = Matrix::zeros(1, n);
                e.data = vec![1.0, -2.0, 0.5];
                let norm = 1.0 + 4.0 + 0.25;
                let got = b.quadratic_error(&e).unwrap() - a.quadratic_error(&e).unwrap();
                assert!((got - norm * f64::from(more)).abs() < 1e-4, "{got}");
            }
        }
    }
}
