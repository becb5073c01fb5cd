//! Weights as files stand for them, for comparisons: in a form that may have no kernel.

use crate::error::Result;
use crate::gguf::BlockWeight;
use crate::weight::Weight;

/// A weight `[out, in]` with exactly the numbers that its file stands for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoredWeight {
    /// The canonical weight has those numbers.
    Canonical(Weight),
    /// GGUF blocks, whose scales may be products that no f16 holds.
    GgufBlocks(BlockWeight),
}

impl StoredWeight {
    /// `(out_features, in_features)`.
    pub fn dims(&self) -> (usize, usize) {
        match self {
            StoredWeight::Canonical(w) => w.dims(),
            StoredWeight::GgufBlocks(b) => (b.out_features(), b.in_features()),
        }
    }

    /// Writes row `row` as f32 into `out` (`in_features` long), in the format's own arithmetic.
    ///
    /// # Errors
    /// [`crate::Error::Weight`] if a dense tensor's type is no float.
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
