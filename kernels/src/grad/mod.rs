//! Operations of a training step, forward and backward, over f32 buffers on a device.
//!
//! A graph written against [`GradOps`] runs on every device that implements it: `nq_f32::CpuOps`
//! and `nq_cuda::CudaOps`; on an [`Account`] of memory, memory is counted and nothing is computed. Matrices are row-major and contiguous.
//! Every reduction has a fixed order, so that a step gives the same bits each time on the
//! same device. The operations do not know the model: the caller decides what is multiplied.

mod delta;

pub use delta::{
    DELTA_CHUNK, DELTA_CHUNK_VALUES, DELTA_INPUTS, DELTA_SEGMENT, DeltaGradWork, DeltaGrads,
    DeltaInputs, DeltaStepAt, DeltaWork, delta_state_bytes,
};

use crate::account::{Account, Held};
use crate::delta::DeltaShape;
use crate::error::{Error, Result};
use crate::second_order::SecondOrder;
use nq_model::Dims;
use std::sync::Arc;

/// Most bytes that products take for themselves: on a GPU, sums of their parts, or cuBLAS's
/// workspace.
pub const SCRATCH: usize = 40 << 20;

/// `C[b] (+)= alpha op(A[b]) op(B[b])` for every `b` of a batch of contiguous matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Number of products.
    pub batch: usize,
    /// True if A is stored `[k, m]` rather than `[m, k]`.
    pub ta: bool,
    /// True if B is stored `[n, k]` rather than `[k, n]`.
    pub tb: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Adds to C instead of replacing it.
    pub accumulate: bool,
}

impl Gemm {
    /// `y [m, n] = x [m, k] W^T`, W stored `[n, k]`: a Linear.
    pub fn linear(m: usize, n: usize, k: usize) -> Self {
        Gemm {
            m,
            n,
            k,
            batch: 1,
            ta: false,
            tb: true,
            alpha: 1.0,
            accumulate: false,
        }
    }

    /// `dx [m, k] = dy [m, n] W`, W stored `[n, k]`: the gradient of a Linear's input.
    pub fn input_grad(m: usize, n: usize, k: usize) -> Self {
        Gemm {
            tb: false,
            ..Gemm::linear(m, k, n)
        }
    }

    /// `dW [n, k] = dy^T x`, from dy `[m, n]` and x `[m, k]`: the gradient of a Linear's weight.
    pub fn weight_grad(m: usize, n: usize, k: usize) -> Self {
        Gemm {
            ta: true,
            tb: false,
            ..Gemm::linear(n, k, m)
        }
    }

    /// The same product, added to the output.
    #[must_use]
    pub fn add(self) -> Self {
        Gemm {
            accumulate: true,
            ..self
        }
    }
}

/// Shape of heads of a batch of sequences, between rows `[batch * seq, heads * dim]` and head-major
/// `[batch, heads, capacity, dim]`, in which positions `at .. at + seq` are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Number of sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Number of heads.
    pub heads: usize,
    /// Width of a head, even.
    pub dim: usize,
    /// Number of positions on the head-major side.
    pub capacity: usize,
    /// Position of the first token on that side.
    pub at: usize,
    /// Position of the first token, for the rotation.
    pub position: usize,
}

impl HeadShape {
    /// The shape of whole sequences from position 0.
    pub fn whole(batch: usize, seq: usize, heads: usize, dim: usize) -> Self {
        HeadShape {
            batch,
            seq,
            heads,
            dim,
            capacity: seq,
            at: 0,
            position: 0,
        }
    }

    /// Number of rows on the token side.
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }

    /// Number of values on the token side.
    pub fn values(&self) -> usize {
        self.rows() * self.heads * self.dim
    }

    /// Number of values on the head-major side.
    pub fn room(&self) -> usize {
        self.batch * self.heads * self.capacity * self.dim
    }
}

/// A weight `[rows, cols]` rounded by groups of `group` consecutive columns: its value is
/// `f16(scale) * clamp(round(latent / f16(scale)), -zero, max - zero)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns; a whole number of groups.
    pub cols: usize,
    /// Columns that share a scale and a zero-point.
    pub group: usize,
    /// The greatest code.
    pub max_code: u8,
}

