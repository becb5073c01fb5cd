//! Products, of every form of weights and number of rows.

use super::{gpu, launch, read, run, sizes};
use crate::gpu::{Gpu, Grid};
use crate::kernels::{round, silu};
use crate::linear::{Linear, Purpose};
use crate::product::{BoundProduct, Operands, Outputs, ProductKernels, RowProduct};
use nq_formats::{AffineScheme, Bits, Group, Weight, Zeros};
use nq_kernels::{Activations, reference};
use nq_model::DType;
use nq_runtime::interface::ActivationChoice;
use nq_runtime::weights::Census;
use nq_testkit::compare::nmse;
use nq_testkit::weights::{affine, blocks, dense, held_as_others, normal};

const INT8: ActivationChoice = ActivationChoice::Int8 { group: 32 };
const FOUR: AffineScheme = AffineScheme::new(Bits::B4, Group::Size(64), Zeros::Integer);

/// The weight of a product of `parts`.
fn linear(gpu: &Gpu, parts: &[&Weight], gated: bool, choice: ActivationChoice) -> Linear {
    let purpose = Purpose {
        name: "test",
        gated,
        experts: 1,
        choice,
    };
    Linear::new(gpu, purpose, parts, &mut Census::default()).unwrap()
}

/// A product of `parts` by the kernels of passes.
struct Checked<'a> {
    gpu: &'a Gpu,
    parts: &'a [&'a Weight],
    choice: ActivationChoice,
    outputs: Outputs,
}

impl Checked<'_> {
    /// Compares the product of this many rows with the reference.
    fn rows(&self, rows: usize, case: impl std::fmt::Display) {
        let Checked {
            gpu,
            parts,
            choice,
            outputs,
        } = *self;
        let gated = outputs == Outputs::Gated;
        let linear = linear(gpu, parts, gated, choice);
        assert_eq!(linear.interleaved, gated);
        assert_eq!(linear.rounds, choice != ActivationChoice::F32);
        let values = normal(rows * linear.inputs, rows as u64);
        let width = linear.outputs / if gated { 2 } else { 1 };
        let (step, x) = (sizes(gpu, rows), gpu.upload("x", &values).unwrap());
        let y = gpu.upload("y", &vec![1.0; rows * width]).unwrap();
        let rounded = gpu.buffer("bytes", rows * linear.inputs).unwrap();
        let scales = gpu.buffer("scales", rows * linear.inputs / 4).unwrap();
        let (mut inputs, mut beside) = (&x, &x);
        if linear.rounds {
            let buffers = [&step, &x, &rounded, &scales];
            run(gpu, &round(linear.inputs), &buffers, Grid::new(rows, 1));
            (inputs, beside) = (&rounded, &scales);
        }
        let operands = Operands {
            step: &step,
            x: inputs,
            beside,
            y: &y,
        };
        let bound = BoundProduct::new(gpu, &linear, operands, outputs).unwrap();
        launch(gpu, |pass| {
            let mut known = ProductKernels::new();
            bound.launch(gpu, pass, rows, &mut known).unwrap();
        });
        let rounding = match linear.rounds {
            true => Activations::Int8 { group: 32 },
            false => Activations::F32,
        };
        let expected = expected(parts, rounding, outputs, &values);
        let error = nmse(&read(gpu, &y, rows * width), &expected);
        let most = if gated { 1e-10 } else { 1e-11 };
        assert!(error < most, "{case}, {rows} rows, {choice:?}: {error:e}");
    }
}

/// The same by the reference.
fn expected(parts: &[&Weight], rounding: Activations, outputs: Outputs, x: &[f32]) -> Vec<f32> {
    let inputs = parts[0].dims().cols;
    let mut x = x.to_vec();
    reference::round_activations(&mut x, inputs, rounding);
    let rows = x.len() / inputs;
    let mut by_part: Vec<Vec<f32>> = Vec::new();
    for part in parts {
        let mut y = vec![0.0; rows * part.dims().rows];
        reference::linear(&x, part, &mut y).unwrap();
        by_part.push(y);
    }
    if outputs == Outputs::Gated {
        let mut y = vec![0.0; by_part[0].len()];
        reference::silu_mul(&by_part[0], &by_part[1], &mut y);
        return y;
    }
    let mut all = Vec::new();
    for row in 0..rows {
        for (y, part) in by_part.iter().zip(parts) {
            let width = part.dims().rows;
            all.extend_from_slice(&y[row * width..][..width]);
        }
    }
    if outputs == Outputs::Added {
        all.iter_mut().for_each(|v| *v += 1.0);
    }
    all
}

