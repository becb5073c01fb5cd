//! Sums of products that stay in parts.

use super::driver::{Address, Buffer, Gpu, Operands};
use nq_kernels::Result;

/// Most parts that the inputs of a product are cut into, for blocks that share rows of weights.
pub(super) const MOST_PARTS: usize = 8;

/// The output of a product as partial sums: each part of the inputs has its own, `[parts, m, rows]`,
/// and the next kernel adds them in the order of the parts.
pub struct PartialSums {
    values: Buffer<f32>,
    parts: usize,
    pub(super) m: usize,
    pub(super) rows: usize,
}

impl PartialSums {
    /// Allocates sums for products of `m` sequences with weights of up to `rows` outputs. Consecutive
    /// products may share it, if each has been read before the next is queued.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, m: usize, rows: usize) -> Result<Self> {
        Ok(PartialSums {
            values: gpu.zeros("activations", MOST_PARTS * m * rows)?,
            parts: 0,
            m: 0,
            rows: 0,
        })
    }

    /// The address for the sums of a product that is queued next.
    pub(super) fn written(
        &mut self,
        o: &Operands<'_>,
        parts: usize,
        m: usize,
        rows: usize,
    ) -> Result<Address> {
        let to = o.of("partial sums", &self.values, &[parts, m, rows])?;
        (self.parts, self.m, self.rows) = (parts, m, rows);
        Ok(to)
    }

    /// The sums `[parts, m, rows]` of the last queued product.
    pub fn values(&self) -> &Buffer<f32> {
        &self.values
    }

    /// Number of parts of the last queued product.
    pub fn parts(&self) -> usize {
        self.parts
    }
}
