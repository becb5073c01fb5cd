//! The products of a decode step of several rows. [`Stream::gemv_batch`] has two kernels for them: one for
//! weights of integer codes on devices with clusters of blocks, and one for other weights, small ones and other devices.

pub(in crate::cuda) mod groups;
pub(in crate::cuda) mod rows;

use super::driver::{Address, Buffer, Gpu, LaunchShape, Operands, Stream};
use super::gemv::{self, GemvOutput, Norm, Output};
use super::kernel::kernels;
use super::linear::DeviceLinear;
use super::pack::{PackedKind, SPAN};
use crate::error::Result;

/// Most sequences in one step.
pub const MOST_SEQUENCES: usize = 16;

/// `MOST_DEPTH` of `cuda/ring.cuh`.
const MOST_DEPTH: usize = 8;

/// How many rows of activations are columns of one tensor-core product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    /// With both parts of their values.
    Four,
    /// With one part.
    Eight,
}

impl Group {
    /// That for `m` rows.
    fn of(m: usize) -> Self {
        if m > 4 { Group::Eight } else { Group::Four }
    }

    const fn rows(self) -> usize {
        match self {
            Group::Four => 4,
            Group::Eight => 8,
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
        let group = Group::Eight;
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

    /// Where the columns of `m` rows go for a product with `w`.
    pub(in crate::cuda) fn target(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        m: usize,
    ) -> Result<ColumnsTarget> {
        o.at_most("rows", self.rows, m)?;
        o.at_most("spans", self.spans, w.spans())?;
        if !Self::suit(w) {
            return o.refuse("a weight", "integer codes of whole spans", w.kind().name());
        }
        let group = BatchPlan::new(o, w, m)?.group(m);
        let bytes = m.div_ceil(group.rows()) * group.bytes(w.kind().bits(), w.spans());
        Ok(ColumnsTarget {
            words: o.of("columns", &self.words, &[bytes])?,
            rows: group.rows() as i32,
            nibbles: i32::from(w.kind().order() == 4),
        })
    }
}

/// The kernel of a product of several rows, and how it is cut.
enum BatchPlan {
    Rows(rows::RowsPlan),
    Groups(groups::GroupsPlan),
}

impl BatchPlan {
    fn new(o: &Operands<'_>, w: &DeviceLinear, m: usize) -> Result<Self> {
        match Self::find(o.gpu(), w, m)? {
            Some(plan) => Ok(plan),
            None => o.refuse("shared memory", "room for two stages", o.gpu().info()),
        }
    }

    /// `None` if no kernel has room for it.
    fn find(gpu: &Gpu, w: &DeviceLinear, m: usize) -> Result<Option<Self>> {
        if let Some(plan) = rows::RowsPlan::new(gpu, w, m)? {
            return Ok(Some(BatchPlan::Rows(plan)));
        }
        Ok(groups::GroupsPlan::new(gpu, w, m).map(BatchPlan::Groups))
    }

    /// How it takes `m` rows.
    fn group(&self, m: usize) -> Group {
        match self {
            BatchPlan::Rows(_) => Group::of(m),
            BatchPlan::Groups(_) => Group::Eight,
        }
    }

    fn blocks(&self) -> usize {
        match self {
            BatchPlan::Rows(plan) => plan.blocks(),
            BatchPlan::Groups(plan) => plan.blocks(),
        }
    }
}

/// Blocks of a product of `m` rows: the values per row that `best` of [`GemvOutput::Head`] must hold.
///
/// # Errors
/// Errors of the driver.
pub fn best_len(gpu: &Gpu, w: &DeviceLinear, m: usize) -> Result<usize> {
    if let Some(strips) = w.trellis_strips() {
        return Ok(strips);
    }
    if m == 1 {
        return Ok(gemv::blocks(gpu.info(), w));
    }
    Ok(BatchPlan::find(gpu, w, m)?.map_or(1, |plan| plan.blocks()))
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
        if w.is_trellis() {
            return self.trellis_step(w, x, output, m, late);
        }
        let o = self.operands("gemv_batch");
        o.multiple("inputs", 8, w.inputs())?;
        o.at_least("rows", 1, m)?;
        o.at_most("rows", MOST_SEQUENCES, m)?;
        o.at_most("rows", columns.rows, m)?;
        o.at_most("spans", columns.spans, w.spans())?;
        let (plan, output) = (BatchPlan::new(&o, w, m)?, Output::new(output, w.rows()));
        self.prepare_columns(&o, w, x, output.norm, columns, (m, plan.group(m)), late)?;
        self.multiply_prepared(&o, w, &plan, columns, &output, m)
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
        let o = self.operands("gemv_batch");
        o.at_least("rows", 1, m)?;
        o.at_most("rows", MOST_SEQUENCES.min(columns.rows), m)?;
        o.at_most("spans", columns.spans, w.spans())?;
        let (plan, output) = (
            BatchPlan::new(&o, w, m)?,
            Output::new(GemvOutput::Add(y), w.rows()),
        );
        self.multiply_prepared(&o, w, &plan, columns, &output, m)
    }

    fn multiply_prepared(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        plan: &BatchPlan,
        columns: &Columns,
        output: &Output<'_>,
        m: usize,
    ) -> Result<()> {
        match plan {
            BatchPlan::Rows(plan) => self.multiply_rows(o, w, plan, columns, output, m),
            BatchPlan::Groups(plan) => self.multiply_groups(o, w, plan, columns, output, m),
        }
    }

    /// Converts the `m` rows of `x` to `columns` in the layout for the product with `w`.
    #[expect(clippy::too_many_arguments, reason = "the operands of one kernel")]
    fn prepare_columns(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        norm: Option<Norm<'_>>,
        columns: &Columns,
        (m, group): (usize, Group),
        late: bool,
    ) -> Result<()> {
        let (inputs, spans) = (w.inputs(), w.spans());
        let bits = w.kind().bits();
        let bytes = m.div_ceil(group.rows()) * group.bytes(bits, spans);
        let args = ColumnsArgs {
            x: o.of("x", x, &[m, inputs])?,
            gain: norm.map_or(Ok(Address::NULL), |n| n.gain(o, inputs))?,
            columns: o.of("columns", &columns.words, &[bytes])?,
            factors: o.of("factors", &columns.factors, &[m])?,
            inputs: inputs as i32,
            spans: spans as i32,
            eps: norm.map_or(0.0, |n| n.eps),
            late: i32::from(late),
        };
        let parts = match norm {
            Some(_) => 1,
            None => spans.div_ceil(16),
        };
        let kernel = w.kind().order().ilog2() as usize - 2 + 3 * usize::from(group == Group::Four);
        let shape = LaunchShape::new((m, parts, 1), 512).overlapping();
        // SAFETY: the operands were checked.
        unsafe { self.launch(COLUMNS.instance(kernel), shape, &args) }
    }
}
