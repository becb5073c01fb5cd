//! The head in f32: from the residual stream to logits.

use super::dense::Dense;
use nq_formats::{Tensor, Weight};
use nq_kernels::Account;
use nq_kernels::grad::{Allocate, Gemm, LayerOps};
use nq_model::{Dims, ModelConfig};
use nq_runtime::Result;
use nq_runtime::stepper::Head;
use std::sync::Arc;

/// Counts on an account the head and the buffers for `rows` rows of its input.
///
/// # Errors
/// Never, as an account has no limit.
pub fn hold_head(account: &Account, c: &ModelConfig, rows: usize) -> Result<impl Sized> {
    let weight = account.floats("head", c.vocab_size * c.hidden_size)?;
    let gains = account.floats("norm", c.hidden_size)?;
    let room = HeadRoom::new(account, Dims::new(c.vocab_size, c.hidden_size), rows)?;
    Ok((weight, gains, room))
}

/// Buffers for up to `rows` rows at the head.
struct HeadRoom<O: Allocate> {
    x: O::Floats,      // [rows, hidden]
    normed: O::Floats, // [rows, hidden]
    inv: O::Floats,    // [rows]
    logits: O::Floats, // [rows, vocab]
}

impl<O: Allocate> HeadRoom<O> {
    fn new(ops: &O, dims: Dims, rows: usize) -> Result<Self> {
        let floats = |n: usize| ops.floats("logits", rows * n);
        Ok(HeadRoom {
            x: floats(dims.cols)?,
            normed: floats(dims.cols)?,
            inv: floats(1)?,
            logits: floats(dims.rows)?,
        })
    }
}

/// The head's product and the norm before it, on the device of `ops`.
pub(super) struct OpsHead<O: LayerOps> {
    ops: Arc<O>,
    weight: Dense<O>, // [vocab, hidden]
    gains: Dense<O>,  // [hidden]
    room: HeadRoom<O>,
    host: Vec<f32>, // [rows, vocab]
    shape: Dims,    // of the weight
    eps: f32,
}

impl<O: LayerOps> OpsHead<O> {
    /// Uploads the gains of `norm` `[hidden]` and `head` `[vocab, hidden]`, with buffers for `rows` rows.
    pub(super) fn new(
        ops: Arc<O>,
        norm: &Tensor,
        head: &Weight,
        rows: usize,
        eps: f32,
    ) -> Result<Self> {
        Ok(OpsHead {
            weight: Dense::matrix(ops.as_ref(), "head", head)?,
            gains: Dense::vector(ops.as_ref(), &norm.to_f32()?)?,
            room: HeadRoom::new(ops.as_ref(), head.dims(), rows)?,
            host: Vec::new(),
            shape: head.dims(),
            eps,
            ops,
        })
    }
}

impl<O: LayerOps + Send + Sync> Head for OpsHead<O>
where
    O::Floats: Send,
{
    fn logits(&mut self, x: &[f32]) -> Result<&[f32]> {
        let (ops, (vocab, hidden)) = (self.ops.as_ref(), self.shape.pair());
        let rows = x.len() / hidden.max(1);
        self.host.resize(rows * vocab, 0.0);
        if rows > 0 {
            let (room, shape) = (&mut self.room, Dims::new(rows, hidden));
            let (gains, normed, inv) = (&self.gains.0, &mut room.normed, &mut room.inv);
            ops.write(&mut room.x, x)?;
            ops.rms_norm(&room.x, gains, normed, inv, shape, self.eps)?;
            let product = Gemm::linear(rows, vocab, hidden);
            ops.gemm(product, normed, &self.weight.0, &mut room.logits)?;
            ops.read(&room.logits, &mut self.host)?;
        }
        Ok(&self.host)
    }
}
