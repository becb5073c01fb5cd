//! The products of a decode step of several rows. [`Stream::gemv_batch`] has two kernels for them: one for
//! weights of integer codes on devices with clusters of blocks, and one for other weights, small ones and other devices.

pub(in crate::cuda) mod groups;
pub(in crate::cuda) mod rows;

use super::driver::{Address, Buffer, Gpu, LaunchShape, Operands, Stream};
use super::gemv::GemvOutput;
use super::kernel::kernels;
use super::linear::DeviceLinear;
use super::pack::{PackedKind, SPAN};
use super::product::{Asked, Inputs, OutputAddresses, Product, ProductPlan};
use crate::error::Result;

/// Most sequences in one step.
pub const MOST_SEQUENCES: usize = 16;

/// `MOST_DEPTH` of `cuda/ring.cuh`.
const MOST_DEPTH: usize = 8;

/// How many rows of activations are columns of one tensor-core product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ColumnGroup {
    /// With both parts of their values.
    Four,
    /// With one part.
    Eight,
}

impl ColumnGroup {
    /// That for `m` rows.
    pub(super) fn of(m: usize) -> Self {
        if m > 4 {
            ColumnGroup::Eight
        } else {
            ColumnGroup::Four
        }
    }

    const fn rows(self) -> usize {
        match self {
            ColumnGroup::Four => 4,
            ColumnGroup::Eight => 8,
        }
    }

    /// `sizeof(DigitColumns)` or `sizeof(HalfColumns)` of `cuda/columns.cuh`: 64 inputs.
    const fn slot_bytes(self, bits: usize) -> usize {
        match bits {
            16 => 256 * self.rows(),
            _ => (128 + 4 + 8) * self.rows(),
        }
    }

    /// Bytes of all inputs.
    const fn bytes(self, bits: usize, spans: usize) -> usize {
        spans * SPAN / 64 * self.slot_bytes(bits)
    }
}

/// Rows of activations in the layout that [`Stream::gemv_batch`] multiplies
/// (`cuda/columns.cuh`).
pub struct Columns {
    words: Buffer<u8>,
    factors: Buffer<f32>, // [rows], of RMSNorm
    rows: usize,
    spans: usize,
}

impl Columns {
    /// Allocates columns for `rows` rows of up to `inputs` values.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`](crate::Error::DeviceMemory).
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
pub(in crate::cuda) struct ColumnsTarget {
    pub(in crate::cuda) words: Address,
    /// Of a group.
    pub(in crate::cuda) rows: i32,
    /// 1 if they meet codes in the order of those of 4 bits.
    pub(in crate::cuda) nibbles: i32,
}

impl Columns {
    /// True if attention can prepare the inputs of `w`.
    pub fn suit(w: &DeviceLinear) -> bool {
        matches!(w.kind(), PackedKind::Affine { .. }) && w.inputs().is_multiple_of(SPAN)
    }

    /// Refuses `m` rows for a product with `w` that have no room, or no kernel.
    pub(super) fn check(&self, o: &Operands<'_>, w: &DeviceLinear, m: usize) -> Result<()> {
        o.multiple("inputs", 8, w.inputs())?;
        o.at_least("rows", 1, m)?;
        o.at_most("rows", MOST_SEQUENCES.min(self.rows), m)?;
        o.at_most("spans", self.spans, w.spans())
    }

    /// The address of `m` rows for a product with `w`.
    fn address(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        (m, group): (usize, ColumnGroup),
    ) -> Result<Address> {
        let bytes = m.div_ceil(group.rows()) * group.bytes(w.kind().bits(), w.spans());
        o.of("columns", &self.words, &[bytes])
    }

