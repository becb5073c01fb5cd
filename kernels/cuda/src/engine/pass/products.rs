//! The products of a pass, by the kernels for its rows.

use crate::engine::session::buffers::{FullRows, Halves};
use crate::{
    AttentionOutput, Buffer, Columns, CopiedRows, DeviceLinear, GemmOutput, GemvOutput, Norm,
    PartialSums, RowsOut, StepOutput, Stream, Strided,
};
use nq_kernels::{KernelSet, Result};
use nq_model::Dims;
use nq_model::forward::Operand;

/// The inputs of a product that an adapter adds to.
#[derive(Clone, Copy)]
pub(in crate::engine) enum AddedInput<'a> {
    /// The rows of the residual stream, normalized, or what was read of several.
    Normed(&'a Buffer<f32>, Option<Norm<'a>>),
    /// What a mixer has made.
    Operand(Operand),
}

/// Bytes of the weights behind attention from which on prefetching them slows down the reads of
/// attention, as measured on an H200 (1.1 MB do not, 5.5 and 8.9 MB do).
const FLOOD: usize = 4 << 20;

/// The rows that products read, in the form that the kernels of a pass take.
pub(in crate::engine) enum Inputs<'a> {
    /// In f32; products normalize the residual stream for themselves.
    Full {
        attended: &'a mut Buffer<f32>, // [rows, widest output of a mixer]
        gated: &'a mut Buffer<f32>,    // [rows, intermediate]
        /// For several rows.
        columns: &'a mut Option<Columns>,
        /// Attention leaves its output in the columns of the product that reads it, where that suits the product's weight.
        prepares: bool,
    },
    /// In FP16.
    Half {
        halves: &'a mut Halves,
        /// Also in f32, for the reference kernels and for observers.
        full: Option<&'a mut FullRows>,
        /// Where a step's products leave their sums in parts.
        sums: Option<&'a mut PartialSums>,
    },
}

/// A product of `m` rows.
#[derive(Clone, Copy)]
pub(in crate::engine) struct Product<'a> {
    pub(in crate::engine) stream: &'a Stream,
    pub(in crate::engine) kernels: KernelSet,
    pub(in crate::engine) name: &'static str,
    pub(in crate::engine) w: &'a DeviceLinear,
    pub(in crate::engine) m: usize,
    /// Keeps the next kernel from starting before the previous one has ended.
    pub(in crate::engine) holds_dependents: bool,
}

impl Product<'_> {
    fn timed(self, queue: impl FnOnce(&Stream) -> Result<()>) -> Result<()> {
        let (stream, w) = (self.stream, self.w);
        let key = (self.name, w.kind().name(), Dims::new(w.rows(), w.inputs()));
        stream.timed(key, w.bytes(), || queue(stream))
    }

    /// Multiplies few rows in f32.
    fn few(
        self,
        x: &Buffer<f32>,
        out: GemvOutput<'_>,
        columns: &mut Option<Columns>,
    ) -> Result<()> {
        let Product {
            w,
            m,
            holds_dependents,
            ..
        } = self;
        self.timed(|stream| match columns {
            Some(columns) if m > 1 => stream.gemv_batch(w, x, out, columns, m, holds_dependents),
            _ => stream.gemv(w, x, out, holds_dependents),
        })
    }

    /// Multiplies the rows of a step in FP16.
    pub(super) fn step(self, x: &Buffer<u16>, out: StepOutput<'_>) -> Result<()> {
        self.timed(|stream| stream.gemm_step(self.w, x, out, self.m))
    }

    /// Multiplies many rows: the f32 rows `full` by the reference kernels, if both are asked for; otherwise the FP16 rows
    /// `half`.
    pub(in crate::engine) fn many(
        self,
        full: Option<&Buffer<f32>>,
        half: &Buffer<u16>,
        out: GemmOutput<'_>,
    ) -> Result<()> {
        let Product { stream, w, m, .. } = self;
        let full = full.filter(|_| self.kernels == KernelSet::Reference);
        match (full, out) {
            (Some(x), GemmOutput::Store(out)) => stream.linear_reference(w, x, out, m, false),
            (Some(x), GemmOutput::Add(out)) => stream.linear_reference(w, x, out, m, true),
            (_, out) => self.timed(|stream| stream.gemm(w, half, out, m)),
        }
    }
}

