//! Weights exactly as stored in files, for comparisons: possibly in a form without a kernel.

use crate::blocks::BlockWeight;
use crate::error::Result;
use crate::weight::Weight;
use nq_model::Dims;

/// A weight `[out, in]` with exactly the numbers stored in its file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoredWeight {
    /// A canonical weight with those numbers.
    Canonical(Weight),
    /// GGUF blocks, whose scales may be products that do not fit an f16.
    GgufBlocks(BlockWeight),
}

impl StoredWeight {
    /// `(out_features, in_features)`.
    pub fn dims(&self) -> Dims {
        match self {
            StoredWeight::Canonical(w) => w.dims(),
            StoredWeight::GgufBlocks(b) => Dims::new(b.out_features(), b.in_features()),
        }
    }

    /// Writes row `row` as f32 to `out` (`in_features` long), with the format's own arithmetic.
    ///
    /// # Errors
    /// [`crate::Error::Weight`] if a dense tensor is not of a float type.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match self {
            StoredWeight::Canonical(w) => w.dequantize_row(row, out)?,
            StoredWeight::GgufBlocks(b) => b.dequantize_row(row, out),
        }
        Ok(())
    }

    /// A short name of the stored scheme for tables, e.g. `Q4_K` or `int4 g64 asymmetric`.
    pub fn scheme_name(&self) -> String {
        match self {
            StoredWeight::Canonical(w) => w.scheme_name(),
            StoredWeight::GgufBlocks(b) => b.kind().to_string(),
        }
    }
}
