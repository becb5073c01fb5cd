//! Weights of few rows in FP16, which kernels multiply where they need the products.

use super::driver::{Address, Buffer, Gpu, Operands};
use half::f16;
use nq_formats::Weight;
use nq_kernels::Result;

/// Weights of few rows: steps of few rows of activations multiply by them without a kernel for it.
pub struct HalfRows {
    values: Buffer<u16>, // [rows, inputs] in FP16
    scale: f32,
    inputs: usize,
}

impl HalfRows {
    /// Uploads the rows of all `parts`, which have the same number of inputs.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory); weights without f32 values.
    pub fn new(gpu: &Gpu, parts: &[&Weight]) -> Result<Self> {
        let inputs = parts.first().map_or(0, |w| w.dims().cols);
        let rows = parts.iter().map(|w| w.dims().rows).sum::<usize>();
        let mut values = vec![0f32; rows * inputs];
        let mut to = values.chunks_exact_mut(inputs.max(1));
        for w in parts {
            for (row, to) in (0..w.dims().rows).zip(&mut to) {
                w.dequantize_row(row, to)?;
            }
        }
        // The greatest of them in the upper half of FP16's range.
        let top = values.iter().fold(0f32, |top, v| top.max(v.abs()));
        let factor = if top > 0.0 {
            2f32.powi(13 - top.log2().floor() as i32)
        } else {
            1.0
        };
        let halves: Vec<u16> = values
            .iter()
            .map(|v| f16::from_f32(v * factor).to_bits())
            .collect();
        Ok(HalfRows {
            values: gpu.upload("a weight", &halves)?,
            scale: 1.0 / factor,
            inputs,
        })
    }

    /// Bytes that so many rows take on a device.
    pub fn bytes(rows: usize, inputs: usize) -> usize {
        2 * rows * inputs
    }

    pub(super) fn inputs(&self) -> usize {
        self.inputs
    }

    /// The values and the scale of products with them, checked as an operand of `o`.
    pub(super) fn args(
        &self,
        o: &Operands<'_>,
        rows: usize,
        inputs: usize,
    ) -> Result<(Address, f32)> {
        let values = o.of("rows in FP16", &self.values, &[rows, inputs])?;
        Ok((values, self.scale))
    }
}
