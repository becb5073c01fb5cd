//! Which kernel computes a product, and how it is cut.

use super::batch::columns::ColumnGroup;
use super::batch::groups::GroupsPlan;
use super::batch::rows::RowsPlan;
use super::driver::{Address, Gpu, Operands, Stream};
use super::gemm::ManyRowsPlan;
use super::gemm_step::{StepPlan, check_wide};
use super::gemv::GemvPlan;
use super::pack::{PackedShape, SPAN};
use super::product::{Epilogue, PlannedRows, Product, ProductOutput, Shares};
use nq_kernels::Result;

/// The kernel of a product, and how it is cut.
pub(super) enum ProductPlan {
    /// `cuda/gemv.cu`
    Row(GemvPlan),
    /// `cuda/gemv_rows.cu`
    Rows(RowsPlan),
    /// `cuda/gemv_batch.cu`
    Groups(GroupsPlan),
    /// `cuda/gemm_step.cu`
    Step(StepPlan),
    /// `cuda/gemm_wgmma.cu` or `cuda/gemm.cu`
    Many(ManyRowsPlan),
}

impl ProductPlan {
    /// `None` if no kernel has room for the product.
    pub(super) fn new(gpu: &Gpu, w: PackedShape, asked: PlannedRows) -> Result<Option<Self>> {
        let info = gpu.info();
        Ok(match asked {
            PlannedRows::Row { head } => {
                GemvPlan::new(info, info.multiprocessors, &w, head, 0).map(ProductPlan::Row)
            }
            PlannedRows::Columns(m) => match RowsPlan::new(gpu, &w, m)? {
                Some(plan) => Some(ProductPlan::Rows(plan)),
                None => GroupsPlan::new(info, &w, m).map(ProductPlan::Groups),
            },
            PlannedRows::Step(m, parted) => {
                let plan = StepPlan::new(info.multiprocessors, m, &w, parted);
                Some(ProductPlan::Step(plan))
            }
            PlannedRows::Experts { m, chosen_bytes } => {
                // Rows share the multiprocessors.
                let own = (info.multiprocessors / m).max(1);
                GemvPlan::new(info, own, &w, false, chosen_bytes).map(ProductPlan::Row)
            }
            PlannedRows::Many(blocks) => ManyRowsPlan::new(gpu, &w, blocks).map(ProductPlan::Many),
        })
    }

    /// As [`ProductPlan::new`]; where there is no room, an error that names the device.
    pub(super) fn checked(o: &Operands<'_>, w: PackedShape, asked: PlannedRows) -> Result<Self> {
        let info = o.gpu().info();
        match ProductPlan::new(o.gpu(), w, asked)? {
            Some(plan) => Ok(plan),
            None => {
                let room = info.shared_memory;
                let expected = format!("rows within the {room} bytes of shared memory of {info}");
                o.refuse("inputs", expected, w.spans * SPAN)
            }
        }
    }

    /// What the plan leaves in pieces.
    pub(super) fn shares(&self) -> Shares {
        let (parts, bests) = match self {
            ProductPlan::Row(plan) => (1, plan.cut.blocks),
            ProductPlan::Rows(plan) => (1, plan.blocks),
            ProductPlan::Groups(plan) => (1, plan.blocks),
            ProductPlan::Step(plan) => (plan.parts, plan.taken),
            ProductPlan::Many(_) => (1, 0),
        };
        Shares { parts, bests }
    }

    /// How its kernel takes `m` rows in columns.
    pub(super) fn group(&self, m: usize) -> ColumnGroup {
        match self {
            ProductPlan::Groups(_) => ColumnGroup::Eight,
            _ => ColumnGroup::of(m),
        }
    }
}

impl Product<'_> {
    /// Checks what the kernels for these rows demand.
    fn check(&self) -> Result<()> {
        let (o, w, m) = (&self.o, self.w, self.m);
        match (self.asked, self.columns) {
            (PlannedRows::Row { .. }, _) => o.multiple("inputs", 8, w.inputs()),
            (PlannedRows::Columns(_), Some(columns)) => columns.check(o, w, m),
            (PlannedRows::Columns(_), None) => o.refuse("columns", "memory for them", "none"),
            (PlannedRows::Step(..), _) => check_wide(o, m),
            (PlannedRows::Many(_) | PlannedRows::Experts { .. }, _) => Ok(()),
        }
    }
}

impl Stream {
    /// Computes a product by the kernel of its plan.
    pub(super) fn multiply(&self, p: Product<'_>, output: ProductOutput<'_>) -> Result<()> {
        if let Some(order) = &p.w.order {
            return self.multiply_in_order(&p, order, output);
        }
        if let Some(parts) = &p.w.trellis {
            return self.multiply_trellis(&p, parts, output);
        }
        if let Some(parts) = &p.w.exl3 {
            return self.multiply_exl3(&p, parts, output);
        }
        p.check()?;
        if matches!(p.asked, PlannedRows::Columns(_))
            && output.norm.is_none()
            && output.epilogue != Epilogue::Add
        {
            return p.o.refuse("a norm of rows in columns", "one", "none");
        }
        let plan = ProductPlan::checked(&p.o, p.w.shape(), p.asked)?;
        let to = output.written(&p.o, p.m, p.w.rows(), plan.shares())?;
        match (&plan, p.columns) {
            (ProductPlan::Row(plan), _) => self.multiply_row(&p, plan, &to),
            (ProductPlan::Step(plan), _) => self.multiply_step(&p, plan, &to),
            (ProductPlan::Many(plan), _) => {
                // SAFETY: there are no blocks of experts.
                unsafe { self.multiply_many(&p, plan, &to, p.w.sizes(), Address::NULL) }
            }
            (_, Some(columns)) => self.multiply_in_columns(&p, columns, &plan, &to),
            (_, None) => unreachable!("such a product was checked to have columns"),
        }
    }
}
