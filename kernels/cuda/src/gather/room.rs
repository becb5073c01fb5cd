//! Memory for gathered inputs.

use crate::driver::{Buffer, Gpu};
use crate::pack::SPAN;
use nq_kernels::Result;

/// What sessions of a model with sorted inputs need memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatheredSizes {
    /// Most rows in f32 of a product.
    pub full: usize,
    /// Most rows in FP16 of a product.
    pub half: usize,
    /// Most inputs of a product.
    pub inputs: usize,
}

/// Memory for the gathered inputs of a product, which a stream has for one after the other.
pub struct GatheredRows {
    pub(super) full: Buffer<f32>, // [rows, inputs]
    pub(super) gain: Buffer<f32>, // [inputs]
    pub(super) half: Buffer<u16>, // [rows, inputs padded to 256]
}

impl GatheredRows {
    /// Allocates it.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, sizes: GatheredSizes) -> Result<Self> {
        let GatheredSizes { full, half, inputs } = sizes;
        let padded = inputs.next_multiple_of(SPAN);
        Ok(GatheredRows {
            full: gpu.zeros("activations", full * inputs)?,
            gain: gpu.zeros("activations", inputs)?,
            half: gpu.zeros("activations", half * padded)?,
        })
    }
}
