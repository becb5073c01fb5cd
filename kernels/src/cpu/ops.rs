//! The operations of a layer besides the Linear.

use super::{Cpu, KvBlock};
use crate::reference;

/// Consecutive new tokens of one sequence within a batch's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row in the batch.
    pub row: usize,
    /// Rows.
    pub len: usize,
    /// Position of the first row in its sequence.
    pub position: usize,
}

impl Cpu {
    /// RMSNorm of each row of `x` `[m, n]` with `weight` `[n]` into `y` `[m, n]`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let n = weight.len();
        self.team().run_chunks(y, n, |i, y| {
            reference::rms_norm(&x[i * n..(i + 1) * n], weight, eps, y);
        });
    }

    /// Per-head RMSNorm (`weight` `[head_dim]`), then rotary embedding, of `heads`
    /// consecutive heads that start at column `start` of each row of `x` `[m, stride]`,
    /// in place. `cos_sin` is `[positions, head_dim / 2]`, `positions[i]` the position of
    /// row `i`.
    #[allow(
        clippy::too_many_arguments,
        reason = "one flat description of a strided view"
    )]
    pub fn qk_norm_rope(
        &self,
        x: &mut [f32],
        stride: usize,
        start: usize,
        heads: usize,
        weight: &[f32],
        eps: f32,
        cos_sin: &[(f32, f32)],
        positions: &[usize],
    ) {
        let d = weight.len();
        self.team().run_chunks(x, stride, |i, row| {
            let table = &cos_sin[positions[i] * d / 2..(positions[i] + 1) * d / 2];
            let mut normed = vec![0.0; d];
            for head in row[start..start + heads * d].chunks_exact_mut(d) {
                reference::rms_norm(head, weight, eps, &mut normed);
                head.copy_from_slice(&normed);
                reference::rope(head, table);
            }
        });
    }

    /// Causal attention of one sequence's new tokens over its cache, which already holds
    /// their keys and values. Row `r` of `qkv` `[m, stride]` starts with the query heads;
    /// output `y` is `[m, heads * head_dim]`. Scores are scaled by `1/sqrt(head_dim)`.
    #[allow(
        clippy::too_many_arguments,
        reason = "one flat description of a strided view"
    )]
    pub fn attention(
        &self,
        qkv: &[f32],
        stride: usize,
        span: Span,
        heads: usize,
        head_dim: usize,
        keys: &KvBlock,
        values: &KvBlock,
        y: &mut [f32],
    ) {
        let d = head_dim;
        let group = heads / keys.kv_heads();
        let rows = &mut y[span.row * heads * d..(span.row + span.len) * heads * d];
        self.team().run_chunks(rows, d, |i, y| {
            let (row, head) = (i / heads, i % heads);
            let len = span.position + row + 1;
            let (mut k, mut v) = (vec![0.0; len * d], vec![0.0; len * d]);
            for (p, (k, v)) in k.chunks_exact_mut(d).zip(v.chunks_exact_mut(d)).enumerate() {
                keys.load(head / group, p, k);
                values.load(head / group, p, v);
            }
            let at = (span.row + row) * stride + head * d;
            reference::attend(&qkv[at..at + d], &k, &v, y);
        });
    }
}