    /// Where the columns of `m` rows go for a product with `w`.
    pub(in crate::cuda) fn target(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        m: usize,
    ) -> Result<ColumnsTarget> {
        self.check(o, w, m)?;
        if !Self::suit(w) {
            return o.refuse("a weight", "integer codes of whole spans", w.kind().name());
        }
        let group = ProductPlan::checked(o, w.shape(), Asked::Columns(m))?.group(m);
        Ok(ColumnsTarget {
            words: self.address(o, w, (m, group))?,
            rows: group.rows() as i32,
            nibbles: i32::from(w.kind().order() == 4),
        })
    }
}

/// The columns of a product's rows, and the factors of their norm.
struct Prepared {
    words: Address,
    factors: Address,
}

/// Blocks of a product of `m` rows: the values per row that `best` of [`GemvOutput::Head`] must hold.
///
/// # Errors
/// Errors of the driver.
pub fn best_len(gpu: &Gpu, w: &DeviceLinear, m: usize) -> Result<usize> {
    if let Some(strips) = w.trellis_strips() {
        return Ok(strips);
    }
    let asked = match m {
        1 => Asked::Row { head: true },
        _ => Asked::Columns(m),
    };
    Ok(ProductPlan::new(gpu, w.shape(), asked)?.map_or(1, |plan| plan.shares().1))
}

kernels! {
    COLUMNS: ColumnsArgs = "columns" in "columns.cu",
        test "kernels/tests/cuda/batch.rs::products_of_several_sequences", bench "gemv_batch",
        instances &[
            "columns_int4_8",
            "columns_int8_8",
            "columns_fp16_8",
            "columns_int4_4",
            "columns_int8_4",
        ];
}

/// `ColumnsArgs` of `cuda/columns.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct ColumnsArgs {
    x: Address,
    gain: Address,
    columns: Address,
    factors: Address,
    inputs: i32,
    spans: i32,
    eps: f32,
    late: i32,
}

impl Stream {
    /// Multiplies `m` rows of activations `x` `[m, inputs]` by `w`, reading `w` once: two kernels
    /// of a decode step of several sequences. `columns` is scratch. `late` keeps the next
    /// kernels from starting before the previous one has ended.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn gemv_batch(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        output: GemvOutput<'_>,
        columns: &mut Columns,
        m: usize,
        late: bool,
    ) -> Result<()> {
        let (o, asked) = (self.operands("gemv_batch"), Asked::Columns(m));
        let p = Product {
            columns: Some(columns),
            late,
            ..Product::new(o, w, Inputs::Full(x), m, asked)
        };
        self.multiply(p, output.into())
    }

    /// Multiplies `m` rows that attention has prepared ([`AttentionOutput::Columns`]) by `w`, and adds the
    /// products to `y` `[m, outputs]`.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if an operand does not fit; errors of the driver.
    ///
    /// [`AttentionOutput::Columns`]: super::AttentionOutput::Columns
    pub fn multiply_columns(
        &self,
        w: &DeviceLinear,
        columns: &Columns,
        y: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        let (o, asked) = (self.operands("gemv_batch"), Asked::Columns(m));
        let p = Product {
            columns: Some(columns),
            ..Product::new(o, w, Inputs::Prepared, m, asked)
        };
        self.multiply(p, GemvOutput::Add(y).into())
    }

    /// Converts rows that are not columns yet, in the layout for the plan's kernel, and multiplies them.
    pub(super) fn multiply_in_columns(
        &self,
        p: &Product<'_>,
        columns: &Columns,
        plan: &ProductPlan,
        to: &OutputAddresses<'_>,
    ) -> Result<()> {
        let (o, w, m, group) = (&p.o, p.w, p.m, plan.group(p.m));
        let prepared = Prepared {
            words: columns.address(o, w, (m, group))?,
            factors: o.optional("factors", to.norm.map(|_| &columns.factors), &[m])?,
        };
        if !matches!(p.x, Inputs::Prepared) {
            let args = ColumnsArgs {
                x: p.x()?,
                gain: to.gain(o, w.inputs())?,
                columns: prepared.words,
                factors: o.of("factors", &columns.factors, &[m])?,
                inputs: w.inputs() as i32,
                spans: w.spans() as i32,
                eps: to.eps(),
                late: i32::from(p.late),
            };
            let parts = match to.norm {
                Some(_) => 1,
                None => w.spans().div_ceil(16),
            };
            let (order, few) = (
                w.kind().order().ilog2() as usize,
                group == ColumnGroup::Four,
            );
            let kernel = COLUMNS.instance(order - 2 + 3 * usize::from(few));
            let shape = LaunchShape::new((m, parts, 1), 512).overlapping();
            // SAFETY: the operands were checked.
            unsafe { self.launch(kernel, shape, &args)? };
        }
        match plan {
            ProductPlan::Rows(plan) => self.multiply_rows(p, &prepared, plan, to),
            ProductPlan::Groups(plan) => self.multiply_groups(p, &prepared, plan, to),
            _ => unreachable!("other plans read no columns"),
        }
    }
}
