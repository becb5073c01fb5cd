//! Gated DeltaNets: over whole sequences by the kernels that run rows of prompts, token by token by that of steps, and
//! the gradients.

use super::{BENCH, CudaOps, TEST};
use crate::attention::AttentionOutput;
use crate::cuda::grad_delta::{GradDeltaArgs, KEYS, SEGMENT};
use crate::delta::{
    CONV, DELTA_DIM, DeltaRows, DeltaSpan, DeltaVectors, DeviceStates, Rates, StatesShape,
};
use crate::driver::{Buffer, Checked};
use crate::kernel::{Kernel, kernels};
use crate::prefill::SequenceRows;
use crate::rows::{Places, Row, RowsOut, Step, StepBounds};
use nq_kernels::grad::{
    DELTA_CHUNK, DELTA_CHUNK_VALUES, DELTA_SEGMENT, DeltaGradWork, DeltaGrads, DeltaInputs,
    DeltaStepAt, DeltaWork,
};
use nq_kernels::{Error, Result};
use std::sync::PoisonError;

const _: () = assert!(DELTA_SEGMENT == SEGMENT);
/// Threads of a block that has the matrix of a head.
const DELTA_THREADS: usize = DELTA_DIM * DELTA_DIM / KEYS;

kernels! {
    MIX: GradDeltaArgs = "grad_delta_mix" in "grad_delta.cu", test TEST, bench BENCH;
    SCAN: GradDeltaArgs = "grad_delta_scan" in "grad_delta.cu", test TEST, bench BENCH;
    OUTPUTS: GradDeltaArgs = "grad_delta_outputs" in "grad_delta.cu", test TEST, bench BENCH;
    BACK: GradDeltaArgs = "grad_delta_back" in "grad_delta.cu", test TEST, bench BENCH;
    UNMIX: GradDeltaArgs = "grad_delta_unmix" in "grad_delta.cu", test TEST, bench BENCH;
    UNCONV: GradDeltaArgs = "grad_delta_unconv" in "grad_delta.cu", test TEST, bench BENCH;
}

impl CudaOps {
    /// [`LayerOps::delta`](nq_kernels::grad::LayerOps::delta). Every sequence begins with zeros and nobody reads what it
    /// leaves, so all share one state.
    pub(super) fn run_delta(
        &self,
        inputs: DeltaInputs<'_, Buffer<f32>>,
        work: &mut DeltaWork<Buffer<f32>>,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        let (shape, seq, m) = (inputs.shape, inputs.seq, inputs.rows());
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let states = match &mut *state {
            Some((found, states)) if *found == shape => states,
            other => {
                let one = StatesShape {
                    delta: shape,
                    layers: 1,
                    places: 1,
                    kept: 0,
                };
                &mut other.insert((shape, DeviceStates::new(&self.gpu, one)?)).1
            }
        };
        let row = |i: usize| Row {
            position: (i % seq) as i32,
            ..Row::default()
        };
        let places = Places {
            positions: seq,
            slots: 1,
            images: 0,
        };
        let rows: Vec<Row> = (0..m).map(row).collect();
        let rows = Checked::upload(&self.gpu, "rows", &rows, places)?;
        let span = |sequence: usize| DeltaSpan {
            rows: SequenceRows {
                row: sequence * seq,
                count: seq,
                position: 0,
                slot: 0,
            },
            mark: None,
        };
        let spans: Vec<DeltaSpan> = (0..inputs.batch).map(span).collect();
        let vectors = DeltaVectors {
            gate: nq_model::OutputGate::Silu,
            conv: inputs.conv,
            decay: inputs.decay,
            dt_bias: inputs.dt_bias,
            norm: inputs.norm,
            eps: inputs.eps,
        };
        // Many short sequences have more chunks than there is room for: then only some go through the recurrence at a
        // time, and what is computed of all rows beside it is computed again.
        let each = seq.div_ceil(DELTA_CHUNK) * shape.value_heads * DELTA_CHUNK_VALUES;
        let together = (work.chunks.len() / each.max(1)).max(1);
        for some in spans.chunks(together) {
            let pass = DeltaRows {
                qkvz: inputs.qkvz,
                ba: inputs.ba,
                rows: &rows,
                mixed: &mut work.mixed,
                chunks: &mut work.chunks,
                scanned: &mut work.scanned,
            };
            let out = RowsOut {
                full: Some(&mut *out),
                half: None,
            };
            self.stream
                .delta_rows(pass, some, &vectors, states.layer(0), &out, m)?;
        }
        // The rows' places go with this function.
        self.synchronize()
    }

