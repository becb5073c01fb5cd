//! Products of rows of activations with packed weights: what is asked for, and which kernel computes it.

use super::batch::groups::GroupsPlan;
use super::batch::rows::RowsPlan;
use super::batch::{ColumnGroup, Columns};
use super::driver::{Address, BoxedMatrix, Buffer, Gpu, Operands, Stream, TensorMap};
use super::experts::CHOSEN_BYTES;
use super::gemm::{GemmPlan, RowBlocks, WgmmaPlan};
use super::gemm_step::{self, PartialSums, StepPlan};
use super::gemv::{GemvPlan, Norm};
use super::linear::DeviceLinear;
use super::pack::{PackedKind, SPAN, TILE};
use crate::error::Result;

/// The sizes of a packed weight, or of the part of one that a launch reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedShape {
    pub(super) kind: PackedKind,
    /// Tiles of 16 outputs.
    pub(super) tiles: usize,
    /// Spans of 256 inputs.
    pub(super) spans: usize,
}

impl PackedShape {
    pub(super) fn new(kind: PackedKind, rows: usize, inputs: usize) -> Self {
        PackedShape {
            kind,
            tiles: rows.div_ceil(TILE),
            spans: inputs.div_ceil(SPAN),
        }
    }
}

/// What becomes of sums: `Epilogue` of `cuda/weights.cuh`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Epilogue {
    Store,
    Add,
    Silu,
    Head,
}

/// The rows of x.
#[derive(Clone, Copy)]
pub(super) enum Inputs<'a> {
    /// `[m, inputs]`
    Full(&'a Buffer<f32>),
    /// `[m, inputs padded to 256]` in FP16 and operand order.
    Half(&'a Buffer<u16>),
    /// Columns that attention has left.
    Prepared,
}

/// A product of `m` rows.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) o: Operands<'a>,
    pub(super) w: &'a DeviceLinear,
    pub(super) x: Inputs<'a>,
    pub(super) m: usize,
    pub(super) asked: Asked,
    /// Of kernels that read columns.
    pub(super) columns: Option<&'a Columns>,
    /// Keeps the next kernel from starting before the previous one has ended.
    pub(super) late: bool,
}

/// Where a product goes, and what of its inputs is normalized.
pub(super) struct ProductOutput<'a> {
    pub(super) epilogue: Epilogue,
    pub(super) norm: Option<Norm<'a>>,
    pub(super) to: OutputMemory<'a>,
}

/// The memory of a product.
pub(super) enum OutputMemory<'a> {
    /// `[m, outputs]`, or of gate and up `[m, outputs / 2]`.
    Full(&'a Buffer<f32>),
    /// `[m, outputs / 2 padded to 256]` in FP16 and operand order.
    Half(&'a Buffer<u16>),
    /// `[m, outputs]`, and the best of each block.
    Head(&'a Buffer<f32>, &'a Buffer<[f32; 2]>),
    Parts(&'a mut PartialSums),
}

/// The addresses of an [`ProductOutput`].
pub(super) struct OutputAddresses<'a> {
    pub(super) epilogue: Epilogue,
    pub(super) norm: Option<Norm<'a>>,
    pub(super) y: Address,
    pub(super) half: Address,
    pub(super) best: Address,
    /// Values per row of `y`.
    pub(super) width: usize,
}

impl OutputAddresses<'_> {
    /// The gain of the inputs' norm, or null.
    pub(super) fn gain(&self, o: &Operands<'_>, inputs: usize) -> Result<Address> {
        self.norm.map_or(Ok(Address::NULL), |n| n.gain(o, inputs))
    }

    pub(super) fn eps(&self) -> f32 {
        self.norm.map_or(0.0, |n| n.eps)
    }
}

