//! Attention over whole sequences as batches of products, forward and backward.

use super::Tape;
use nq_kernels::grad::{Gemm, LayerOps};
use nq_model::ModelConfig;
use nq_runtime::Result;

/// The products of attention over all key heads of a batch: queries `[group * seq, dim]`
/// against keys and values `[seq, dim]`.
pub struct AttentionProducts {
    /// Scores, from queries and keys.
    pub scores: Gemm,
    /// Outputs, from attention weights and values.
    pub values: Gemm,
    /// The gradient of the values.
    pub values_grad: Gemm,
    /// The gradient of the attention weights.
    pub weights_grad: Gemm,
    /// The gradient of the queries.
    pub queries_grad: Gemm,
    /// The gradient of the keys.
    pub keys_grad: Gemm,
}

impl AttentionProducts {
    /// The products over `batch` sequences of `seq` tokens.
    pub fn of(c: &ModelConfig, batch: usize, seq: usize) -> Self {
        let (m, dim) = (
            c.num_attention_heads / c.num_key_value_heads * seq,
            c.head_dim,
        );
        let scale = 1.0 / (dim as f32).sqrt();
        let product = |(m, n, k), ta, tb, alpha| Gemm {
            m,
            n,
            k,
            batch: batch * c.num_key_value_heads,
            ta,
            tb,
            alpha,
            accumulate: false,
        };
        AttentionProducts {
            scores: product((m, seq, dim), false, true, scale),
            values: product((m, dim, seq), false, false, 1.0),
            values_grad: product((seq, dim, m), true, false, 1.0),
            weights_grad: product((m, seq, dim), false, true, 1.0),
            queries_grad: product((m, dim, seq), false, false, scale),
            keys_grad: product((seq, dim, m), true, false, scale),
        }
    }
}

/// Computes into `p` `[batch, heads, seq, seq]` the softmax of the scores of all queries on `tape` against the keys up to
/// each.
///
/// # Errors
/// Buffers that are too short; errors of the device.
pub fn attention_weights<O: LayerOps>(
    ops: &O,
    c: &ModelConfig,
    batch: usize,
    seq: usize,
    tape: &Tape<O>,
    p: &mut O::Floats,
) -> Result<()> {
    ops.gemm(
        AttentionProducts::of(c, batch, seq).scores,
        &tape.qh,
        &tape.kh,
        p,
    )?;
    let rows = batch * seq * c.num_attention_heads;
    Ok(ops.causal_softmax(p, rows, seq)?)
}
