//! Gated DeltaNets: the kernels of a recurrence, and what they are bound to.

use crate::gpu::{BoundKernel, Gpu, Grid, LaunchPass};
use crate::source::KernelSource;
use nq_kernels::DeltaShape;
use nq_model::{Dims, OutputGate};
use nq_runtime::Result;
use wgpu::Buffer;

/// Columns of a head's state that a workgroup brings through the rows of a prompt: a fourth of them in published models,
/// so that there are as many workgroups as a large GPU runs at once.
const COLUMNS: usize = 32;

/// Most invocations that share a column: as many lanes as every subgroup that is used has.
const MOST_PARTS: usize = 8;

/// Widest head of keys or values: `delta.wgsl` has an invocation for each four values of one.
pub(crate) const WIDEST: usize = 256;

/// A recurrence of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recurrence {
    pub(crate) shape: DeltaShape,
    /// The function of `z` that outputs are multiplied by.
    pub(crate) gate: OutputGate,
    pub(crate) eps: f32,
}

/// Values of a sequence's state in a layer: matrices, and inputs of the convolution.
pub(crate) fn state_len(shape: &DeltaShape) -> usize {
    shape.values() * shape.key_dim + shape.conv * shape.channels()
}

/// The vectors of a layer as its kernels read them: taps `[conv, channels]`, gains, rates of decay, biases of `a`.
pub(crate) fn vectors(shape: &DeltaShape, parts: [&[f32]; 4]) -> Vec<f32> {
    let [taps, gains, decay, bias] = parts;
    let of_tap = |tap: usize| taps.iter().skip(tap).step_by(shape.conv).copied();
    let mut all: Vec<f32> = (0..shape.conv).flat_map(of_tap).collect();
    all.extend([gains, decay, bias].concat());
    // Read as vectors of four.
    all.resize(all.len().next_multiple_of(4), 0.0);
    all
}

impl Recurrence {
    fn kernel(&self, stage: &'static str) -> KernelSource {
        let shape = &self.shape;
        KernelSource::new(&[include_str!("wgsl/delta.wgsl")])
            .with("KEY_HEADS", shape.key_heads)
            .with("VALUE_HEADS", shape.value_heads)
            .with("KEY_DIM", shape.key_dim)
            .with("VALUE_DIM", shape.value_dim)
            .with("CONV", shape.conv)
            .with_float("QUERY_LENGTH", 1.0 / (shape.key_dim as f32).sqrt())
            .with_float("UNIT_EPS", 1e-6)
            .with_float("EPS", self.eps)
            .flag("TILED", shape.tiled)
            .flag("SIGMOID", self.gate == OutputGate::Sigmoid)
            .flag(stage, true)
    }

    /// The recurrence of sequences of several rows, or of one row each with what the other two kernels do.
    pub(crate) fn states(&self, lanes: Option<usize>, step: bool) -> KernelSource {
        let columns = self.columns(step);
        // Neighbours divide the quads of a key evenly.
        let most = (256 / columns).clamp(1, MOST_PARTS);
        let quads = self.shape.key_dim / 4;
        let parts = (0..4)
            .map(|n| 1 << n)
            .filter(|p| p <= &most && quads.is_multiple_of(*p));
        let parts = parts.max().unwrap_or(1);
        let lanes = lanes.filter(|lanes| (columns * parts).is_multiple_of(*lanes));
        (self.kernel("RECUR").flag("STEP", step))
            .flag("SUBGROUPS", lanes.is_some())
            .with("LANES", lanes.unwrap_or(1))
            .with("COLUMNS", columns)
            .with("PARTS", parts)
            .with("PER_PART", quads / parts)
    }

    /// Columns of a head that a workgroup has.
    fn columns(&self, step: bool) -> usize {
        let width = self.shape.value_dim;
        match !step && width.is_multiple_of(COLUMNS) {
            true => COLUMNS,
            false => width,
        }
    }
}

/// The recurrence of a layer, in a session.
pub(crate) struct RecurrenceOp {
    recurrence: Recurrence,
    step: BoundKernel,
    /// Of prompts: the convolution, the recurrence and the gates.
    prompt: [BoundKernel; 3],
}

impl RecurrenceOp {
    /// Binds its kernels to the buffers that `delta.wgsl` names.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device) if the driver refuses one.
    pub(crate) fn new(gpu: &Gpu, recurrence: Recurrence, buffers: [&Buffer; 8]) -> Result<Self> {
        let bound = |source: &KernelSource| gpu.bound(source, &buffers);
        Ok(RecurrenceOp {
            step: bound(&recurrence.states(gpu.lanes, true))?,
            prompt: [
                bound(&recurrence.kernel("CONV_HEADS"))?,
                bound(&recurrence.states(gpu.lanes, false))?,
                bound(&recurrence.kernel("GATE"))?,
            ],
            recurrence,
        })
    }

    /// Adds the recurrence over `rows` rows of `sequences` sequences: one launch where each has one row.
    pub(crate) fn launch(&self, pass: &mut LaunchPass<'_>, rows: usize, sequences: usize) {
        let shape = &self.recurrence.shape;
        let dims = Dims::new(shape.value_heads, shape.value_dim);
        // States are read and written.
        let bytes = 8 * sequences * state_len(shape);
        if rows == sequences {
            self.step.launch(pass, Grid::new(rows, shape.value_heads));
            return pass.ends(("delta", "step", dims), bytes);
        }
        let [convolution, states, gates] = &self.prompt;
        let heads = 2 * shape.key_heads + shape.value_heads;
        convolution.launch(pass, Grid::new(rows, heads));
        let blocks = shape.value_dim / self.recurrence.columns(false);
        states.launch(pass, Grid::new(sequences, shape.value_heads * blocks));
        gates.launch(pass, Grid::new(rows, shape.value_heads));
        pass.ends(("delta", "prompt", dims), bytes);
    }
}
