//! Memory between the kernels of a product in trellis codes.

use super::experts::CodedExperts;
use crate::driver::{Buffer, Gpu};
use crate::pack::SPAN;
use nq_formats::trellis::TILE as COLUMNS;
use nq_formats::trellis::{BLOCK, Code, LANES, STRIP};
use nq_kernels::Result;

/// Rows of x that a block multiplies at once: few, or many.
pub(crate) const GROUPS: [usize; 2] = [4, 16];

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

/// Groups of rows, and rows of a group: the index in [`GROUPS`].
pub(crate) fn grouped(m: usize) -> (usize, usize) {
    let which = usize::from(m > GROUPS[0]);
    (m.div_ceil(GROUPS[which]), which)
}

/// Bytes of the digits of a group: of each four rows 8 a lane for 16 inputs, or for 32 of sums.
pub(super) fn digit_bytes(code: Code, group: usize, inputs: usize) -> usize {
    inputs / COLUMNS * code.width() * group / 4 * LANES * 8
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
            gate: gpu.zeros("activations", sizes.rows * sizes.gate)?,
            expanded: zeros(expanded * 2)?,
            no_meta: zeros(0)?,
            turned: gpu.zeros("activations", many * inputs.next_multiple_of(SPAN))?,
        })
    }
}
