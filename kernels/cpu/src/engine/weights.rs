//! The weights of a layer on the CPU.

use crate::{DeltaVectors, Linear};
use nq_model::OutputGate;
use nq_model::forward::{self, Delta};

/// The weights of a layer, repacked for this CPU.
pub(crate) type CpuLayer = forward::Layer<Linear, Vec<f32>>;

/// The vectors of a recurrence.
pub(super) fn delta_vectors(delta: &Delta<Linear, Vec<f32>>, gate: OutputGate) -> DeltaVectors<'_> {
    let vectors = &delta.vectors;
    DeltaVectors {
        conv: &vectors.conv,
        decay: &vectors.decay,
        dt_bias: &vectors.dt_bias,
        norm: &vectors.norm,
        gate,
    }
}
