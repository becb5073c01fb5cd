//! Gated DeltaNets: the kernels of a recurrence, and what they are bound to.

use crate::gpu::Binding::{self, Read, Uniform, Write};
use crate::gpu::{Gpu, Grid, Kernel, LaunchPass};
use crate::source::KernelSource;
use nq_kernels::DeltaShape;
use nq_model::{Dims, OutputGate};
use nq_runtime::Result;
use std::sync::Arc;
use wgpu::BindGroup;

/// What all of its kernels are bound to.
pub(crate) const DELTA: [Binding; 8] = [Uniform, Read, Read, Read, Read, Write, Write, Write];

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

    /// The convolution of prompts, with a workgroup for each row and head of queries, keys and values.
    pub(crate) fn convolution(&self) -> KernelSource {
        self.kernel("CONV_HEADS")
    }

    /// The gates of prompts, with a workgroup for each row and head of values.
    pub(crate) fn gates(&self) -> KernelSource {
        self.kernel("GATE")
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

/// The kernels of a model's recurrences.
pub(crate) struct RecurrenceKernels {
    recurrence: Recurrence,
    step: Arc<Kernel>,
    convolution: Arc<Kernel>,
    states: Arc<Kernel>,
    gates: Arc<Kernel>,
}

impl RecurrenceKernels {
    /// Compiles them.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device) if the driver refuses one.
    pub(crate) fn new(gpu: &Gpu, recurrence: Recurrence) -> Result<Self> {
        let kernel = |source: &KernelSource| gpu.kernel(source, &DELTA);
        Ok(RecurrenceKernels {
            step: kernel(&recurrence.states(gpu.lanes, true))?,
            convolution: kernel(&recurrence.convolution())?,
            states: kernel(&recurrence.states(gpu.lanes, false))?,
            gates: kernel(&recurrence.gates())?,
            recurrence,
        })
    }

    /// Adds a layer's recurrence over `rows` rows of `sequences` sequences: one launch where each has one row.
    pub(crate) fn launch(
        &self,
        bound: &BindGroup,
        pass: &mut LaunchPass<'_>,
        rows: usize,
        sequences: usize,
    ) {
        let shape = &self.recurrence.shape;
        let dims = Dims::new(shape.value_heads, shape.value_dim);
        // States are read and written.
        let bytes = 8 * sequences * state_len(shape);
        if rows == sequences {
            pass.launch(&self.step, bound, Grid::new(rows, shape.value_heads));
            return pass.ends(("delta", "step", dims), bytes);
        }
        let heads = 2 * shape.key_heads + shape.value_heads;
        pass.launch(&self.convolution, bound, Grid::new(rows, heads));
        let blocks = shape.value_dim / self.recurrence.columns(false);
        let grid = Grid::new(sequences, shape.value_heads * blocks);
        pass.launch(&self.states, bound, grid);
        pass.launch(&self.gates, bound, Grid::new(rows, shape.value_heads));
        pass.ends(("delta", "prompt", dims), bytes);
    }
}
