//! Rows of activations in the layout that kernels of up to 16 rows multiply.

use crate::driver::{Address, Buffer, Gpu, Operands};
use crate::linear::DeviceLinear;
use crate::pack::{PackedKind, SPAN};
use nq_kernels::Result;

/// Most sequences in one step.
pub const MOST_SEQUENCES: usize = 16;

pub(super) use crate::cuda::ring::MOST_DEPTH;

/// How many rows of activations are columns of one tensor-core product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnGroup {
    /// With both parts of their values.
    Four,
    /// With one part.
    Eight,
}

impl ColumnGroup {
    /// That for `m` rows.
    pub(crate) fn of(m: usize) -> Self {
        if m > 4 {
            ColumnGroup::Eight
        } else {
            ColumnGroup::Four
        }
    }

    pub(super) const fn rows(self) -> usize {
        match self {
            ColumnGroup::Four => 4,
            ColumnGroup::Eight => 8,
        }
    }

    /// `sizeof(DigitColumns)` or `sizeof(HalfColumns)` of `cuda/columns.cuh`: 64 inputs.
    pub(super) const fn slot_bytes(self, bits: usize) -> usize {
        match bits {
            16 => 256 * self.rows(),
            _ => (128 + 4 + 8) * self.rows(),
        }
    }

    /// Bytes of all inputs.
    pub(super) const fn bytes(self, bits: usize, spans: usize) -> usize {
        spans * SPAN / 64 * self.slot_bytes(bits)
    }
}

/// Rows of activations in the layout that [`Stream::gemv_batch`](crate::Stream::gemv_batch) multiplies
/// (`cuda/columns.cuh`).
pub struct Columns {
    words: Buffer<u8>,
    pub(super) factors: Buffer<f32>, // [rows], of RMSNorm
    rows: usize,
    spans: usize,
}

impl Columns {
    /// Allocates columns for `rows` rows of up to `inputs` values.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](nq_kernels::Error::DeviceMemory).
    pub fn new(gpu: &Gpu, rows: usize, inputs: usize) -> Result<Self> {
        let spans = inputs.div_ceil(SPAN);
        let group = ColumnGroup::Eight;
        let bytes = rows.div_ceil(group.rows()) * group.bytes(16, spans);
        Ok(Columns {
            words: gpu.zeros("activations", bytes)?,
            factors: gpu.zeros("activations", rows.next_multiple_of(group.rows()))?,
            rows,
            spans,
        })
    }
}

/// Where another kernel writes the columns for a product.
#[derive(Clone, Copy)]
pub(crate) struct ColumnsTarget {
    pub(crate) words: Address,
    /// Of a group.
    pub(crate) rows: i32,
    /// 1 if they meet codes in the order of those of 4 bits.
    pub(crate) nibbles: i32,
}

impl Columns {
    /// True if attention can prepare the inputs of `w`.
    pub fn suit(w: &DeviceLinear) -> bool {
        let is_affine = matches!(w.kind(), PackedKind::Affine { .. });
        is_affine && w.inputs().is_multiple_of(SPAN) && w.order.is_none()
    }

    /// Refuses `m` rows for a product with `w` that have no room, or no kernel.
    pub(crate) fn check(&self, o: &Operands<'_>, w: &DeviceLinear, m: usize) -> Result<()> {
        o.multiple("inputs", 8, w.inputs())?;
        o.at_least("rows", 1, m)?;
        o.at_most("rows", MOST_SEQUENCES.min(self.rows), m)?;
        o.at_most("spans", self.spans, w.spans())
    }

    /// The address of `m` rows for a product with `w`.
    pub(super) fn address(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        m: usize,
        group: ColumnGroup,
    ) -> Result<Address> {
        let bytes = m.div_ceil(group.rows()) * group.bytes(w.kind().bits(), w.spans());
        o.of("columns", &self.words, &[bytes])
    }
}

/// The columns of a product's rows, and the factors of their norm.
pub(crate) struct PreparedColumns {
    pub(super) words: Address,
    pub(super) factors: Address,
}
