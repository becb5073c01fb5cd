//! Benches of gated DeltaNets, in the shapes of Qwen3.5 0.8B and 27B.

use super::timing::Timing;
use nq_cuda::{
    AttentionOutput, Checked, DeltaRows, DeltaSpan, DeltaVectors, DeviceStates, Places, Rates, Row,
    RowsOut, SequenceRows, StatesShape, Step, StepBounds,
};
use nq_kernels::{DeltaShape, Result};

/// Heads of keys and of values.
const SHAPES: [(&str, usize, usize); 2] = [("0.8B", 16, 16), ("27B", 16, 48)];
/// Layers used in turn, so that states come out of memory.
const LAYERS: usize = 12;

pub(crate) fn noise(n: usize) -> Vec<f32> {
    let value = |i: usize| (i.wrapping_mul(7919) % 10_007) as f32 / 5000.0 - 1.0;
    (0..n).map(value).collect()
}

pub(crate) fn delta(t: &mut Timing) -> Result<()> {
    const M: usize = 2048;
    for (name, key_heads, value_heads) in SHAPES {
        let shape = DeltaShape {
            key_heads,
            value_heads,
            key_dim: 128,
            value_dim: 128,
            conv: 4,
            tiled: false,
        };
        let slots = 64;
        let sizes = StatesShape {
            delta: shape,
            layers: LAYERS,
            places: slots + 1,
            kept: slots,
        };
        let mut states = DeviceStates::new(&t.gpu, sizes)?;
        let upload = |n: usize| t.gpu.upload("a benchmark", &noise(n));
        let decay = t.gpu.upload("a benchmark", &vec![-0.05; value_heads])?;
        let (conv, dt_bias) = (upload(shape.channels() * 4)?, upload(value_heads)?);
        let norm = upload(128)?;
        let vectors = || DeltaVectors {
            gate: nq_model::OutputGate::Silu,
            conv: &conv,
            decay: &decay,
            dt_bias: &dt_bias,
            norm: &norm,
            eps: 1e-6,
        };
        let qkvz = upload(M * (shape.channels() + shape.values()))?;
        let ba = upload(M * 2 * value_heads)?;
        let places = Places {
            positions: 4096,
            slots: slots + 1,
            images: 0,
        };
        let mut out = t.gpu.zeros("a benchmark", 64 * shape.values())?;
        // Of several sequences, and of one whose drafts are checked.
        for (m, run) in [(1, 0), (16, 0), (64, 0), (2, 1), (4, 1), (8, 1)] {
            let steps: Vec<Step> = (0..m)
                .map(|row| Step {
                    position: 100 + row * run,
                    slot: row * (1 - run),
                    behind: 2 * run,
                    ..Step::default()
                })
                .collect();
            let bounds = StepBounds { places, tokens: 1 };
            let steps = Checked::upload(&t.gpu, "a benchmark", &steps, bounds)?;
            let m = m as usize;
            let (what, sequences) = match run {
                0 => ("rows", m),
                _ => ("rows of a sequence", 1),
            };
            let bytes = sequences * states.layer(0).bytes_per_row();
            t.chained(&format!("{name} delta_step {m} {what}"), bytes, |turn| {
                let layer = states.layer(turn % LAYERS);
                let out = AttentionOutput::Full(&mut out);
                let rates = Rates::Products(&ba);
                (t.stream).delta_step(
                    &qkvz,
                    rates,
                    &steps,
                    &vectors(),
                    layer,
                    out,
                    m,
                    slots,
                    false,
                )
            })?;
        }
        let rows: Vec<Row> = (0..M as i32)
            .map(|position| Row {
                position,
                ..Row::default()
            })
            .collect();
        let rows = Checked::upload(&t.gpu, "a benchmark", &rows, places)?;
        let mut mixed = t.gpu.zeros("a benchmark", M * shape.channels())?;
        let parts = DeltaRows::chunk_parts(&shape, M, 1);
        let mut chunks = t.gpu.zeros("a benchmark", parts)?;
        let mut scanned = t.gpu.zeros("a benchmark", M * shape.values())?;
        let mut half = t.gpu.zeros("a benchmark", M * shape.values())?;
        for m in [64, 512, M] {
            let span = DeltaSpan {
                rows: SequenceRows {
                    row: 0,
                    count: m,
                    position: 0,
                    slot: 0,
                },
                mark: None,
            };
            let bytes = 4 * m * (3 * shape.channels() + 3 * shape.values());
            t.alone(&format!("{name} delta_rows {m} rows"), bytes, |turn| {
                let inputs = DeltaRows {
                    qkvz: &qkvz,
                    ba: &ba,
                    rows: &rows,
                    mixed: &mut mixed,
                    chunks: &mut chunks,
                    scanned: &mut scanned,
                };
                let out = RowsOut {
                    full: None,
                    half: Some(&mut half),
                };
                let layer = states.layer(turn % LAYERS);
                t.stream
                    .delta_rows(inputs, &[span], &vectors(), layer, &out, m)
            })?;
        }
        let bytes = LAYERS * states.layer(0).bytes_per_row();
        t.alone(&format!("{name} copy_states"), bytes, |_| {
            t.stream.copy_states(&mut states, 0, 1)
        })?;
    }
    Ok(())
}
