//! Gated DeltaNets, compared with their formula in f64.

use super::{gpu, launch, read, sizes, words};
use crate::gpu::Gpu;
use crate::recurrence::{Recurrence, RecurrenceOp, state_len, vectors};
use nq_kernels::DeltaShape;
use nq_model::OutputGate;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;
use wgpu::Buffer;

/// Inputs of a recurrence: of all rows of a sequence.
struct Case {
    recurrence: Recurrence,
    taps: Vec<f32>,
    gains: Vec<f32>,
    decay: Vec<f32>,
    bias: Vec<f32>,
    qkvz: Vec<f32>,
    ba: Vec<f32>,
    rows: usize,
}

impl Case {
    fn new(recurrence: Recurrence, rows: usize) -> Self {
        let s = &recurrence.shape;
        Case {
            taps: normal(s.channels() * s.conv, 1),
            gains: normal(s.value_dim, 2),
            decay: normal(s.value_heads, 3).iter().map(|v| -v.exp()).collect(),
            bias: normal(s.value_heads, 4),
            qkvz: normal(rows * s.stride(), 5),
            ba: normal(rows * 2 * s.value_heads, 6),
            rows,
            recurrence,
        }
    }

    /// `[rows, values]`
    fn expected(&self) -> Vec<f32> {
        let s = &self.recurrence.shape;
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let mixed = |row: usize, channel: usize| -> f64 {
            let taps = (0..s.conv.min(row + 1)).map(|j| {
                let x = self.qkvz[(row - j) * s.stride() + channel];
                f64::from(x) * f64::from(self.taps[channel * s.conv + s.conv - 1 - j])
            });
            silu(taps.sum())
        };
        let unit = |row: usize, first: usize, length: f64| -> Vec<f64> {
            let head: Vec<f64> = (first..first + s.key_dim).map(|c| mixed(row, c)).collect();
            let square: f64 = head.iter().map(|v| v * v).sum::<f64>() + 1e-6;
            head.iter().map(|v| v * length / square.sqrt()).collect()
        };
        let mut out = vec![0.0; self.rows * s.values()];
        for head in 0..s.value_heads {
            let mut state = vec![0.0; s.key_dim * s.value_dim];
            let key_at = s.key_head(head) * s.key_dim;
            for row in 0..self.rows {
                let q = unit(row, key_at, (s.key_dim as f64).sqrt().recip());
                let k = unit(row, s.keys() + key_at, 1.0);
                let rates = &self.ba[row * 2 * s.value_heads..];
                let a = f64::from(rates[s.value_heads + head]) + f64::from(self.bias[head]);
                let decay = (f64::from(self.decay[head]) * a.exp().ln_1p()).exp();
                let beta = 1.0 / (1.0 + (-f64::from(rates[head])).exp());
                let mut o = vec![0.0; s.value_dim];
                for (column, o) in o.iter_mut().enumerate() {
                    let v = mixed(row, 2 * s.keys() + head * s.value_dim + column);
                    let at = |i: usize| i * s.value_dim + column;
                    let seen: f64 = (0..s.key_dim).map(|i| decay * state[at(i)] * k[i]).sum();
                    for i in 0..s.key_dim {
                        state[at(i)] = decay * state[at(i)] + k[i] * beta * (v - seen);
                        *o += state[at(i)] * q[i];
                    }
                }
                let square = o.iter().map(|v| v * v).sum::<f64>() / s.value_dim as f64;
                let scale = 1.0 / (square + f64::from(self.recurrence.eps)).sqrt();
                for (i, o) in o.iter().enumerate() {
                    let at = head * s.value_dim + i;
                    let z = f64::from(self.qkvz[row * s.stride() + s.channels() + at]);
                    let gate = match self.recurrence.gate {
                        OutputGate::Silu => silu(z),
                        OutputGate::Sigmoid => 1.0 / (1.0 + (-z).exp()),
                    };
                    out[row * s.values() + at] =
                        (o * scale * f64::from(self.gains[i]) * gate) as f32;
                }
            }
        }
        out
    }

    /// The rows of the sequence from row `first` on, `count` of them, with those of another sequence behind them, which
    /// is as long: the outputs of the first. States are those at places 2 and 0.
    fn rows(&self, gpu: &Gpu, states: &Buffer, first: usize, count: usize) -> Vec<f32> {
        let s = &self.recurrence.shape;
        let places = [2, 0];
        let twice = |values: &[f32], width: usize| {
            let part = &values[first * width..][..count * width];
            gpu.upload("rows", &[part, part].concat()).unwrap()
        };
        let mut batch: Vec<u32> = Vec::new();
        for (sequence, place) in places.into_iter().enumerate() {
            let begin = sequence * count;
            batch.extend((0..count).flat_map(|r| [first + r, 0, begin, place].map(|n| n as u32)));
        }
        batch.extend([0, count, count, count].map(|n| n as u32));
        let step = sizes(gpu, 2 * count);
        let vectors = vectors(s, [&self.taps, &self.gains, &self.decay, &self.bias]);
        let (batch, vectors) = (words(gpu, &batch), gpu.upload("vectors", &vectors).unwrap());
        let (qkvz, ba) = (
            twice(&self.qkvz, s.stride()),
            twice(&self.ba, 2 * s.value_heads),
        );
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
    let shape = |key_heads, value_heads, key_dim, value_dim, conv, tiled| DeltaShape {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        conv,
        tiled,
    };
    let cases = [
        (shape(2, 6, 128, 128, 4, false), OutputGate::Silu),
        (shape(2, 4, 16, 64, 4, true), OutputGate::Silu),
        (shape(1, 3, 20, 12, 2, false), OutputGate::Sigmoid),
        (shape(3, 3, 256, 256, 1, false), OutputGate::Silu),
    ];
    for lanes in [gpu.lanes, None] {
        gpu.lanes = lanes;
        for (shape, gate) in cases {
            let recurrence = Recurrence {
                shape,
                gate,
                eps: 1e-6,
            };
            let case = Case::new(recurrence, 21);
            let expected = case.expected();
            // What was there before does not matter to a sequence that begins.
            let states = normal(3 * state_len(&shape), 9);
            let states = gpu.upload("states", &states).unwrap();
            let (mut found, mut at) = (Vec::new(), 0);
            for count in [5, 1, 1, 2, 3, 1, 1, 1, 1, 1, 4] {
                found.extend(case.rows(&gpu, &states, at, count));
                at += count;
            }
            let error = nmse(&found, &expected);
            assert!(error < 1e-10, "{shape:?}, {lanes:?}: {error:e}");
        }
    }
}
