//! The products of a decode step of several rows. [`Stream::gemv_batch`] has two kernels for them: one for
//! weights of integer codes on devices with clusters of blocks, and one for other weights, small ones and other devices.

pub(crate) mod columns;
pub(crate) mod groups;
pub(crate) mod rows;

use self::columns::{ColumnGroup, Columns, ColumnsTarget, PreparedColumns};
use super::driver::{Buffer, Gpu, LaunchShape, Operands, Stream};
use super::gemv::GemvOutput;
use super::kernel::kernels;
use super::linear::DeviceLinear;
use super::plan::ProductPlan;
use super::product::{Inputs, OutputAddresses, PlannedRows, Product};
use crate::cuda::columns::ColumnsArgs;
use nq_kernels::Result;

impl Columns {
    /// Where the columns of `m` rows go for a product with `w`.
    pub(crate) fn target(
        &self,
        o: &Operands<'_>,
        w: &DeviceLinear,
        m: usize,
    ) -> Result<ColumnsTarget> {
        self.check(o, w, m)?;
        if !Self::suit(w) {
            return o.refuse("a weight", "integer codes of whole spans", w.kind().name());
        }
        let group = ProductPlan::checked(o, w.shape(), PlannedRows::Columns(m))?.group(m);
        Ok(ColumnsTarget {
            words: self.address(o, w, m, group)?,
            rows: group.rows() as i32,
            nibbles: i32::from(w.kind().order() == 4),
        })
    }
}

/// Blocks of a product of `m` rows: the values per row that `best` of [`GemvOutput::Head`] must hold.
pub fn best_len(gpu: &Gpu, w: &DeviceLinear, m: usize) -> Result<usize> {
    if let Some(strips) = w.bests() {
        return Ok(strips);
    }
    let asked = match m {
        1 => PlannedRows::Row { head: true },
        _ => PlannedRows::Columns(m),
    };
    Ok(ProductPlan::new(gpu, w.shape(), asked)?.map_or(1, |plan| plan.shares().bests))
}

kernels! {
    COLUMNS: ColumnsArgs = "columns" in "columns.cu",
        test "kernels/cuda/tests/cuda/batch.rs::products_of_several_sequences", bench "gemv_batch",
        instances &[
            "columns_int4_8",
            "columns_int8_8",
            "columns_fp16_8",
            "columns_int4_4",
            "columns_int8_4",
        ];
}

impl Stream {
    /// Multiplies `m` rows of activations `x` `[m, inputs]` by `w`, reading `w` once: two kernels
    /// of a decode step of several sequences. `columns` is scratch. With `holds_dependents`, the next
    /// kernels (programmatic dependent launches) do not start before the previous one has ended.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    pub fn gemv_batch(
        &self,
        w: &DeviceLinear,
        x: &Buffer<f32>,
        output: GemvOutput<'_>,
        columns: &mut Columns,
        m: usize,
        holds_dependents: bool,
    ) -> Result<()> {
        let (o, asked) = (self.operands("gemv_batch"), PlannedRows::Columns(m));
        let p = Product {
            columns: Some(columns),
            holds_dependents,
            ..Product::new(o, w, Inputs::Full(x), m, asked)
        };
        self.multiply(p, output.into())
    }

    /// Multiplies `m` rows that attention has prepared ([`AttentionOutput::Columns`]) by `w`, and adds the
    /// products to `y` `[m, outputs]`.
    ///
    /// # Errors
    /// [`Error::Shape`](nq_kernels::Error::Shape) if an operand does not fit; errors of the driver.
    ///
    /// [`AttentionOutput::Columns`]: super::AttentionOutput::Columns
    pub fn multiply_columns(
        &self,
        w: &DeviceLinear,
        columns: &Columns,
        y: &mut Buffer<f32>,
        m: usize,
    ) -> Result<()> {
        let (o, asked) = (self.operands("gemv_batch"), PlannedRows::Columns(m));
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
        let prepared = PreparedColumns {
            words: columns.address(o, w, m, group)?,
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
                holds_dependents: i32::from(p.holds_dependents),
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
            let shape = LaunchShape::new([m, parts, 1], 512).overlapping();
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
