//! Products of Linears as files hold them, which is how training has them: queries with gates behind those of each head,
//! heads of which only a part is turned, and the Linears of a recurrence apart from each other.

use super::Load;
use super::turned::Turned;
use nq_kernels::Result;
use nq_kernels::grad::{Allocate, Gemm, HeadShape, LayerOps};
use nq_model::forward::Packed;
use nq_model::{Dims, ModelConfig};

/// Columns `at .. at + n` of rows of `width` values.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// The first.
    pub at: usize,
    /// How many.
    pub n: usize,
    /// Values of a whole row.
    pub width: usize,
}

impl Columns {
    /// As heads: a row is a sequence of pieces that divide everything, which stand at a place among more of them.
    fn pieces(self, rows: usize) -> HeadShape {
        let gcd = |mut a: usize, mut b: usize| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        let dim = gcd(gcd(self.n, self.width), self.at).max(1);
        HeadShape {
            capacity: self.width / dim,
            at: self.at / dim,
            ..HeadShape::whole(rows, self.n / dim, 1, dim)
        }
    }

    /// Writes `from` `[rows, n]` to these columns of `to` `[rows, width]`.
    ///
    /// # Errors
    /// Buffers that are too short; errors of the device.
    pub fn put<O: LayerOps>(
        self,
        ops: &O,
        rows: usize,
        from: &O::Floats,
        to: &mut O::Floats,
    ) -> Result<()> {
        ops.rows_to_heads(from, to, self.pieces(rows))
    }

    /// Writes these columns of `from` `[rows, width]` to `to` `[rows, n]`.
    ///
    /// # Errors
    /// Buffers that are too short; errors of the device.
    pub fn take<O: LayerOps>(
        self,
        ops: &O,
        rows: usize,
        from: &O::Floats,
        to: &mut O::Floats,
    ) -> Result<()> {
        ops.heads_to_rows(from, to, self.pieces(rows))
    }
}

/// Multiplies `from` by each of the weights `w` into columns of `to` `[rows, outputs of all]`, one behind the other;
/// `part` has room for the outputs of one. A single weight has the rows of all.
///
/// # Errors
/// Buffers that are too short; errors of the device.
pub fn multiply_beside<O: LayerOps, M: Load<O>>(
    (ops, c): (&O, &ModelConfig),
    w: &Packed<Vec<M>>,
    rows: usize,
    (from, to): (&O::Floats, &mut O::Floats),
    part: &mut O::Floats,
    scratch: &mut O::Floats,
) -> Result<()> {
    let dims: Vec<Dims> = w.spec.linears.iter().map(|l| l.dims(c)).collect();
    let width = dims.iter().map(|d| d.rows).sum();
    let inputs = dims.first().map_or(0, |d| d.cols);
    if let [all] = &w.linear[..] {
        let product = Gemm::linear(rows, width, inputs);
        return ops.gemm(product, from, all.load(ops, scratch)?, to);
    }
    let mut at = 0;
    for (weight, Dims { rows: n, .. }) in w.linear.iter().zip(dims) {
        let product = Gemm::linear(rows, n, inputs);
        ops.gemm(product, from, weight.load(ops, scratch)?, part)?;
        Columns { at, n, width }.put(ops, rows, part, to)?;
        at += n;
    }
    Ok(())
}

/// How queries, keys and gates follow from products of whole Linears, where those are not what kernels take.
pub struct WholeHeads<O: Allocate> {
    turn: O::Floats, // [dim, dim]: row i is a one where value i of a turned head stands in weights
    dim: usize,
    gated: bool,
}

/// Products and what follows from them: queries with their gates, queries, and gates.
pub struct SplitQueries<'a, F> {
    /// `[rows, q_dim + gate_dim]`
    pub whole: &'a mut F,
    /// `[rows, q_dim]`, in the order of weights.
    pub ordered: &'a mut F,
    /// `[rows, q_dim]`, in the order in which heads are turned.
    pub turned: &'a mut F,
    /// `[rows, gate_dim]`
    pub gates: &'a mut F,
}

impl<O: Allocate> WholeHeads<O> {
    /// Those of a model of shape `c`; `None` if its Linears give what kernels take.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(ops: &O, c: &ModelConfig) -> Result<Option<Self>> {
        let (order, dim, gated) = (Turned::new(c), c.head_dim, c.gate_dim() > 0);
        if order.is_weights() && !gated {
            return Ok(None);
        }
        let mut ones = vec![0.0; dim * dim];
        (0..dim).for_each(|i| ones[i * dim + order.source(i)] = 1.0);
        let mut turn = ops.floats("the order of heads", dim * dim)?;
        ops.write(&mut turn, &ones)?;
        Ok(Some(WholeHeads { turn, dim, gated }))
    }
}

impl<O: LayerOps> WholeHeads<O> {
    fn queries(&self, gates: bool) -> Columns {
        Columns {
            at: if gates { self.dim } else { 0 },
            n: self.dim,
            width: if self.gated { 2 * self.dim } else { self.dim },
        }
    }

    /// Puts `heads` heads into the order in which they are turned.
    ///
    /// # Errors
    /// Buffers that are too short; errors of the device.
    pub fn turn(&self, ops: &O, heads: usize, from: &O::Floats, to: &mut O::Floats) -> Result<()> {
        ops.gemm(
            Gemm::linear(heads, self.dim, self.dim),
            from,
            &self.turn,
            to,
        )
    }

    /// The gradient of [`WholeHeads::turn`].
    ///
    /// # Errors
    /// Buffers that are too short; errors of the device.
    pub fn turn_grad(
        &self,
        ops: &O,
        heads: usize,
        from: &O::Floats,
        to: &mut O::Floats,
    ) -> Result<()> {
        let product = Gemm::input_grad(heads, self.dim, self.dim);
        ops.gemm(product, from, &self.turn, to)
    }

    /// Splits `whole` of `heads` heads (of all rows), and turns the queries.
    ///
    /// # Errors
    /// Buffers that are too short; errors of the device.
    pub fn split(&self, ops: &O, heads: usize, q: SplitQueries<'_, O::Floats>) -> Result<()> {
        self.queries(false).take(ops, heads, q.whole, q.ordered)?;
        if self.gated {
            self.queries(true).take(ops, heads, q.whole, q.gates)?;
        }
        self.turn(ops, heads, q.ordered, q.turned)
    }

    /// The gradient of [`WholeHeads::split`]: from those at `turned` and `gates` that at `whole`.
    ///
    /// # Errors
    /// Buffers that are too short; errors of the device.
    pub fn split_grad(&self, ops: &O, heads: usize, q: SplitQueries<'_, O::Floats>) -> Result<()> {
        self.turn_grad(ops, heads, q.turned, q.ordered)?;
        self.queries(false).put(ops, heads, q.ordered, q.whole)?;
        if self.gated {
            self.queries(true).put(ops, heads, q.gates, q.whole)?;
        }
        Ok(())
    }
}
