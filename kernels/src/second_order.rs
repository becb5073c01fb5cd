//! The interface of a device that keeps second moments and rounds with them, for GPTQ, AWQ and trellis codes. The
//! moments stay where they were summed; a weight is sent there, codes and scales come back.
//!
//! The caller chooses the order of columns, the damping and the ranges to try. Without
//! such a device (on the CPU), the caller also does the algebra.

use crate::error::Result;
use nq_formats::TrellisScheme;
use std::fmt::Debug;
use std::ops::{AddAssign, Range};
use std::sync::Arc;

/// A device of [`crate::grad`] that rounds with second moments.
pub trait SecondOrder: Send + Sync {
    /// f32 values on the device.
    type Floats;

    /// Prepares `sums` `[n, n]`, the second moments of `n` inputs, for use.
    fn moments(self: Arc<Self>, sums: Self::Floats, n: usize) -> Result<Arc<dyn DeviceMoments>>;
}

/// `E[x x^T]` of `n` inputs, `[n, n]`, on a device.
///
/// # Errors
/// Every operation returns errors of the device.
pub trait DeviceMoments: Debug + Send + Sync {
    /// `E[x_i^2]`, `[n]`.
    fn diagonal(&self) -> &[f32];

    /// `tr(E H E^T)` for `e` `[rows, n]`.
    fn quadratic_error(&self, e: &[f32], rows: usize) -> Result<f64>;

    /// Squared norms of `weight` `[rows, n]` and of its changes by rounding to `rounded`.
    fn errors(&self, weight: &[f32], rounded: WeightCodes<'_>) -> Result<Changes>;

    /// The moments of `x_i / s_i`.
    fn divided(&self, s: &[f32]) -> Result<Arc<dyn DeviceMoments>>;

    /// The moments, with the diagonal `diagonal`, of inputs that are multiplied by `signs`, `[n]`, and transformed by
    /// [`nq_formats::trellis::transform`].
    fn transformed(&self, signs: &[f32], diagonal: &[f32]) -> Result<Arc<dyn DeviceMoments>>;

    /// The upper triangular `U` with `(P H P^T + d I)^-1 = U^T U`; `None` if the damped matrix is
    /// not positive definite.
    fn inverse_factor(&self, damped: Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>>;
}

/// The result of [`DeviceMoments::inverse_factor`].
///
/// # Errors
/// Every operation returns errors of the device.
pub trait Factor {
    /// Most columns that are rounded between updates of the rest of the row.
    fn block(&self) -> usize;

    /// `U_jj` for each place.
    fn diagonal(&self) -> Result<Vec<f32>>;

    /// Rounds the columns of a weight one after another; later columns compensate for the error of
    /// each.
    fn round(&self, columns: &WeightColumns<'_>) -> Result<Rounded>;

    /// Rounds a weight to a trellis code, tile after tile of columns in their own order; later columns compensate for
    /// the errors of each tile.
    fn round_to_trellis(&self, weight: &TrellisRows<'_>) -> Result<TrellisRounded>;
}

/// How second moments are modified so that they can be inverted.
#[derive(Clone, Copy, Debug)]
pub struct Damped<'a> {
    /// The input of each place.
    pub order: &'a [u32],
    /// By input: 1 if it was always zero, otherwise 0.
    pub dead: &'a [u32],
    /// The moment that such inputs get.
    pub fill: f64,
    /// Added to the diagonal.
    pub damping: f64,
    /// Added to each element of the diagonal as a share of itself.
    pub noise: f64,
}

/// A weight and the order of its columns.
#[derive(Clone, Copy, Debug)]
pub struct WeightColumns<'a> {
    /// `[rows, n]`
    pub weight: &'a [f32],
    /// Rows of the weight.
    pub rows: usize,
    /// Columns that share a scale and a zero-point; the last group of a row may be shorter.
    pub group: usize,
    /// The greatest code.
    pub max_code: u8,
    /// The column of each place.
    pub order: &'a [u32],
    /// Runs of places, in order.
    pub blocks: &'a [ColumnBlock],
    /// How ranges are searched: before the first column, except for groups that begin blocks.
    pub fit: FitShape,
    /// Weighting of errors in that search, by column.
    pub importance: &'a [f32],
    /// Scales and zero-points `[rows, groups]`, if they were chosen already; then `fit` is not used.
    pub chosen: Option<(&'a [f32], &'a [f32])>,
}

/// How the range of a group is searched: `steps` ranges from the whole one down to `least` of
/// it, errors to the power of 2 or 3, `refits` rounds of least squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FitShape {
    /// Smallest range tried, as a share of the whole range.
    pub least: f32,
    /// Number of ranges; 0 takes the whole one.
    pub steps: usize,
    /// Power of errors: 2 or 3.
    pub power: u32,
    /// Rounds of refitting.
    pub refits: usize,
    /// True if zero-points stay at the midpoint of the codes.
    pub symmetric: bool,
}

/// Columns that are processed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnBlock {
    /// Their places in the order; at most [`Factor::block`].
    pub places: Range<usize>,
    /// The group that begins here and whose columns are adjacent in the order, if its
    /// range is still to be chosen, from the weights as compensated so far.
    pub begins: Option<usize>,
}

/// A weight's rounded form.
#[derive(Clone, Copy, Debug)]
pub struct WeightCodes<'a> {
    /// `[rows, n]`
    pub codes: &'a [u8],
    /// Scale of each group, `[rows, groups]`.
    pub scales: &'a [f32],
    /// Zero-point of each group, `[rows, groups]`.
    pub zeros: &'a [f32],
    /// Columns per group.
    pub group: usize,
    /// The greatest code.
    pub max_code: u8,
}

/// The result of [`Factor::round`], in the form of [`WeightCodes`].
#[derive(Clone, Debug)]
pub struct Rounded {
    /// `[rows, n]`
    pub codes: Vec<u8>,
    /// `[rows, groups]`
    pub scales: Vec<f32>,
    /// `[rows, groups]`
    pub zeros: Vec<f32>,
}

/// A weight to be rounded to a trellis code.
#[derive(Clone, Copy, Debug)]
pub struct TrellisRows<'a> {
    /// The weight of transformed inputs, `[rows, n]`.
    pub weight: &'a [f32],
    /// The scale of each row, or 0 for rows of zeros, `[rows]`.
    pub scales: &'a [f32],
    /// The code.
    pub scheme: TrellisScheme,
    /// Steps of a sequence on each side of its seam that settle it: half of all steps at most.
    pub window: usize,
}

/// The result of [`Factor::round_to_trellis`].
#[derive(Clone, Debug)]
pub struct TrellisRounded {
    /// Words of whole strips, as a file has them.
    pub words: Vec<u32>,
    /// The scale of each row with which its values have the least error, weighted by the moments, `[rows]`; it need not
    /// be finite or positive.
    pub scales: Vec<f64>,
}

/// Squared norms of a weight and of its changes by rounding, in values and in mean outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Changes {
    /// Squared norm of the weight.
    pub weight: f64,
    /// Squared norm of its changes.
    pub change: f64,
    /// Squared norm of its outputs.
    pub outputs: f64,
    /// Squared norm of the outputs' changes.
    pub output_change: f64,
}

impl AddAssign for Changes {
    fn add_assign(&mut self, more: Changes) {
        self.weight += more.weight;
        self.change += more.change;
        self.outputs += more.outputs;
        self.output_change += more.output_change;
    }
}
