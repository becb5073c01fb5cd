//! Gated DeltaNets over whole sequences, by the kernels that run rows of prompts.

use super::CudaOps;
use crate::delta::{DeltaRows, DeltaSpan, DeltaVectors, DeviceStates, StatesShape};
use crate::driver::{Buffer, Checked};
use crate::prefill::SequenceRows;
use crate::rows::{Places, Row, RowsOut};
use nq_kernels::Result;
use nq_kernels::grad::{DELTA_CHUNK, DELTA_CHUNK_VALUES, DeltaInputs, DeltaWork};
use std::sync::PoisonError;

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
}
