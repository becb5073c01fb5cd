//! Products of rows of activations with packed weights: what is asked for, and where it goes. `plan` says which kernel
//! computes it.

use super::batch::columns::Columns;
use super::driver::{Address, BoxedMatrix, Buffer, Operands};
use super::linear::DeviceLinear;
use super::pack::SPAN;
use super::partial_sums::PartialSums;
use crate::cuda::wgmma::TensorMap;
use nq_kernels::Result;

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
    pub(super) asked: PlannedRows,
    /// Of kernels that read columns.
    pub(super) columns: Option<&'a Columns>,
    /// Keeps the next kernel (a programmatic dependent launch) from starting before the previous one has ended.
    pub(super) holds_dependents: bool,
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

/// What a plan leaves in pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shares {
    /// Parts in which sums are left.
    pub(super) parts: usize,
    /// Best values per row of a head: those of each block.
    pub(super) bests: usize,
}

impl<'a> ProductOutput<'a> {
    /// The addresses for `m` rows of a weight with `rows` outputs.
    pub(super) fn written(
        self,
        o: &Operands<'_>,
        m: usize,
        rows: usize,
        shares: Shares,
    ) -> Result<OutputAddresses<'a>> {
        let (epilogue, none) = (self.epilogue, Address::NULL);
        let width = rows / if epilogue == Epilogue::Silu { 2 } else { 1 };
        let padded = width.next_multiple_of(SPAN);
        let y = |y| o.of("outputs", y, &[m, width]);
        let (y, half, best) = match self.to {
            OutputMemory::Full(to) => (y(to)?, none, none),
            OutputMemory::Half(to) => (none, o.of("FP16 outputs", to, &[m, padded])?, none),
            OutputMemory::Head(to, best) => (y(to)?, none, o.of("best", best, &[m, shares.bests])?),
            OutputMemory::Parts(sums) => (sums.written(o, shares.parts, m, rows)?, none, none),
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
pub(super) enum PlannedRows {
    /// A row in f32; of a head or not.
    Row { head: bool },
    /// Up to 16 rows in columns.
    Columns(usize),
    /// Up to 64 rows of a decode step in FP16; true if their sums may stay in parts.
    Step(usize, bool),
    /// Rows in FP16.
    Many(RowBlocks),
    /// Rows in f32, each of experts that it chooses in so many bytes of shared memory.
    Experts { m: usize, chosen_bytes: usize },
}

impl<'a> Product<'a> {
    pub(super) fn new(
        o: Operands<'a>,
        w: &'a DeviceLinear,
        x: Inputs<'a>,
        m: usize,
        asked: PlannedRows,
    ) -> Self {
        Product {
            o,
            w,
            x,
            m,
            asked,
            columns: None,
            holds_dependents: false,
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
}

/// What a copy engine brings at once.
#[derive(Clone, Copy)]
pub(super) struct Boxes {
    /// Rows of 64 inputs of x.
    pub(super) rows: usize,
    /// Tiles of the weight.
    pub(super) tiles: usize,
    /// Bytes of a tile's codes.
    pub(super) bytes: usize,
    /// Bytes of an element of codes.
    pub(super) element: usize,
}

/// Describes x, codes and metadata at these addresses for a copy engine.
pub(super) fn boxes(
    p: &Product<'_>,
    [x, codes, meta]: [Address; 3],
    Boxes {
        rows,
        tiles,
        bytes,
        element,
    }: Boxes,
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

/// RMSNorm of a product's input.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// `[inputs]`
    pub gain: &'a Buffer<f32>,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl Norm<'_> {
    /// The gain, checked as an operand of a product of `inputs`.
    pub(super) fn gain(&self, o: &Operands<'_>, inputs: usize) -> Result<Address> {
        o.of("gain", self.gain, &[inputs])
    }
}

/// How rows of x are dealt to blocks.
#[derive(Clone, Copy, Debug)]
pub(super) enum RowBlocks {
    /// So many rows, in as many blocks as an instance needs.
    Of(usize),
    /// `columns` blocks, each of up to `rows` rows of one expert.
    Sorted { columns: usize, rows: usize },
}

impl RowBlocks {
    /// Number of blocks that take `rows` rows each.
    pub(super) fn columns(self, rows: usize) -> usize {
        match self {
            RowBlocks::Of(m) => m.div_ceil(rows),
            RowBlocks::Sorted { columns, .. } => columns,
        }
    }
}