/// Weights of every form that kernels read, with this many inputs.
fn weights(out: usize, inputs: usize) -> Vec<Weight> {
    let plain = |bits, group, zeros| AffineScheme::new(bits, group, zeros);
    let mut schemes = vec![
        plain(Bits::B4, Group::Size(64), Zeros::Integer),
        plain(Bits::B4, Group::Size(16), Zeros::None),
        plain(Bits::B4, Group::Channel, Zeros::Offset),
        plain(Bits::B5, Group::Size(32), Zeros::Integer),
        plain(Bits::B6, Group::Size(128), Zeros::Offset),
        plain(Bits::B8, Group::Size(64), Zeros::Integer),
    ];
    // Scales in two levels, tables and fewer bits, which are held otherwise.
    schemes.extend(held_as_others(Group::Size(64)).into_iter().step_by(5));
    schemes.extend(blocks().into_iter().skip(1).step_by(3));
    let quantized = schemes.into_iter().zip(10..);
    let quantized = quantized.map(|(scheme, seed)| affine(scheme, out, inputs, None, seed));
    let floats = [DType::F32, DType::F16, DType::BF16];
    let floats = floats.into_iter().zip(1..);
    let floats = floats.map(|(dtype, seed)| dense(dtype, out, inputs, seed));
    floats.chain(quantized).collect()
}

#[test]
fn products_of_every_form() {
    let Some(gpu) = gpu() else { return };
    for weight in weights(70, 3 * 512) {
        let product = Checked {
            gpu: &gpu,
            parts: &[&weight],
            choice: ActivationChoice::F32,
            outputs: Outputs::Added,
        };
        for rows in [1, 70] {
            product.rows(rows, weight.scheme_name());
        }
    }
}

#[test]
fn products_of_any_number_of_rows() {
    let Some(gpu) = gpu() else { return };
    let [a, b] = [(50, 1), (23, 2)].map(|(out, seed)| affine(FOUR, out, 320, None, seed));
    let other = AffineScheme::new(Bits::B8, Group::Size(32), Zeros::None);
    let c = affine(other, 9, 320, None, 3);
    for choice in [ActivationChoice::F32, ActivationChoice::Auto] {
        let product = Checked {
            gpu: &gpu,
            parts: &[&a, &b, &c],
            choice,
            outputs: Outputs::Stored,
        };
        for rows in [1, 3, 16, 17, 65] {
            product.rows(rows, "three parts");
        }
    }
}

#[test]
fn inputs_are_rounded_to_bytes_for_every_width() {
    let Some(gpu) = gpu() else { return };
    for bits in [Bits::B4, Bits::B5, Bits::B6, Bits::B8] {
        let scheme = AffineScheme::new(bits, Group::Size(64), Zeros::Integer);
        let product = Checked {
            gpu: &gpu,
            parts: &[&affine(scheme, 66, 256, None, 5)],
            choice: INT8,
            outputs: Outputs::Stored,
        };
        for rows in [2, 40] {
            product.rows(rows, scheme);
        }
    }
}

#[test]
fn weights_are_cut_where_a_binding_ends() {
    let Some(mut gpu) = gpu() else { return };
    gpu.limits.max_storage_buffer_binding_size = 1 << 14;
    let weight = affine(FOUR, 300, 320, None, 1);
    let (parts, choice) = ([&weight], ActivationChoice::F32);
    // Tiles of 64 rows of 160 bytes.
    assert_eq!(linear(&gpu, &parts, false, choice).slices.len(), 5);
    let product = Checked {
        gpu: &gpu,
        parts: &parts,
        choice,
        outputs: Outputs::Stored,
    };
    product.rows(2, "five slices");
}

