//! Gated DeltaNets, compared with their formula in f64.

use super::{gpu, launch, read, sizes, words};
use crate::gpu::Gpu;
use crate::recurrence::{Recurrence, RecurrenceOp, state_len, vectors};
use nq_kernels::DeltaShape;
use nq_model::OutputGate;
use nq_testkit::compare::nmse;
use nq_testkit::delta;
use nq_testkit::weights::normal;
use wgpu::Buffer;

/// Inputs of a recurrence: of all rows of a sequence.
struct RecurredSequence {
    recurrence: Recurrence,
    vectors: delta::Vectors,
    /// `qkvz` and `ba`.
    rows: [Vec<f32>; 2],
}

impl RecurredSequence {
    /// `[rows, values]`
    fn expected(&self) -> Vec<f32> {
        let shape = &self.recurrence.shape;
        let mut out = delta::reference(shape, &self.vectors, &self.rows);
        if self.recurrence.gate == OutputGate::Sigmoid {
            // Without the factor by which SiLU differs.
            let z = self.rows[0].chunks_exact(shape.stride());
            let z = z.flat_map(|row| &row[shape.channels()..]);
            out.iter_mut().zip(z).for_each(|(o, z)| *o /= z);
        }
        out
    }

    /// The rows of the sequence from row `first` on, `count` of them, with those of another sequence behind them, which
    /// is as long: the outputs of the first. States are those at places 2 and 0.
    fn found(&self, gpu: &Gpu, states: &Buffer, first: usize, count: usize) -> Vec<f32> {
        let s = &self.recurrence.shape;
        let twice = |values: &[f32], width: usize| {
            let part = &values[first * width..][..count * width];
            gpu.upload("rows", &[part, part].concat()).unwrap()
        };
        let mut batch: Vec<u32> = Vec::new();
        for (sequence, place) in [2, 0].into_iter().enumerate() {
            let begin = sequence * count;
            batch.extend((0..count).flat_map(|r| [first + r, 0, begin, place].map(|n| n as u32)));
        }
        batch.extend([0, count, count, count].map(|n| n as u32));
        let v = &self.vectors;
        let vectors = vectors(s, [&v.conv, &v.norm, &v.decay, &v.dt_bias]);
        let (step, batch) = (sizes(gpu, 2 * count), words(gpu, &batch));
        let vectors = gpu.upload("vectors", &vectors).unwrap();
        let qkvz = twice(&self.rows[0], s.stride());
        let ba = twice(&self.rows[1], 2 * s.value_heads);
        let mixed = gpu.buffer("mixed", 8 * count * s.channels()).unwrap();
        let out = gpu.buffer("out", 8 * count * s.values()).unwrap();
        let buffers = [&step, &batch, &vectors, &qkvz, &ba, states, &mixed, &out];
        let op = RecurrenceOp::new(gpu, self.recurrence, buffers).unwrap();
        launch(gpu, |pass| op.launch(pass, 2 * count, 2));
        let found = read(gpu, &out, 2 * count * s.values());
        let (own, other) = found.split_at(count * s.values());
        assert_eq!(own, other);
        own.to_vec()
    }
}

#[test]
fn states_are_brought_forward_in_any_pieces() {
    let Some(mut gpu) = gpu() else { return };
    let tiled = DeltaShape {
        tiled: true,
        ..delta::shape([2, 4, 16, 64, 4])
    };
    let cases = [
        (delta::shape([2, 6, 128, 128, 4]), OutputGate::Silu),
        (tiled, OutputGate::Silu),
        (delta::shape([1, 3, 20, 12, 2]), OutputGate::Sigmoid),
        (delta::shape([3, 3, 256, 256, 1]), OutputGate::Silu),
    ];
    for lanes in [gpu.lanes, None] {
        gpu.lanes = lanes;
        for (shape, gate) in cases {
            let sequence = RecurredSequence {
                recurrence: Recurrence {
                    shape,
                    gate,
                    eps: delta::EPS,
                },
                vectors: delta::vectors(&shape),
                rows: delta::rows(&shape, 21, 5),
            };
            // What was there before does not matter to a sequence that begins.
            let states = normal(3 * state_len(&shape), 9);
            let states = gpu.upload("states", &states).unwrap();
            let (mut found, mut at) = (Vec::new(), 0);
            for count in [5, 1, 1, 2, 3, 1, 1, 1, 1, 1, 4] {
                found.extend(sequence.found(&gpu, &states, at, count));
                at += count;
            }
            let error = nmse(&found, &sequence.expected());
            assert!(error < 1e-10, "{shape:?}, {lanes:?}: {error:e}");
        }
    }
}
