//! Operands of a gated DeltaNet over whole sequences, and the memory that it takes.

use super::Allocate;
use crate::delta::DeltaShape;
use crate::error::Result;

/// Rows of a chunk of a gated DeltaNet on a GPU: `CHUNK` of `cuda/delta_rows.cu`.
pub const DELTA_CHUNK: usize = 16;
/// What is computed of each value head of a chunk: `sizeof(ChunkParts)` of `cuda/delta_rows.cu`, in f32 values.
pub const DELTA_CHUNK_VALUES: usize = 2 * DELTA_CHUNK * DELTA_CHUNK + 4 * DELTA_CHUNK;
/// Inputs of the convolution that a GPU keeps of a sequence: `INPUTS` of `cuda/delta_state.cuh`.
pub const DELTA_INPUTS: usize = 20;

/// The operands of [`LayerOps::delta`](super::LayerOps::delta): a gated DeltaNet over `batch` whole sequences of `seq` tokens.
pub struct DeltaInputs<'a, F> {
    /// Its shape.
    pub shape: DeltaShape,
    /// Number of sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Products `[rows, channels + values]`: queries, keys and values, and the gate `z` of the output.
    pub qkvz: &'a F,
    /// Products `[rows, 2 value_heads]`: `b`, of which beta is the sigmoid, and `a`, which sets the decay.
    pub ba: &'a F,
    /// Weights of the convolution `[channels, conv]`, that of the current token last.
    pub conv: &'a F,
    /// Rates of decay, negated: `[value_heads]`.
    pub decay: &'a F,
    /// Added to the projection `a`: `[value_heads]`.
    pub dt_bias: &'a F,
    /// Gains of the norm of each head's output `[value_dim]`.
    pub norm: &'a F,
    /// Epsilon of that norm.
    pub eps: f32,
}

impl<F> Clone for DeltaInputs<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for DeltaInputs<'_, F> {}

impl<F> DeltaInputs<'_, F> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }
}

/// Memory in which [`LayerOps::delta`](super::LayerOps::delta) works.
pub struct DeltaWork<F> {
    /// `[rows, channels]`: queries, keys and values after the convolution.
    pub mixed: F,
    /// What does not depend on states, of some chunks.
    pub chunks: F,
    /// `[rows, values]`: what the recurrence gives.
    pub scanned: F,
}

impl<F> DeltaWork<F> {
    /// Allocates it for `batch` sequences of `seq` tokens, or for more but shorter ones of as many tokens together.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(
        ops: &impl Allocate<Floats = F>,
        shape: &DeltaShape,
        (batch, seq): (usize, usize),
    ) -> Result<Self> {
        let floats = |n: usize| ops.floats("work of a recurrence", n);
        let (rows, chunks) = (batch * seq, batch * seq.div_ceil(DELTA_CHUNK));
        Ok(DeltaWork {
            mixed: floats(rows * shape.channels())?,
            chunks: floats(chunks * shape.value_heads * DELTA_CHUNK_VALUES)?,
            scanned: floats(rows * shape.values())?,
        })
    }
}

/// Bytes of a state, which a GPU allocates for itself when [`LayerOps::delta`](super::LayerOps::delta) is first called.
pub fn delta_state_bytes(shape: &DeltaShape) -> usize {
    let matrices = shape.values() * shape.key_dim;
    size_of::<f32>() * (matrices + DELTA_INPUTS * shape.channels())
}

/// Which token [`GradOps::delta_step`](super::GradOps::delta_step) runs, of which layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaStepAt {
    /// The layer, counted among those with a recurrence.
    pub layer: usize,
    /// The token's position in its sequence; at 0 states begin with zeros.
    pub position: usize,
}

/// Where [`GradOps::delta_grad`](super::GradOps::delta_grad) writes gradients at [`DeltaInputs`].
pub struct DeltaGrads<'a, F> {
    /// `[rows, channels + values]`: at the products `qkvz`.
    pub qkvz: &'a mut F,
    /// `[rows, 2 value_heads]`: at `b` and `a`.
    pub ba: &'a mut F,
}

/// Rows of a sequence between two states that the backward of a gated DeltaNet keeps on a GPU: `SEGMENT` of
/// `cuda/grad_delta.cu`.
pub const DELTA_SEGMENT: usize = 16;
/// Most sequences whose states the backward keeps at once.
const DELTA_TOGETHER: usize = 8;

/// Memory in which [`GradOps::delta_grad`](super::GradOps::delta_grad) works, besides [`DeltaWork`].
pub struct DeltaGradWork<F> {
    /// `[rows, values]`: what tokens write to states, before beta.
    pub deltas: F,
    /// `[rows, 2, values]`: gradients at queries and keys, by head of values.
    pub by_head: F,
    /// `[rows, 3 key_heads]`: what made queries and keys as long as they are, and their products.
    pub lengths: F,
    /// `[sequences, value_heads, segments, key_dim, value_dim]`: states in front of segments.
    pub states: F,
}

impl<F> DeltaGradWork<F> {
    /// Allocates it for `batch` sequences of `seq` tokens.
    ///
    /// # Errors
    /// If the device has not enough memory.
    pub fn new(
        ops: &impl Allocate<Floats = F>,
        shape: &DeltaShape,
        (batch, seq): (usize, usize),
    ) -> Result<Self> {
        let floats = |n: usize| ops.floats("work of a recurrence's gradient", n);
        let rows = batch * seq;
        let segments = batch.min(DELTA_TOGETHER) * seq.div_ceil(DELTA_SEGMENT);
        Ok(DeltaGradWork {
            deltas: floats(rows * shape.values())?,
            by_head: floats(rows * 2 * shape.value_heads * shape.key_dim)?,
            lengths: floats(rows * 3 * shape.key_heads)?,
            states: floats(segments * shape.values() * shape.key_dim)?,
        })
    }
}
