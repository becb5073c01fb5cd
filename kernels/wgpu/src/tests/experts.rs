//! Mixtures: the choice of experts, and products with those that are chosen.

use super::{gpu, launch, read, run};
use crate::buffers::Buffers;
use crate::experts::{ExpertsOp, group_words};
use crate::gpu::{Gpu, Grid};
use crate::kernels::norm;
use crate::linear::{Linear, Purpose};
use crate::sizes::Part;
use nq_formats::{AffineScheme, Bits, Group, Weight, Zeros};
use nq_kernels::{Activations, Routes, reference};
use nq_model::{DType, Experts};
use nq_runtime::interface::ActivationChoice;
use nq_runtime::weights::Census;
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, dense, normal};

const HIDDEN: usize = 96;
const EPS: f32 = 1e-6;

/// A mixture: gates and up of all experts, down of all experts.
struct Mixture {
    shape: Experts,
    gate: Weight,
    up: Weight,
    down: Weight,
    choice: ActivationChoice,
}

impl Mixture {
    fn new(
        shape: Experts,
        choice: ActivationChoice,
        weight: impl Fn(usize, usize, u64) -> Weight,
    ) -> Self {
        let (gates, outs) = (shape.count * shape.width, shape.count * HIDDEN);
        Mixture {
            gate: weight(gates, HIDDEN, 1),
            up: weight(gates, HIDDEN, 2),
            down: weight(outs, shape.width, 3),
            shape,
            choice,
        }
    }

    fn rounding(&self) -> Activations {
        match self.choice {
            ActivationChoice::F32 => Activations::F32,
            _ => Activations::Int8 { group: 32 },
        }
    }

    /// `stream` `[rows, HIDDEN]` and what is added to each of its rows.
    fn expected(&self, stream: &[f32], gains: &[f32], scores: &[f32]) -> Vec<f32> {
        let width = self.shape.width;
        let mut x = vec![0.0; stream.len()];
        reference::rms_norm(stream, gains, EPS, &mut x);
        reference::round_activations(&mut x, HIDDEN, self.rounding());
        let routes = Routes::new(scores, &self.shape);
        let all = |x: &[f32], w: &Weight| {
            let mut y = vec![0.0; w.dims().rows];
            reference::linear(x, w, &mut y).unwrap();
            y
        };
        let mut y = stream.to_vec();
        for (row, (x, y)) in x.chunks(HIDDEN).zip(y.chunks_mut(HIDDEN)).enumerate() {
            let (gates, ups) = (all(x, &self.gate), all(x, &self.up));
            for &(expert, weight) in routes.of(row) {
                let expert = expert as usize;
                let own = expert * width..(expert + 1) * width;
                let mut gated = vec![0.0; width];
                reference::silu_mul(&gates[own.clone()], &ups[own], &mut gated);
                reference::round_activations(&mut gated, width, self.rounding());
                let outs = all(&gated, &self.down);
                let outs = &outs[expert * HIDDEN..(expert + 1) * HIDDEN];
                y.iter_mut().zip(outs).for_each(|(y, o)| *y += weight * o);
            }
        }
        y
    }

    fn linear(&self, gpu: &Gpu, parts: &[&Weight]) -> Linear {
        let purpose = Purpose {
            name: "experts",
            gated: parts.len() == 2,
            experts: self.shape.count,
            choice: self.choice,
        };
        Linear::new(gpu, purpose, parts, &mut Census::default()).unwrap()
    }