/// Products of one row that normalize and round their input themselves, with and without subgroups.
#[test]
fn a_row_is_normalized_and_rounded_by_its_product() {
    let Some(mut gpu) = gpu() else { return };
    let with = |bits, group, zeros| AffineScheme::new(bits, group, zeros);
    let schemes = [
        FOUR,
        with(Bits::B4, Group::Channel, Zeros::Offset),
        with(Bits::B5, Group::Size(32), Zeros::Integer),
        with(Bits::B6, Group::Size(128), Zeros::Offset),
        with(Bits::B8, Group::Size(64), Zeros::Integer),
    ];
    for lanes in [gpu.lanes, None] {
        gpu.lanes = lanes;
        // Inputs that no number of lanes divides, and so many outputs that workgroups are larger, or compute several blocks.
        let shapes = [
            (672, 131),
            (3 * 512, 70),
            (96, 3000),
            (64, 9000),
            (64, 40_000),
        ];
        for (inputs, rows) in shapes {
            for (scheme, seed) in schemes.into_iter().zip(1..) {
                let cases = [Outputs::Stored, Outputs::Added, Outputs::Gated].into_iter();
                for (outputs, eps) in cases.zip([Some(1e-5), None, Some(1e-6)]) {
                    if rows > 1000 && seed > 1 {
                        continue;
                    }
                    let part = |seed| affine(scheme, rows, inputs, None, seed);
                    let (first, second) = (part(seed), part(seed + 50));
                    let parts = match outputs {
                        Outputs::Gated => vec![&first, &second],
                        _ => vec![&first],
                    };
                    let (x, gains) = (normal(inputs, 3), normal(inputs, 4));
                    let (step, y) = (sizes(&gpu, 1), gpu.upload("y", &vec![1.0; rows]).unwrap());
                    let [input, gain_buffer] = [&x, &gains].map(|v| gpu.upload("x", v).unwrap());
                    let linear = linear(&gpu, &parts, outputs == Outputs::Gated, INT8);
                    let operands = Operands {
                        step: &step,
                        x: &input,
                        beside: &gain_buffer,
                        y: &y,
                    };
                    let product = RowProduct::new(&gpu, &linear, operands, outputs, eps, None);
                    let product = product.unwrap();
                    let product = product.expect("inputs that are rounded, and fit a workgroup");
                    launch(&gpu, |pass| product.launch(pass, 1));
                    let found = read(&gpu, &y, rows);
                    let mut x_normed = x.to_vec();
                    if let Some(eps) = eps {
                        reference::rms_norm(&x, &gains, eps, &mut x_normed);
                    }
                    let rounding = Activations::Int8 { group: 32 };
                    let error = nmse(&found, &expected(&parts, rounding, outputs, &x_normed));
                    // Where a value is halfway between two bytes, the order of factors decides.
                    let most = if eps.is_some() { 1e-5 } else { 1e-11 };
                    let case = format!("{scheme}, {rows} x {inputs}, {outputs:?}, {lanes:?}");
                    assert!(error < most, "{case}: {error:e}");
                }
            }
        }
    }
}

#[test]
fn gates_multiply_their_neighbours() {
    let Some(gpu) = gpu() else { return };
    let scheme = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
    for [gate, up] in [
        [1, 2].map(|seed| affine(scheme, 37, 96, None, seed)),
        [1, 2].map(|seed| dense(DType::BF16, 37, 96, seed)),
    ] {
        let product = Checked {
            gpu: &gpu,
            parts: &[&gate, &up],
            choice: ActivationChoice::F32,
            outputs: Outputs::Gated,
        };
        for rows in [1, 6, 16, 33] {
            product.rows(rows, gate.scheme_name());
        }
    }
    let (rows, width) = (3, 300);
    let x = normal(rows * 2 * width, 4);
    let (step, input) = (sizes(&gpu, rows), gpu.upload("x", &x).unwrap());
    let y = gpu.buffer("y", 4 * rows * width).unwrap();
    let buffers = [&step, &input, &y];
    run(&gpu, &silu(width), &buffers, Grid::new(rows, 1));
    let mut expected = vec![0.0; rows * width];
    let all = x
        .chunks_exact(2 * width)
        .zip(expected.chunks_exact_mut(width));
    all.for_each(|(row, y)| reference::silu_mul(&row[..width], &row[width..], y));
    assert!(nmse(&read(&gpu, &y, rows * width), &expected) < 1e-11);
}
