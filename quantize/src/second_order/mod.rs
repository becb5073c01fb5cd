//! The dense algebra of second-order rounding, wherever the moments of inputs are kept: on the
//! host (`host`, any CPU) or on a device (`device`). The method decides the damping, the order of
//! columns and the weighting in the search for ranges, and they are the same on both.

mod device;
pub(crate) mod host;
mod stats;

pub use stats::{InputStats, LayerStats};

pub use nq_kernels::second_order::{Changes, ColumnBlock, TrellisRounded};

use crate::error::Result;
use crate::fit::Fit;
use crate::grid::{Grid, Rounded};
use crate::linalg::Matrix;
use crate::trellis::Trellis;
use std::fmt::Debug;
use std::sync::Arc;

/// `E[x x^T]` of a Linear's inputs, `[in, in]`: half the Hessian of the output's squared error
/// in a row of the weight.
pub trait Hessian: Debug + Send + Sync {
    /// Elements of an input.
    fn width(&self) -> usize;

    /// The moments, if they are on the host.
    fn host(&self) -> Option<&Matrix> {
        None
    }

    /// False if a moment is NaN or infinite.
    fn is_finite(&self) -> bool;

    /// `tr(E H E^T)` for `e` `[rows, in]`: the mean squared output error caused by the weight error
    /// `e`, summed over outputs.
    fn quadratic_error(&self, e: &Matrix) -> Result<f64>;

    /// Norms of a weight and of the change that rounding makes, in values and in outputs.
    fn errors(&self, weight: &Matrix, rounded: &Rounded) -> Result<Changes>;

    /// The moments of `x_i / s_i`.
    fn divided(&self, s: &[f32]) -> Result<Arc<dyn Hessian>>;

    /// The moments, with the diagonal `diagonal`, of inputs that are multiplied by `signs` and transformed by
    /// [`nq_formats::trellis::transform`].
    fn transformed(&self, signs: &[f32], diagonal: &[f32]) -> Result<Arc<dyn Hessian>>;

    /// The upper triangular `U` with `(P H P^T + d I)^-1 = U^T U`; `None` if the damped matrix
    /// is not positive definite.
    fn inverse_factor(&self, damped: &Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>>;
}

/// The result of [`Hessian::inverse_factor`].
pub trait Factor {
    /// Number of columns that is best rounded between updates of the rest of the row.
    fn block(&self) -> usize;

    /// `U_jj` for each place.
    fn diagonal(&self) -> Result<Vec<f32>>;

    /// Rounds the columns of a weight one after another; later columns compensate for the error
    /// of each.
    fn round(&self, columns: &Columns<'_>) -> Result<Rounded>;

    /// Rounds a weight of transformed inputs, whose rows have these scales, to a trellis code, tile after tile of columns
    /// in their own order; later columns compensate for the errors of each tile. The moments must have been factored as
    /// they are.
    fn round_to_trellis(
        &self,
        trellis: &Trellis,
        weight: &Matrix,
        scales: &[f32],
    ) -> Result<TrellisRounded>;
}

/// How moments are modified so that they can be inverted.
#[derive(Clone, Copy, Debug)]
pub struct Damped<'a> {
    /// The column of each place.
    pub order: &'a [usize],
    /// Inputs that were always zero: cut off from all others.
    pub dead: &'a [usize],
    /// The moment that dead inputs get.
    pub fill: f32,
    /// Added to the diagonal.
    pub damping: f64,
    /// Added to each element of the diagonal as a share of itself.
    pub noise: f64,
}

/// A weight and the order of its columns.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// `[out, in]`
    pub weight: &'a Matrix,
    /// The grid to round to.
    pub grid: Grid,
    /// The column of each place.
    pub order: &'a [usize],
    /// Runs of places, in order.
    pub blocks: &'a [ColumnBlock],
    /// How the ranges of groups are chosen: before the first column, except for groups that begin
    /// blocks.
    pub fit: Fit,
    /// Weighting of errors in that choice, by column.
    pub importance: &'a [f32],
}

impl Columns<'_> {
    /// True if groups' ranges are chosen from the original weights.
    fn fits_before(&self) -> bool {
        self.blocks.iter().all(|b| b.begins.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::Moments;

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
