//! Weights exactly as stored in files, for comparisons: possibly in a form without a kernel.

use crate::blocks::BlockWeight;
use crate::e4m3::e4m3;
use crate::error::Result;
use crate::tensor::Tensor;
use crate::weight::Weight;
use half::bf16;
use nq_model::{DType, Dims};
use rayon::prelude::*;

/// A weight `[out, in]` with exactly the numbers stored in its file.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoredWeight {
    /// A canonical weight with those numbers.
    Canonical(Weight),
    /// GGUF blocks, whose scales may be products that do not fit an f16.
    GgufBlocks(BlockWeight),
    /// Values of FP8 with one scale for all.
    Fp8(Fp8Rows),
}

/// A matrix of values of FP8 (e4m3) with one scale for all, as files keep tables of n-grams.
#[derive(Clone, Debug)]
pub struct Fp8Rows {
    codes: Tensor, // [rows, cols]
    scale: f32,
}

impl Fp8Rows {
    /// Values of the matrix `codes` of FP8, each times `scale`.
    pub(crate) fn new(codes: Tensor, scale: f32) -> Self {
        Fp8Rows { codes, scale }
    }

    fn dims(&self) -> Dims {
        Dims::new(self.codes.shape()[0], self.codes.shape()[1])
    }

    fn row(&self, row: usize) -> impl Iterator<Item = f32> {
        let cols = self.dims().cols;
        let codes = &self.codes.data()[row * cols..][..cols];
        codes.iter().map(|&code| e4m3(code) * self.scale)
    }

    /// All values in bf16.
    ///
    /// # Errors
    /// None: the values are those of a matrix.
    pub(crate) fn to_bf16(&self) -> Result<Weight> {
        let Dims { rows, cols } = self.dims();
        let mut bytes = vec![0; 2 * rows * cols];
        let all = bytes.par_chunks_exact_mut(2 * cols.max(1)).enumerate();
        all.for_each(|(row, out)| {
            for (value, out) in self.row(row).zip(out.as_chunks_mut::<2>().0) {
                *out = bf16::from_f32(value).to_le_bytes();
            }
        });
        Tensor::new(DType::BF16, vec![rows, cols], bytes.into()).map(Weight::Dense)
    }
}

impl StoredWeight {
    /// `(out_features, in_features)`.
    pub fn dims(&self) -> Dims {
        match self {
            StoredWeight::Canonical(w) => w.dims(),
            StoredWeight::GgufBlocks(b) => Dims::new(b.out_features(), b.in_features()),
            StoredWeight::Fp8(rows) => rows.dims(),
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
            StoredWeight::Fp8(rows) => rows.row(row).zip(out).for_each(|(v, out)| *out = v),
        }
        Ok(())
    }

    /// A short name of the stored scheme for tables, e.g. `Q4_K` or `int4 g64 asymmetric`.
    pub fn scheme_name(&self) -> String {
        match self {
            StoredWeight::Canonical(w) => w.scheme_name(),
            StoredWeight::GgufBlocks(b) => b.kind().to_string(),
            StoredWeight::Fp8(_) => "FP8".into(),
        }
    }
}
