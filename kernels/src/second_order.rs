//! Rounding by second moments that a device keeps: what GPTQ and AWQ ask of one. The moments stay
//! where they were summed; a weight goes there, codes and the parameters of groups come back.
//!
//! Which columns come first, how much is damped and which ranges are tried is the caller's. Without
//! such a device (on the CPU) the algebra is the caller's too.

use crate::error::Result;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// A device of [`crate::grad`] that rounds by second moments.
pub trait SecondOrder: Send + Sync {
    /// f32 values on the device.
    type Floats;

    /// `sums` `[n, n]`, the second moments of `n` inputs, made ready.
    ///
    /// # Errors
    /// Errors of the device.
    fn moments(self: Arc<Self>, sums: Self::Floats, n: usize) -> Result<Arc<dyn Moments>>;
}

/// `E[x x^T]` of `n` inputs, `[n, n]`, on a device.
///
/// # Errors
/// Every operation gives what the device reports.
pub trait Moments: Debug + Send + Sync {
    /// `E[x_i^2]`, `[n]`.
    fn diagonal(&self) -> &[f32];

    /// `tr(E H E^T)` for `e` `[rows, n]`.
    fn quadratic_error(&self, e: &[f32], rows: usize) -> Result<f64>;

    /// What rounding `weight` `[rows, n]` to `rounded` changed.
    fn errors(&self, weight: &[f32], rounded: Codes<'_>) -> Result<Changes>;

    /// The moments of `x_i / s_i`.
    fn divided(&self, s: &[f32]) -> Result<Arc<dyn Moments>>;

    /// The upper triangular `U` with `(P H P^T + d I)^-1 = U^T U`; `None` if the damped matrix is
    /// not positive definite.
    fn inverse_factor(&self, damped: Damped<'_>) -> Result<Option<Box<dyn Factor + '_>>>;
}

/// [`Moments::inverse_factor`]'s result.
///
/// # Errors
/// Every operation gives what the device reports.
pub trait Factor {
    /// Columns, at most, that are rounded between updates of the rest of the row.
    fn block(&self) -> usize;

    /// `U_jj` of each place.
    fn diagonal(&self) -> Result<Vec<f32>>;

    /// Rounds the columns of a weight one after another, the error of each made up for by those
    /// after it.
    fn round(&self, columns: &Columns<'_>) -> Result<Rounded>;
}

/// How second moments are made fit to be inverted.
#[derive(Clone, Copy, Debug)]
pub struct Damped<'a> {
    /// The input of each place.
    pub order: &'a [u32],
    /// 1 for an input that was never seen, else 0, by input.
    pub dead: &'a [u32],
    /// The moment that such inputs get.
    pub fill: f64,
    /// Added to the diagonal.
    pub damping: f64,
}

/// A weight and how its columns go.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
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
    /// How ranges are searched: before the first column, but for those that blocks begin.
    pub fit: FitShape,
    /// Weights of that search, by column.
    pub importance: &'a [f32],
    /// Scales and zero-points `[rows, groups]`, where they were chosen already: `fit` is not asked.
    pub chosen: Option<(&'a [f32], &'a [f32])>,
}

/// How the range of a group is searched: `steps` ranges from the whole one down to `least` of
/// it, errors to the power of 2 or 3, `refits` rounds of least squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FitShape {
    /// Smallest range, as a share of the whole.
    pub least: f32,
    /// Ranges; 0 takes the whole one.
    pub steps: usize,
    /// 2 or 3.
    pub power: u32,
    /// Rounds of refitting.
    pub refits: usize,
    /// Zero-points stay at the middle of the codes.
    pub symmetric: bool,
}

/// Columns that go through the loop together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnBlock {
    /// Their places in the order, [`Factor::block`] at most.
    pub places: Range<usize>,
    /// The group that begins here and whose columns are next to each other in the order, if its
    /// range is still to be chosen: from the weights as they are by now.
    pub begins: Option<usize>,
}

/// What a weight was rounded to.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// `[rows, n]`
    pub codes: &'a [u8],
    /// Of each group, `[rows, groups]`.
    pub scales: &'a [f32],
    /// As `scales`.
    pub zeros: &'a [f32],
    /// Columns of a group.
    pub group: usize,
    /// The greatest code.
    pub max_code: u8,
}

/// [`Factor::round`]'s result: what [`Codes`] describes.
#[derive(Clone, Debug)]
pub struct Rounded {
    /// `[rows, n]`
    pub codes: Vec<u8>,
    /// `[rows, groups]`
    pub scales: Vec<f32>,
    /// `[rows, groups]`
    pub zeros: Vec<f32>,
}

/// Squared norms of a weight and of what rounding changed, and of the mean outputs of both.
#[derive(Clone, Copy, Debug)]
pub struct Changes {
    /// Of the weight.
    pub weight: f64,
    /// Of its changes.
    pub change: f64,
    /// Of its outputs.
    pub outputs: f64,
    /// Of the changes of outputs.
    pub output_change: f64,
}