    /// The same on the adapter, with the weights in buffers of at most `limit` bytes.
    fn found(&self, gpu: &mut Gpu, limit: u64, [stream, gains, scores]: [&[f32]; 3]) -> Vec<f32> {
        let (shape, rows) = (&self.shape, stream.len() / HIDDEN);
        let bound = std::mem::replace(&mut gpu.limits.max_storage_buffer_binding_size, limit);
        let stacks = [&[&self.gate, &self.up][..], &[&self.down]];
        let stacks = stacks.map(|parts| self.linear(gpu, parts));
        gpu.limits.max_storage_buffer_binding_size = bound;
        let gpu = &*gpu;
        let most = rows.max(20);
        let routes = shape.per_token;
        let widest = HIDDEN.max(routes * shape.width);
        let floats = |n: usize| 4 * most * n;
        let bytes = |part| match part {
            Part::Stream | Part::Normed => floats(HIDDEN),
            Part::Scores => floats(shape.count),
            Part::Routes => floats(2 * routes),
            Part::Groups => 4 * group_words(shape, most),
            Part::ExpertsGated => floats(routes * shape.width),
            Part::ExpertsOut => floats(routes * HIDDEN),
            Part::Rounded => floats(widest / 4),
            Part::RoundedScales => floats(widest / 16),
            _ => 0,
        };
        let b = Buffers::of_layers(gpu, most, bytes).unwrap();
        gpu.write(&b.step, 0, bytemuck::bytes_of(&(rows as u32)));
        gpu.write(&b[Part::Stream], 0, bytemuck::cast_slice(stream));
        gpu.write(&b[Part::Scores], 0, bytemuck::cast_slice(scores));
        let gains = gpu.upload("gains", gains).unwrap();
        let stacks = [&stacks[0], &stacks[1]];
        let op = ExpertsOp::new(gpu, shape, stacks, (&gains, EPS), &b).unwrap();
        let rounds = stacks[0].rounds;
        let source = norm(HIDDEN, EPS).flag("ROUND", rounds);
        let mut buffers = vec![&b.step, &b[Part::Stream], &b[Part::Batch], &gains];
        match rounds {
            true => buffers.extend([&b[Part::Rounded], &b[Part::RoundedScales]]),
            false => buffers.push(&b[Part::Normed]),
        }
        run(gpu, &source, &buffers, Grid::new(rows, 1));
        launch(gpu, |pass| op.launch(pass, rows));
        read(gpu, &b[Part::Stream], rows * HIDDEN)
    }
}

#[test]
fn rows_go_through_the_experts_that_they_are_routed_to() {
    let Some(mut gpu) = gpu() else { return };
    let limit = gpu.limits.max_storage_buffer_binding_size;
    let lanes = gpu.lanes;
    let shape = |count, per_token, normalized| Experts {
        count,
        per_token,
        width: 64,
        normalized,
        shared: 0,
    };
    let four = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    let six = AffineScheme::new(Bits::B6, Group::Size(16), Zeros::Offset);
    let int8 = ActivationChoice::Int8 { group: 32 };
    let mixtures = [
        Mixture::new(shape(9, 3, true), int8, |o, i, s| {
            affine(four, o, i, None, s)
        }),
        Mixture::new(shape(130, 8, false), int8, |o, i, s| {
            affine(four, o, i, None, s)
        }),
        Mixture::new(shape(6, 6, true), ActivationChoice::F32, |o, i, s| {
            affine(six, o, i, None, s)
        }),
        Mixture::new(shape(5, 2, true), ActivationChoice::F32, |o, i, s| {
            dense(DType::BF16, o, i, s)
        }),
    ];
    for (number, mixture) in mixtures.iter().enumerate() {
        let bytes = mixture.linear(&gpu, &[&mixture.gate, &mixture.up]).bytes();
        for rows in [1, 3, 16, 17, 90] {
            let scores = normal(rows * mixture.shape.count, 7);
            let (stream, gains) = (normal(rows * HIDDEN, 8), normal(HIDDEN, 9));
            let expected = mixture.expected(&stream, &gains, &scores);
            // In one buffer; in several, where bindings are small; and without subgroups.
            for (limit, lanes) in [(limit, lanes), ((bytes / 3) as u64, lanes), (limit, None)] {
                gpu.lanes = lanes;
                if lanes.is_none() && rows > 3 {
                    continue;
                }
                let found = mixture.found(&mut gpu, limit, [&stream, &gains, &scores]);
                let error = nmse(&found, &expected);
                // Where a value is halfway between two bytes, the order of factors decides.
                let most = if mixture.choice == int8 { 1e-5 } else { 1e-11 };
                let case = format!("mixture {number}, {rows} rows, {limit}, {lanes:?}");
                assert!(error < most, "{case}: {error:e}");
            }
        }
    }
}
