//! Weights in f32 on a device.

use super::Load;
use nq_formats::Weight;
use nq_kernels::grad::{Allocate, LayerOps};
use nq_model::Dims;
use nq_runtime::checks::all_finite;
use nq_runtime::{Error, Result};

/// A weight whose values are on the device.
pub(super) struct Dense<O: Allocate>(pub(super) O::Floats);

impl<O: LayerOps> Load<O> for Dense<O> {
    fn load<'a>(&'a self, _: &O, _: &'a mut O::Floats) -> nq_kernels::Result<&'a O::Floats> {
        Ok(&self.0)
    }
}

impl<O: LayerOps> AsRef<O::Floats> for Dense<O> {
    fn as_ref(&self) -> &O::Floats {
        &self.0
    }
}

impl<O: LayerOps> Dense<O> {
    pub(super) fn matrix(ops: &O, name: &str, weight: &Weight) -> Result<Self> {
        Self::rows_of(ops, name, weight, weight.dims().rows, |row| row)
    }

    /// A matrix of `rows` rows, of which row `r` is row `from(r)` of `weight`.
    pub(super) fn rows_of(
        ops: &O,
        name: &str,
        weight: &Weight,
        rows: usize,
        from: impl Fn(usize) -> usize + Sync,
    ) -> Result<Self> {
        let row = |row: usize, values: &mut [f32]| finite_row(name, weight, from(row), values);
        Ok(Dense(ops.rows(
            "weights",
            Dims::new(rows, weight.dims().cols),
            row,
        )?))
    }

    /// The rows of some weights of one width, one after another.
    pub(super) fn joined(ops: &O, parts: &[(String, &Weight)]) -> Result<Self> {
        let rows = parts.iter().map(|(_, w)| w.dims().rows).sum();
        let cols = parts.first().map_or(0, |(_, w)| w.dims().cols);
        let row = |mut row: usize, values: &mut [f32]| {
            for (name, weight) in parts {
                match weight.dims().rows {
                    rows if row >= rows => row -= rows,
                    _ => return finite_row(name, weight, row, values),
                }
            }
            Ok(())
        };
        Ok(Dense(ops.rows("weights", Dims::new(rows, cols), row)?))
    }

    pub(super) fn vector(ops: &O, values: &[f32]) -> Result<Self> {
        let mut to = ops.floats("norm", values.len())?;
        ops.write(&mut to, values)?;
        Ok(Dense(to))
    }
}

/// Writes row `row` of the weight `name` to `values`, if they are finite.
fn finite_row(name: &str, weight: &Weight, row: usize, values: &mut [f32]) -> Result<()> {
    weight.dequantize_row(row, values)?;
    if all_finite(values) {
        Ok(())
    } else {
        Err(Error::Request {
            what: "weights",
            expected: format!("finite numbers in {name}"),
            found: format!("NaN or infinity in row {row}"),
        })
    }
}
