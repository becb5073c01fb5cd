//! A layer in the form that the kernel of all layers runs.

use crate::attention::{Heads, LayerPages};
use crate::delta::{DeltaVectors, LayerStates};
use crate::driver::Buffer;
use crate::half_rows::HalfRows;
use crate::linear::DeviceLinear;

/// A layer in the form that [`Stream::step_layers`](crate::Stream::step_layers) runs.
pub struct StepLayer<'a> {
    /// Gain of the first norm, `[hidden]`.
    pub norm: &'a Buffer<f32>,
    /// What the first norm feeds.
    pub mixer: StepMixer<'a>,
    /// `[hidden, q_dim]`, or `[hidden, values]` of a recurrence.
    pub o: &'a DeviceLinear,
    /// Gain of the second norm, `[hidden]`.
    pub mlp_norm: &'a Buffer<f32>,
    /// The router of a mixture, `[experts, hidden]`; `None`: an MLP. Where there is a shared expert, it is the last.
    pub router: Option<&'a HalfRows>,
    /// Gate and up `[2 intermediate, hidden]`, interleaved; of a mixture those of all experts.
    pub gate_up: &'a DeviceLinear,
    /// `[hidden, intermediate]`; of a mixture those of all experts.
    pub down: &'a DeviceLinear,
}

/// What exchanges values between positions in a [`StepLayer`].
pub enum StepMixer<'a> {
    /// Attention.
    Attention {
        /// Queries, of wide heads with their gates, keys and values, from `hidden` inputs.
        qkv: &'a DeviceLinear,
        /// Other parameters.
        heads: Heads<'a>,
        /// Cache of keys and values; of wide heads in FP16.
        cache: LayerPages<'a>,
    },
    /// A gated DeltaNet, in models whose attention has wide heads.
    Recurrence {
        /// `[channels + values, hidden]`
        inputs: &'a DeviceLinear,
        /// `b` and `a`.
        rates: &'a HalfRows,
        /// Other parameters.
        vectors: DeltaVectors<'a>,
        /// The states of sequences.
        states: LayerStates<'a>,
    },
}