    /// [`GradOps::delta_step`](nq_kernels::grad::GradOps::delta_step).
    pub(super) fn run_delta_step(
        &self,
        inputs: DeltaInputs<'_, Buffer<f32>>,
        states: &DeviceStates,
        at: DeltaStepAt,
        out: &mut Buffer<f32>,
    ) -> Result<()> {
        let m = inputs.batch;
        let step = |slot: usize| Step {
            position: at.position as i32,
            slot: slot as i32,
            ..Step::default()
        };
        let bounds = StepBounds {
            places: Places {
                positions: at.position + 1,
                slots: m,
                images: 0,
            },
            tokens: 1,
        };
        let steps: Vec<Step> = (0..m).map(step).collect();
        let steps = Checked::upload(&self.gpu, "rows", &steps, bounds)?;
        let vectors = DeltaVectors {
            gate: nq_model::OutputGate::Silu,
            conv: inputs.conv,
            decay: inputs.decay,
            dt_bias: inputs.dt_bias,
            norm: inputs.norm,
            eps: inputs.eps,
        };
        let (qkvz, rates) = (inputs.qkvz, Rates::Products(inputs.ba));
        let (states, out) = (states.layer(at.layer), AttentionOutput::Full(out));
        // All of the slots count: none is idle.
        let idle = m;
        self.stream
            .delta_step(qkvz, rates, &steps, &vectors, states, out, m, idle, false)?;
        // The rows' places go with this function.
        self.synchronize()
    }

    /// [`GradOps::delta_grad`](nq_kernels::grad::GradOps::delta_grad).
    pub(super) fn run_delta_grad(
        &self,
        inputs: DeltaInputs<'_, Buffer<f32>>,
        (work, own): (&mut DeltaWork<Buffer<f32>>, &mut DeltaGradWork<Buffer<f32>>),
        dout: &Buffer<f32>,
        to: DeltaGrads<'_, Buffer<f32>>,
    ) -> Result<()> {
        let (s, rows, seq) = (inputs.shape, inputs.rows(), inputs.seq);
        if (s.key_dim, s.value_dim, s.conv) != (DELTA_DIM, DELTA_DIM, CONV) {
            return Err(Error::NoKernel {
                op: "the gradient of a gated DeltaNet",
                scheme: format!(
                    "heads of {} keys and {} values, a convolution of {}",
                    s.key_dim, s.value_dim, s.conv
                ),
                activations: "f32".into(),
                device: self.gpu.info().to_string(),
            });
        }
        let o = self.operands("delta_grad");
        let segments = seq.div_ceil(DELTA_SEGMENT);
        let each = s.value_heads * segments * DELTA_DIM * DELTA_DIM;
        let together = (own.states.len() / each.max(1)).clamp(1, inputs.batch.max(1));
        let args = GradDeltaArgs {
            conv: o.of("convolution", inputs.conv, &[s.channels(), CONV])?,
            decay: o.of("rates of decay", inputs.decay, &[s.value_heads])?,
            dt_bias: o.of("biases of time steps", inputs.dt_bias, &[s.value_heads])?,
            norm: o.of("gain of the output", inputs.norm, &[DELTA_DIM])?,
            qkvz: o.of("qkvz", inputs.qkvz, &[rows, s.stride()])?,
            ba: o.of("rates", inputs.ba, &[rows, 2 * s.value_heads])?,
            dout: o.of("gradient of the output", dout, &[rows, s.values()])?,
            dqkvz: o.of("gradient of qkvz", to.qkvz, &[rows, s.stride()])?,
            dba: o.of("gradient of rates", to.ba, &[rows, 2 * s.value_heads])?,
            mixed: o.of(
                "queries, keys and values",
                &work.mixed,
                &[rows, s.channels()],
            )?,
            scanned: o.of("outputs", &work.scanned, &[rows, s.values()])?,
            deltas: o.of("deltas", &own.deltas, &[rows, s.values()])?,
            by_head: o.of("gradients by head", &own.by_head, &[rows, 2, s.values()])?,
            lengths: o.of("lengths", &own.lengths, &[rows, 3 * s.key_heads])?,
            states: o.of("states", &own.states, &[together, each])?,
            key_heads: s.key_heads as i32,
            value_heads: s.value_heads as i32,
            tiled: i32::from(s.tiled),
            rows: rows as i32,
            seq: seq as i32,
            first: 0,
            sequences: inputs.batch as i32,
            eps: inputs.eps,
        };
        let by_row =
            |kernel: &'static Kernel<GradDeltaArgs>, heads: usize, some: &GradDeltaArgs| {
                let rows = some.sequences as usize * seq;
                // SAFETY: the operands were checked; each kernel takes the rows and heads that they have.
                unsafe { self.launch(kernel, [rows.div_ceil(8), heads, 1], 256, some) }
            };
        by_row(&MIX, s.key_heads + s.value_heads, &args)?;
        // The states in front of segments of as many sequences as there is room for.
        for first in (0..inputs.batch).step_by(together) {
            let sequences = together.min(inputs.batch - first);
            let some = GradDeltaArgs {
                first: first as i32,
                sequences: sequences as i32,
                ..args
            };
            let grid = [s.value_heads, sequences, 1];
            // SAFETY: as above, for these sequences.
            unsafe { self.launch(&SCAN, grid, DELTA_THREADS, &some)? };
            by_row(&OUTPUTS, s.value_heads, &some)?;
            // SAFETY: likewise.
            unsafe { self.launch(&BACK, grid, DELTA_THREADS, &some)? };
        }
        by_row(&UNMIX, 2 * s.key_heads + s.value_heads, &args)?;
        let grid = [rows, s.channels() / DELTA_DIM, 1];
        // SAFETY: a thread for each channel of each row.
        unsafe { self.launch(&UNCONV, grid, DELTA_DIM, &args) }
    }
}