impl<'a> ProductOutput<'a> {
    /// The addresses for `m` rows of a weight with so many outputs. The plan leaves sums in so many parts, and so many
    /// best values a row.
    pub(super) fn written(
        self,
        o: &Operands<'_>,
        (m, rows): (usize, usize),
        (parts, bests): (usize, usize),
    ) -> Result<OutputAddresses<'a>> {
        let (epilogue, none) = (self.epilogue, Address::NULL);
        let width = rows / if epilogue == Epilogue::Silu { 2 } else { 1 };
        let padded = width.next_multiple_of(SPAN);
        let y = |y| o.of("outputs", y, &[m, width]);
        let (y, half, best) = match self.to {
            OutputMemory::Full(to) => (y(to)?, none, none),
            OutputMemory::Half(to) => (none, o.of("FP16 outputs", to, &[m, padded])?, none),
            OutputMemory::Head(to, best) => (y(to)?, none, o.of("best", best, &[m, bests])?),
            OutputMemory::Parts(sums) => (sums.written(o, parts, m, rows)?, none, none),
        };
        Ok(OutputAddresses {
            epilogue,
            norm: self.norm,
            y,
            half,
            best,
            width,
        })
    }
}

/// The first of those that cost least.
pub(super) fn cheapest<T>(all: impl Iterator<Item = (f64, T)>) -> Option<T> {
    let least = all.min_by(|a, b| a.0.total_cmp(&b.0));
    least.map(|(_, plan)| plan)
}

/// The rows that a plan is for, and what their kernels read.
#[derive(Clone, Copy)]
pub(super) enum Asked {
    /// A row in f32; of a head or not.
    Row { head: bool },
    /// Up to 16 rows in columns.
    Columns(usize),
    /// Up to 64 rows of a decode step in FP16; true if their sums may stay in parts.
    Step(usize, bool),
    /// Rows in FP16.
    Many(RowBlocks),
    /// Rows in f32, each of experts that it chooses.
    Experts(usize),
}

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
    /// `cuda/gemm_wgmma.cu`
    Warpgroups(WgmmaPlan),
    /// `cuda/gemm.cu`
    Warps(GemmPlan),
}

impl ProductPlan {
    /// `None` if no kernel has room for the product.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn new(gpu: &Gpu, w: PackedShape, asked: Asked) -> Result<Option<Self>> {
        let info = gpu.info();
        Ok(match asked {
            Asked::Row { head } => {
                GemvPlan::new(info, info.multiprocessors, &w, head, 0).map(ProductPlan::Row)
            }
            Asked::Columns(m) => match RowsPlan::new(gpu, &w, m)? {
                Some(plan) => Some(ProductPlan::Rows(plan)),
                None => GroupsPlan::new(info, &w, m).map(ProductPlan::Groups),
            },
            Asked::Step(m, parted) => {
                let plan = StepPlan::new(info.multiprocessors, m, &w, parted);
                Some(ProductPlan::Step(plan))
            }
            Asked::Experts(m) => {
                // Rows share the multiprocessors.
                let own = (info.multiprocessors / m).max(1);
                GemvPlan::new(info, own, &w, false, CHOSEN_BYTES).map(ProductPlan::Row)
            }
            Asked::Many(blocks) => match WgmmaPlan::new(gpu, &w, blocks) {
                Some(plan) => Some(ProductPlan::Warpgroups(plan)),
                None => GemmPlan::new(info, &w, blocks).map(ProductPlan::Warps),
            },
        })
    }

    /// As [`ProductPlan::new`]; where there is no room, an error that names the device.
    pub(super) fn checked(o: &Operands<'_>, w: PackedShape, asked: Asked) -> Result<Self> {
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

    /// Parts in which sums are left, and best values per row of a head: those of each block.
    pub(super) fn shares(&self) -> (usize, usize) {
        match self {
            ProductPlan::Row(plan) => (1, plan.cut.blocks),
            ProductPlan::Rows(plan) => (1, plan.blocks),
            ProductPlan::Groups(plan) => (1, plan.blocks),
            ProductPlan::Step(plan) => (plan.parts, plan.taken),
            ProductPlan::Warpgroups(_) | ProductPlan::Warps(_) => (1, 0),
        }
    }

    /// How its kernel takes `m` rows in columns.
    pub(super) fn group(&self, m: usize) -> ColumnGroup {
        match self {
            ProductPlan::Groups(_) => ColumnGroup::Eight,
            _ => ColumnGroup::of(m),
        }
    }
}

