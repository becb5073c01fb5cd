//! Memory between the kernels of a product in trellis codes.

use super::sizes::{CodedExperts, GROUPS, digit_bytes, grouped};
use crate::driver::{Buffer, Gpu};
use crate::pack::SPAN;
use nq_formats::trellis::{BLOCK, Code, STRIP};
use nq_kernels::Result;

/// What sessions of a model with trellis codes need memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrellisSizes {
    /// Most rows that are multiplied by codes as they are, up to [`MOST_TRELLIS_ROWS`](crate::MOST_TRELLIS_ROWS).
    pub rows: usize,
    /// Most rows of all.
    pub many: usize,
    /// Most inputs of a product.
    pub inputs: usize,
    /// Most weights of another product that are held for many rows: see [`packed_weights`](crate::packed_weights).
    pub weights: usize,
    /// Most outputs of a gate in EXL3's codes.
    pub gate: usize,
    /// Mixtures, if there are any.
    pub experts: CodedExperts,
}

/// Memory between the kernels of a product, which a stream has for one after the other.
pub struct TrellisRoom {
    pub(crate) sizes: TrellisSizes,
    pub(crate) digits: Buffer<u8>,
    pub(crate) steps: Buffer<[f32; 2]>,
    /// Zeros between products.
    pub(crate) parts: Buffer<u32>,
    /// Of EXL3: the gate's products, while those of up are made.
    pub(crate) gate: Buffer<f32>,
    pub(crate) expanded: Buffer<u8>,
    pub(crate) no_meta: Buffer<u8>,
    pub(super) turned: Buffer<u16>,
}

impl TrellisRoom {
    /// Allocates it.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, sizes: TrellisSizes) -> Result<Self> {
        let (groups, which) = grouped(sizes.rows);
        let group = GROUPS[which];
        let inputs = sizes.inputs.next_multiple_of(BLOCK);
        // Digits of octagons, and of EXL3, are the widest.
        let digits = groups * digit_bytes(Code::Octagon, group, inputs);
        let digits = digits.max(sizes.experts.digit_bytes());
        let steps = (groups * group).max(sizes.experts.digit_rows());
        let blocks = gpu.info().multiprocessors;
        let parts = groups * blocks * 2 * 2 * STRIP * group;
        let many = if sizes.many > sizes.rows {
            sizes.many
        } else {
            0
        };
        let expanded = if many > 0 { sizes.weights } else { 0 };
        let expanded = expanded.max(sizes.experts.expanded());
        let zeros = |bytes| gpu.zeros("activations", bytes);
        Ok(TrellisRoom {
            sizes,
            digits: zeros(digits)?,
            steps: gpu.zeros("activations", steps)?,
            parts: gpu.zeros("activations", parts.max(sizes.experts.parts()))?,
            gate: gpu.zeros(
                "activations",
                (sizes.rows * sizes.gate).max(sizes.experts.gates()),
            )?,
            expanded: zeros(expanded * 2)?,
            no_meta: zeros(0)?,
            turned: gpu.zeros("activations", many * inputs.next_multiple_of(SPAN))?,
        })
    }
}
