//! Products with weights whose inputs are sorted by group: rows of activations are gathered in that order before them.

pub(crate) mod room;

use super::driver::{Buffer, LaunchShape, Stream};
use super::kernel::kernels;
use super::pack::SPAN;
use super::product::{Inputs, Norm, Product, ProductOutput};
use crate::cuda::gather::{GATHER_THREADS, GatherArgs};
use nq_kernels::Result;

kernels! {
    GATHER: GatherArgs = "gather" in "gather.cu",
        test "kernels/cuda/tests/cuda/rows.rs::products_of_gathered_inputs", bench "rows",
        instances &["gather", "gather_halves"];
}

/// Inputs before they are gathered.
#[derive(Clone, Copy)]
enum Gathered {
    Full,
    Halves,
}

impl Stream {
    /// A product with a weight whose inputs are sorted, column k being input `order[k]`: of the rows gathered likewise,
    /// with a gain gathered likewise.
    pub(super) fn multiply_in_order(
        &self,
        p: &Product<'_>,
        order: &Buffer<u32>,
        output: ProductOutput<'_>,
    ) -> Result<()> {
        let (o, w, m) = (&p.o, p.w.in_order(), p.m);
        let Some(rows) = self.gathered_rows() else {
            return o.refuse("a stream", "with memory for gathered inputs", "one without");
        };
        let norm = output.norm.map(|norm| Norm {
            gain: &rows.gain,
            eps: norm.eps,
        });
        let x = match p.x {
            Inputs::Full(_) => Inputs::Full(&rows.full),
            Inputs::Half(_) => Inputs::Half(&rows.half),
            Inputs::Prepared => return o.refuse("x", "rows that are not columns yet", "columns"),
        };
        let to = Product { w: &w, x, ..*p };
        let (inputs, padded) = (w.inputs(), w.inputs().next_multiple_of(SPAN));
        let mut args = GatherArgs {
            order: o.of("the order of inputs", order, &[inputs])?,
            m: m as i32,
            inputs: inputs as i32,
            padded: padded as i32,
            holds_dependents: i32::from(p.holds_dependents),
            ..GatherArgs::default()
        };
        let kind = match p.x {
            Inputs::Half(_) => Gathered::Halves,
            Inputs::Full(_) | Inputs::Prepared => Gathered::Full,
        };
        let shape = match kind {
            Gathered::Full => {
                (args.x, args.x_to) = (p.x()?, to.x()?);
                if let (Some(from), Some(gathered)) = (output.norm, norm) {
                    args.gain = from.gain(o, inputs)?;
                    args.gain_to = gathered.gain(o, inputs)?;
                }
                let with_gain = m + usize::from(norm.is_some());
                let blocks = inputs.div_ceil(GATHER_THREADS);
                LaunchShape::new([blocks, with_gain, 1], GATHER_THREADS)
            }
            Gathered::Halves => {
                (args.half, args.half_to) = (p.x()?, to.x()?);
                LaunchShape::new([m, 1, 1], GATHER_THREADS).shared(2 * padded)
            }
        };
        let kernel = GATHER.instance(kind as usize);
        // SAFETY: the operands were checked; the order was made by `AffineWeight::in_group_order`, of inputs.
        unsafe { self.launch(kernel, shape.overlapping(), &args)? };
        self.multiply(to, ProductOutput { norm, ..output })
    }
}