impl Inputs<'_> {
    /// Stores the product of the rows of `x`, normalized if there is a norm, in `y`.
    pub(super) fn store(
        &mut self,
        product: Product<'_>,
        x: &Buffer<f32>,
        norm: Option<Norm<'_>>,
        y: &mut Buffer<f32>,
    ) -> Result<()> {
        match self {
            Inputs::Full { columns, .. } => product.few(x, GemvOutput::Store(norm, y), columns),
            Inputs::Half { halves, full, sums } => match sums {
                Some(_) => product.step(&halves.normed, StepOutput::Store(y)),
                None => {
                    let full = full.as_ref().map(|f| &f.normed);
                    product.many(full, &halves.normed, GemmOutput::Store(y))
                }
            },
        }
    }

    /// Makes the operand of the product with the down projection: `silu(gate) * up` of the rows of `x`, normalized.
    pub(super) fn gate(
        &mut self,
        product: Product<'_>,
        x: &Buffer<f32>,
        norm: Option<Norm<'_>>,
    ) -> Result<()> {
        match self {
            Inputs::Full { gated, columns, .. } => {
                product.few(x, GemvOutput::Silu(norm, gated), columns)
            }
            Inputs::Half { halves, full, sums } => {
                let Halves { normed, gated, .. } = &mut **halves;
                match (sums, full) {
                    (Some(_), _) => product.step(normed, StepOutput::Silu(gated)),
                    (None, None) => product.many(None, normed, GemmOutput::Silu(gated)),
                    (None, Some(full)) => {
                        let out = GemmOutput::Store(&mut full.gate_up);
                        product.many(Some(&full.normed), normed, out)?;
                        let out = RowsOut {
                            full: Some(&mut full.gated),
                            half: Some(gated),
                        };
                        let width = product.w.rows() / 2;
                        (product.stream).silu_mul(&full.gate_up, &out, product.m, width)
                    }
                }
            }
        }
    }

    /// Makes of the products `gate_up` `[m, 2 intermediate]` what [`Inputs::gate`] makes of their inputs.
    pub(super) fn gate_products(
        &mut self,
        product: Product<'_>,
        gate_up: &Buffer<f32>,
    ) -> Result<()> {
        let width = product.w.rows() / 2;
        (product.stream).silu_mul(gate_up, &self.gated(), product.m, width)
    }

    /// Adds the product of `operand` to `to`.
    pub(super) fn add(
        &mut self,
        product: Product<'_>,
        operand: Operand,
        to: &mut Buffer<f32>,
    ) -> Result<()> {
        let Product { w, m, .. } = product;
        match self {
            Inputs::Full {
                attended,
                gated,
                columns,
                prepares,
            } => {
                let operand = match (operand, &*columns) {
                    (Operand::Attended, Some(columns))
                        if m > 1 && *prepares && Columns::suit(w) =>
                    {
                        return product.timed(|stream| stream.multiply_columns(w, columns, to, m));
                    }
                    (Operand::Attended, _) => attended,
                    (Operand::Gated, _) => gated,
                };
                product.few(operand, GemvOutput::Add(to), columns)
            }
            Inputs::Half { halves, full, .. } => {
                let full = full.as_ref().map(|f| f.operand(operand));
                product.many(full, halves.operand(operand), GemmOutput::Add(to))
            }
        }
    }

    /// Computes the products of rows with an adapter's `A`: `low` `[m, ranks]`. Of `zeros` there are as many for a step of
    /// few rows.
    pub(in crate::engine) fn low(
        &mut self,
        product: Product<'_>,
        x: AddedInput<'_>,
        low: &mut Buffer<f32>,
        zeros: &Buffer<f32>,
    ) -> Result<()> {
        match self {
            Inputs::Full {
                attended,
                gated,
                columns,
                ..
            } => {
                let operand = match x {
                    AddedInput::Normed(x, norm) => {
                        return product.few(x, GemvOutput::Store(norm, low), columns);
                    }
                    AddedInput::Operand(Operand::Attended) => attended,
                    AddedInput::Operand(Operand::Gated) => gated,
                };
                // What is not normalized can only be added.
                let n = product.m * product.w.rows();
                let all = Strided { at: 0, stride: n };
                product.stream.copy_rows(CopiedRows {
                    from: zeros,
                    begin: all,
                    to: low,
                    end: all,
                    rows: 1,
                    width: n,
                })?;
                product.few(operand, GemvOutput::Add(low), columns)
            }
            Inputs::Half { halves, full, .. } => {
                let (full, half) = match x {
                    AddedInput::Normed(..) => (full.as_ref().map(|f| &f.normed), &halves.normed),
                    AddedInput::Operand(operand) => {
                        let full = full.as_ref().map(|f| f.operand(operand));
                        (full, halves.operand(operand))
                    }
                };
                product.many(full, half, GemmOutput::Store(low))
            }
        }
    }

    /// Computes the logits of the rows of `x`, normalized, or to `part` those of this GPU's rows of the head.
    pub(super) fn head(
        &mut self,
        product: Product<'_>,
        x: &Buffer<f32>,
        norm: Option<Norm<'_>>,
        to: Head<'_>,
    ) -> Result<()> {
        match self {
            Inputs::Full { columns, .. } => {
                let out = match to {
                    Head::Part(part) => GemvOutput::Store(norm, part),
                    Head::Whole(logits, best) => GemvOutput::Head(norm, logits, best),
                };
                product.few(x, out, columns)
            }
            Inputs::Half { halves, .. } => {
                let out = match to {
                    Head::Part(part) => StepOutput::Store(part),
                    Head::Whole(logits, best) => StepOutput::Head(logits, best),
                };
                product.step(&halves.normed, out)
            }
        }
    }

    /// Where the mixer of a step leaves its output for the product with `o` of `m` rows, and whether the successors of its
    /// kernel wait for the end of its predecessor.
    pub(super) fn attended<'b>(
        &'b mut self,
        o: &'b DeviceLinear,
        m: usize,
    ) -> (AttentionOutput<'b>, bool) {
        match self {
            Inputs::Half { halves, .. } => (AttentionOutput::Half(&mut halves.attended), false),
            Inputs::Full {
                attended,
                columns,
                prepares,
                ..
            } => {
                let out = match columns {
                    Some(columns) if m > 1 && *prepares && Columns::suit(o) => {
                        AttentionOutput::Columns(columns, o)
                    }
                    _ => AttentionOutput::Full(attended),
                };
                (out, m == 1 && o.bytes() > FLOOD)
            }
        }
    }

    /// The operand of the down projection.
    pub(super) fn gated(&mut self) -> RowsOut<'_> {
        match self {
            Inputs::Full { gated, .. } => RowsOut::full(gated),
            Inputs::Half { halves, full, .. } => RowsOut {
                full: full.as_mut().map(|f| &mut f.gated),
                half: Some(&mut halves.gated),
            },
        }
    }
}

/// Where the logits of a step go.
pub(super) enum Head<'a> {
    /// `[m, rows of the head]` of one of several GPUs.
    Part(&'a mut Buffer<f32>),
    /// `[m, vocab]`, and the best of each block.
    Whole(&'a mut Buffer<f32>, &'a mut Buffer<[f32; 2]>),
}