impl<'a> Product<'a> {
    pub(super) fn new(
        o: Operands<'a>,
        w: &'a DeviceLinear,
        x: Inputs<'a>,
        m: usize,
        asked: Asked,
    ) -> Self {
        Product {
            o,
            w,
            x,
            m,
            asked,
            columns: None,
            late: false,
        }
    }

    /// The address of the rows.
    pub(super) fn x(&self) -> Result<Address> {
        let (w, m) = (self.w, self.m);
        match self.x {
            Inputs::Full(x) => self.o.of("x", x, &[m, w.inputs()]),
            Inputs::Half(x) => self.o.of("x", x, &[m, w.spans(), SPAN]),
            Inputs::Prepared => Ok(Address::NULL),
        }
    }

    /// Checks what the kernels for these rows demand.
    fn check(&self) -> Result<()> {
        let (o, w, m) = (&self.o, self.w, self.m);
        match (self.asked, self.columns) {
            (Asked::Row { .. }, _) => o.multiple("inputs", 8, w.inputs()),
            (Asked::Columns(_), Some(columns)) => columns.check(o, w, m),
            (Asked::Columns(_), None) => o.refuse("columns", "memory for them", "none"),
            (Asked::Step(..), _) => gemm_step::check_wide(o, m),
            (Asked::Many(_) | Asked::Experts(_), _) => Ok(()),
        }
    }
}

/// Describes x, codes and metadata at these addresses for a copy engine. A box has `rows` rows of 64 inputs of x, and
/// of each of `tiles` tiles of the weight `bytes` bytes of codes, in elements of `element` bytes.
pub(super) fn boxes(
    p: &Product<'_>,
    (x, codes, meta): (Address, Address, Address),
    (rows, tiles): (usize, usize),
    (bytes, element): (usize, usize),
) -> Result<[TensorMap; 3]> {
    let (gpu, w) = (p.o.gpu(), p.w.shape());
    let x = BoxedMatrix {
        address: x,
        element: 2,
        rows: p.m,
        width: w.spans * SPAN,
        tile: (rows, 64),
        swizzled: true,
    };
    let of_weight = |address, element, record: usize, bytes: usize| {
        gpu.tensor_map(BoxedMatrix {
            address,
            element,
            rows: w.tiles,
            width: w.spans * record / element,
            tile: (tiles, bytes / element),
            swizzled: false,
        })
    };
    let codes = of_weight(codes, element, w.kind.code_bytes(), bytes)?;
    let meta = match w.kind.meta_bytes() / 4 * 4 {
        0 => TensorMap::NONE,
        words => of_weight(meta, 4, words, words)?,
    };
    Ok([gpu.tensor_map(x)?, codes, meta])
}

impl Stream {
    /// Computes a product by the kernel of its plan.
    pub(super) fn multiply(&self, p: Product<'_>, output: ProductOutput<'_>) -> Result<()> {
        if let Some(parts) = &p.w.trellis {
            return self.multiply_trellis(&p, parts, output);
        }
        p.check()?;
        let plan = ProductPlan::checked(&p.o, p.w.shape(), p.asked)?;
        let to = output.written(&p.o, (p.m, p.w.rows()), plan.shares())?;
        match (&plan, p.columns) {
            (ProductPlan::Row(plan), _) => self.multiply_row(&p, plan, &to),
            (ProductPlan::Step(plan), _) => self.multiply_step(&p, plan, &to),
            (_, Some(columns)) => self.multiply_in_columns(&p, columns, &plan, &to),
            // SAFETY: there are no blocks of experts.
            _ => unsafe { self.multiply_many(&p, &plan, &to, p.w.sizes(), Address::NULL) },
        }
    }
}
