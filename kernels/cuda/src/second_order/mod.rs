//! Second-order rounding (GPTQ) on the device: the factor of the inverse moments, the choice of
//! groups' ranges, the loop over columns, and measures of its errors. Launchers of
//! `cuda/factor.cu`, `cuda/fit_groups.cu`, `cuda/round_columns.cu` and `cuda/trellis_search.cu`.
//!
//! The caller chooses the order of columns, the damping and the ranges to try.

pub(super) mod columns;
pub(super) mod factor;
mod moments;
pub(super) mod trellis;

pub use columns::{CodeColumns, Groups};

use super::driver::Buffer;
use super::grad::CudaOps;
use nq_kernels::{Error, Result};

/// The order in which columns go through the loop, on the device.
pub struct Permutation(Buffer<u32>);

impl Permutation {
    /// Takes the column of each place.
    ///
    /// # Errors
    /// A place whose column does not exist.
    pub fn new(ops: &CudaOps, order: &[u32]) -> Result<Self> {
        check_order(order)?;
        Ok(Permutation(ops.gpu().upload("order of columns", order)?))
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// An error unless every place names an existing column.
fn check_order(order: &[u32]) -> Result<()> {
    match order.iter().find(|&&c| c as usize >= order.len()) {
        None => Ok(()),
        Some(column) => Err(Error::Shape {
            op: "order of columns",
            what: "place",
            expected: format!("columns below {}", order.len()),
            found: column.to_string(),
        }),
    }
}

/// Most rows of a launch: the limit of a grid's second dimension.
const MOST_ROWS: usize = 65_535;

/// Runs of rows, one per launch.
fn runs(rows: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..rows)
        .step_by(MOST_ROWS)
        .map(move |at| at..(at + MOST_ROWS).min(rows))
}

/// A grid of blocks that covers `n` columns of `rows` rows.
fn cover(n: usize, rows: usize) -> [usize; 3] {
    [n.div_ceil(THREADS), rows, 1]
}

const THREADS: usize = 256;

/// The test of whole roundings and their measured errors, and the bench of these kernels.
const ROUNDING: &str = "quantize/tests/cuda/second_order.rs::the_gpu_rounds_as_the_host";
const MEASURES: &str =
    "quantize/tests/cuda/second_order.rs::moments_are_scaled_and_errors_measured_where_they_are";
const BENCH: &str = "second_order";