impl Rounding {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.rows * self.cols
    }

    /// Number of groups in the whole weight.
    pub fn groups(&self) -> usize {
        self.elements() / self.group.max(1)
    }

    /// An error unless each of `elements` has one value per element and each of `groups` one
    /// per group; both are (name, length).
    pub fn check<const E: usize, const G: usize>(
        self,
        op: &'static str,
        elements: [(&'static str, usize); E],
        groups: [(&'static str, usize); G],
    ) -> Result<()> {
        for (what, len) in elements {
            enough(op, what, self.elements(), len)?;
        }
        for (what, len) in groups {
            enough(op, what, self.groups(), len)?;
        }
        Ok(())
    }
}

/// One step of Adam (arXiv 1412.6980) at one learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Learning rate.
    pub rate: f32,
    /// Decay of the mean of gradients.
    pub beta1: f32,
    /// Decay of the mean of their squares.
    pub beta2: f32,
    /// `1 - beta1^t` for step `t`, counted from 1.
    pub correction1: f32,
    /// `1 - beta2^t`.
    pub correction2: f32,
    /// Keeps the step finite if a gradient is always zero.
    pub epsilon: f32,
}

impl Default for Adam {
    /// A step of rate 0 with the decays of [the paper](https://arxiv.org/abs/1412.6980).
    fn default() -> Self {
        Adam {
            rate: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            correction1: 1.0,
            correction2: 1.0,
            epsilon: 1e-8,
        }
    }
}

/// An id that tells [`GradOps::sample`] to draw a token instead of keeping the given one.
pub const UNKNOWN: u32 = u32::MAX;

/// Tokens in the order of their ids, so that the gradient of an embedding row is one sum in
/// a fixed order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Occurrences {
    /// Row numbers, sorted by token, then by row.
    pub rows: Vec<u32>,
    /// The distinct tokens, in ascending order.
    pub tokens: Vec<u32>,
    /// The start of each token's rows in `rows`, and the end.
    pub starts: Vec<u32>,
}

impl Occurrences {
    /// The occurrences in these tokens.
    pub fn new(tokens: &[u32]) -> Self {
        let mut rows: Vec<u32> = (0..tokens.len() as u32).collect();
        rows.sort_by_key(|&r| tokens[r as usize]);
        let mut result = Occurrences::default();
        for (i, &r) in rows.iter().enumerate() {
            let token = tokens[r as usize];
            if result.tokens.last() != Some(&token) {
                result.tokens.push(token);
                result.starts.push(i as u32);
            }
        }
        result.starts.push(rows.len() as u32);
        result.rows = rows;
        result
    }
}

/// Allocates memory: a device, or an [`Account`] that only counts, which shows what
/// constructors take.
///
/// # Errors
/// Errors of the device; [`Error::Shape`] for more values than a buffer holds.
pub trait Allocate {
    /// f32 values on the device.
    type Floats;
    /// u32 values on the device.
    type Ids;
    /// Bytes on the device.
    type Codes;
    /// States of recurrences of sequences that go on token by token.
    type States;

    /// Allocates `len` zeros; errors name `what`.
    fn floats(&self, what: &'static str, len: usize) -> Result<Self::Floats>;
    /// Allocates `len` zeros; errors name `what`.
    fn ids(&self, what: &'static str, len: usize) -> Result<Self::Ids>;
    /// Allocates `len` zeros; errors name `what`.
    fn codes(&self, what: &'static str, len: usize) -> Result<Self::Codes>;
    /// Allocates the states of `slots` sequences in `layers` layers. Besides the errors of [`Allocate`],
    /// [`Error::NoKernel`] for heads of widths that the device does not serve.
    fn states(&self, shape: DeltaShape, layers: usize, slots: usize) -> Result<Self::States>;
    /// Writes from the host, from index 0 on.
    fn write(&self, to: &mut Self::Floats, from: &[f32]) -> Result<()>;
}

impl Allocate for Account {
    type Floats = Held;
    type Ids = Held;
    type Codes = Held;
    type States = Held;

    fn floats(&self, _what: &'static str, len: usize) -> Result<Held> {
        Ok(self.hold(size_of::<f32>() * len))
    }

    fn ids(&self, _what: &'static str, len: usize) -> Result<Held> {
        Ok(self.hold(size_of::<u32>() * len))
    }

    fn codes(&self, _what: &'static str, len: usize) -> Result<Held> {
        Ok(self.hold(len))
    }

    fn states(&self, shape: DeltaShape, layers: usize, slots: usize) -> Result<Held> {
        let all = layers.saturating_mul(slots);
        Ok(self.hold(all.saturating_mul(delta_state_bytes(&shape))))
    }

    fn write(&self, _to: &mut Held, _from: &[f32]) -> Result<()> {
        Ok(())
    }
}

/// Memory of one device. Work may be queued; reads wait for it.
///
/// # Errors
/// Every operation returns [`Error::Shape`] for a buffer that is too short, and errors of the
/// device.
pub trait Buffers: Allocate {
    /// The device, for reports.
    fn device(&self) -> String;

    /// Writes `rows` rows of `cols` values, each filled by `fill`, which gets the row's number: on all
    /// cores, so that a large matrix needs no copy in host memory.
    fn rows<E: From<Error> + Send>(
        &self,
        what: &'static str,
        dims: Dims,
        fill: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Self::Floats, E>;
    /// Reads to the host, from index 0 on.
    fn read(&self, from: &Self::Floats, to: &mut [f32]) -> Result<()>;
    /// Writes codes from the host.
    fn write_codes(&self, to: &mut Self::Codes, from: &[u8]) -> Result<()>;
    /// Writes ids from the host.
    fn write_ids(&self, to: &mut Self::Ids, from: &[u32]) -> Result<()>;
    /// Reads ids to the host.
    fn read_ids(&self, from: &Self::Ids, to: &mut [u32]) -> Result<()>;
    /// Sets the first `n` values to zero.
    fn clear(&self, x: &mut Self::Floats, n: usize) -> Result<()>;
    /// Copies `n` values from index `from.1` on to index `to.1` on.
    fn copy(
        &self,
        from: (&Self::Floats, usize),
        to: (&mut Self::Floats, usize),
        n: usize,
    ) -> Result<()>;
}

/// The operations of a transformer layer, forward and backward. Buffers may be longer than an
/// operation needs.
pub trait LayerOps: Buffers {
    /// The rounding that uses second moments summed on the device; `None` if the host does
    /// that.
    fn second_order(self: &Arc<Self>) -> Option<Arc<dyn SecondOrder<Floats = Self::Floats>>> {
        None
    }

    /// A batch of products.
    fn gemm(&self, g: Gemm, a: &Self::Floats, b: &Self::Floats, c: &mut Self::Floats)
    -> Result<()>;

    /// `x[r]` = row `ids[r * stride + offset]` of `table` `[., width]`, for `rows` rows; `at` is
    /// `(rows, stride, offset)`.
    fn embed(
        &self,
        table: &Self::Floats,
        ids: &Self::Ids,
        at: (usize, usize, usize),
        x: &mut Self::Floats,
        width: usize,
    ) -> Result<()>;

    /// `table[token]` += the sum of the rows of `dx` where the token occurs.
    fn embed_grad(
        &self,
        dx: &Self::Floats,
        occurrences: &Occurrences,
        table: &mut Self::Floats,
        width: usize,
    ) -> Result<()>;

    /// RMSNorm of rows, `shape` = (rows, width): `y = x inv gain`, `inv = 1 / sqrt(mean(x^2) + eps)` kept.
    fn rms_norm(
        &self,
        x: &Self::Floats,
        gain: &Self::Floats,
        y: &mut Self::Floats,
        inv: &mut Self::Floats,
        shape: Dims,
        eps: f32,
    ) -> Result<()>;

    /// The gradient of [`LayerOps::rms_norm`]: added to `dx` if `add`, otherwise written; always added
    /// to `dgain`.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs, upstream and two outputs"
    )]
    fn rms_norm_grad(
        &self,
        x: &Self::Floats,
        gain: &Self::Floats,
        inv: &Self::Floats,
        dy: &Self::Floats,
        dx: &mut Self::Floats,
        add: bool,
        dgain: &mut Self::Floats,
        shape: Dims,
    ) -> Result<()>;

    /// RMSNorm of every head if there is a gain for it, then the rotation by its position (of halves, as in
    /// Qwen3), from rows to head-major. `cos_sin` is `[positions, dim / 2]` of (cos, sin) pairs, `inv`
    /// `[rows, heads]`.
    #[expect(clippy::too_many_arguments, reason = "inputs and two outputs")]
    fn head_norm_rope(
        &self,
        x: &Self::Floats,
        gain: Option<&Self::Floats>,
        cos_sin: &Self::Floats,
        y: &mut Self::Floats,
        inv: &mut Self::Floats,
        shape: HeadShape,
        eps: f32,
    ) -> Result<()>;

    /// The gradient of [`LayerOps::head_norm_rope`] without a norm for whole sequences: writes `dx`.
    fn head_rope_grad(
        &self,
        cos_sin: &Self::Floats,
        dy: &Self::Floats,
        dx: &mut Self::Floats,
        shape: HeadShape,
    ) -> Result<()>;

    /// The gradient of [`LayerOps::head_norm_rope`] with a norm for whole sequences: writes `dx` and
    /// adds to `dgain`.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs, upstream and two outputs"
    )]
    fn head_norm_rope_grad(
        &self,
        x: &Self::Floats,
        gain: &Self::Floats,
        cos_sin: &Self::Floats,
        inv: &Self::Floats,
        dy: &Self::Floats,
        dx: &mut Self::Floats,
        dgain: &mut Self::Floats,
        shape: HeadShape,
    ) -> Result<()>;

    /// Copies rows to head-major.
    fn rows_to_heads(&self, x: &Self::Floats, y: &mut Self::Floats, shape: HeadShape)
    -> Result<()>;
    /// Copies head-major to rows.
    fn heads_to_rows(&self, x: &Self::Floats, y: &mut Self::Floats, shape: HeadShape)
    -> Result<()>;

    /// Softmax, in place, of `rows` rows of `seq` scores; row `r` sees the first
    /// `r % seq + 1`, and the others become 0.
    fn causal_softmax(&self, s: &mut Self::Floats, rows: usize, seq: usize) -> Result<()>;

    /// Replaces `dp` by the gradient of the scores, `p (dp - sum(p dp))`.
    fn softmax_grad(
        &self,
        p: &Self::Floats,
        dp: &mut Self::Floats,
        rows: usize,
        seq: usize,
    ) -> Result<()>;

    /// `out = silu(gate) * up` for `n` values.
    fn silu_mul(
        &self,
        gate: &Self::Floats,
        up: &Self::Floats,
        out: &mut Self::Floats,
        n: usize,
    ) -> Result<()>;

    /// Multiplies each of the first `n` values of `x` by the sigmoid of its gate.
    fn gate(&self, gate: &Self::Floats, x: &mut Self::Floats, n: usize) -> Result<()>;

    /// Multiplies each row of `x` by the sigmoid of its score; `shape` = (rows, width).
    fn scale_rows(&self, scores: &Self::Floats, x: &mut Self::Floats, shape: Dims) -> Result<()>;

    /// A gated DeltaNet (formulas: [`Mixer::Delta`](nq_model::Mixer::Delta)) over whole sequences: `out`
    /// `[rows, values]` is each head's output after RMSNorm, times `silu(z)`. Besides the errors of [`Buffers`],
    /// [`Error::NoKernel`] for heads of widths that the device does not serve.
    fn delta(
        &self,
        inputs: DeltaInputs<'_, Self::Floats>,
        work: &mut DeltaWork<Self::Floats>,
        out: &mut Self::Floats,
    ) -> Result<()>;

    /// The gradients of [`LayerOps::silu_mul`], written in place of `gate` and `up`.
    fn silu_mul_grad(
        &self,
        gate: &mut Self::Floats,
        up: &mut Self::Floats,
        dout: &Self::Floats,
        n: usize,
    ) -> Result<()>;
}

/// The other operations of a training step: loss, rounding, Adam, and sampling of text.
pub trait GradOps: LayerOps {
    /// Writes the KL divergence of every row of logits from the teacher's, in nats, to `loss`; replaces
    /// `logits` by its gradient times `weight`.
    fn kl_divergence(
        &self,
        teacher: &Self::Floats,
        logits: &mut Self::Floats,
        loss: &mut Self::Floats,
        shape: Dims,
        weight: f32,
    ) -> Result<()>;

    /// The gradient of [`LayerOps::gate`]: from the gradient `dout` at the product those at the gates and at x, in place of
    /// `gate` and `dout`. `n` values each.
    fn gate_grad(
        &self,
        gate: &mut Self::Floats,
        x: &Self::Floats,
        dout: &mut Self::Floats,
        n: usize,
    ) -> Result<()>;

    /// As [`LayerOps::delta`], of the next token of every sequence (`inputs.seq` is 1), whose states go on.
    fn delta_step(
        &self,
        inputs: DeltaInputs<'_, Self::Floats>,
        states: &mut Self::States,
        at: DeltaStepAt,
        out: &mut Self::Floats,
    ) -> Result<()>;

    /// The gradient of [`LayerOps::delta`] from that at its output, `dout` `[rows, values]`. The convolution, rates of
    /// decay, biases and the norm's gains are taken as fixed.
    fn delta_grad(
        &self,
        inputs: DeltaInputs<'_, Self::Floats>,
        work: (
            &mut DeltaWork<Self::Floats>,
            &mut DeltaGradWork<Self::Floats>,
        ),
        dout: &Self::Floats,
        to: DeltaGrads<'_, Self::Floats>,
    ) -> Result<()>;

    /// The values of a rounded weight, from its latent values.
    fn round(
        &self,
        shape: Rounding,
        latent: &Self::Floats,
        scales: &Self::Floats,
        zeros: &Self::Floats,
        w: &mut Self::Floats,
    ) -> Result<()>;

    /// Adds the gradients that follow from `dw` to `dlatent` and `dscales`, straight through the
    /// rounding: a latent value within the codes' range gets the gradient of its weight; the scale
    /// gets that of `code` minus, within the range, `latent / scale` (arXiv 1902.08153).
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs, upstream and two outputs"
    )]
    fn round_grad(
        &self,
        shape: Rounding,
        latent: &Self::Floats,
        scales: &Self::Floats,
        zeros: &Self::Floats,
        dw: &Self::Floats,
        dlatent: &mut Self::Floats,
        dscales: &mut Self::Floats,
    ) -> Result<()>;

    /// The values of a weight with fixed codes: `f16(scale) * (code - zero)`.
    fn dequantize(
        &self,
        shape: Rounding,
        codes: &Self::Codes,
        scales: &Self::Floats,
        zeros: &Self::Floats,
        w: &mut Self::Floats,
    ) -> Result<()>;

    /// Adds `sum(dw (code - zero))` of each group to `dscales`.
    fn dequantize_grad(
        &self,
        shape: Rounding,
        codes: &Self::Codes,
        zeros: &Self::Floats,
        dw: &Self::Floats,
        dscales: &mut Self::Floats,
    ) -> Result<()>;

    /// Takes one step of Adam for `n` values and sets their gradient to zero.
    fn adam(
        &self,
        step: Adam,
        value: &mut Self::Floats,
        mean: &mut Self::Floats,
        square: &mut Self::Floats,
        grad: &mut Self::Floats,
        n: usize,
    ) -> Result<()>;

    /// Attention of one new token of every sequence: `q` `[batch, heads, dim]` over the first
    /// `seen` positions of `keys` and `values` `[batch, kv_heads, capacity, dim]`; the output has
    /// `q`'s shape.
    fn attend_one(
        &self,
        q: &Self::Floats,
        keys: &Self::Floats,
        values: &Self::Floats,
        out: &mut Self::Floats,
        shape: OneShape,
    ) -> Result<()>;

    /// Continues sequences: where `ids[b * stride + offset]` is [`UNKNOWN`], replaces it by a token drawn
    /// from the softmax of `logits[b]`. The draw uses Philox stream
    /// `stream + b` at counter `offset`.
    fn sample(&self, logits: &Self::Floats, ids: &mut Self::Ids, draw: Draw) -> Result<()>;
}

/// Work that any device for training steps can do.
pub trait GradWork {
    /// Result of the work.
    type Output;

    /// Does the work with `ops`.
    fn run<O: GradOps>(self, ops: &O) -> Self::Output;
}

/// Shape of [`GradOps::attend_one`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OneShape {
    /// Number of sequences.
    pub batch: usize,
    /// Number of query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub dim: usize,
    /// Number of positions in the cache.
    pub capacity: usize,
    /// Number of positions that are filled.
    pub seen: usize,
}

/// Shape and randomness of [`GradOps::sample`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Number of sequences.
    pub batch: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Ids per sequence.
    pub stride: usize,
    /// Index of the id to draw in each sequence.
    pub offset: usize,
    /// Seed of the generator.
    pub seed: u64,
    /// Stream of the first sequence.
    pub stream: u64,
}

/// An error unless there are at least `expected` values.
pub fn enough(op: &'static str, what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found >= expected {
        return Ok(());
    }
    Err(Error::Shape {
        op,
        what,
        expected: format!("at least {expected} values"),
        found: found.to_string(),
    })
}
