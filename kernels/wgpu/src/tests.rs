//! Every kernel compared with the scalar reference, on the first adapter: on a machine without a GPU, Mesa's software
//! driver (lavapipe).
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

mod attention;
mod experts;
mod products;
mod recurrence;

use crate::gpu::{Gpu, Grid, LaunchPass};
use crate::kernels::{DRAW_PARTS, draw, norm};
use crate::linear::{Linear, Purpose};
use crate::session::best_token;
use crate::source::KernelSource;
use nq_kernels::{Activations, reference};
use nq_model::Dims;
use nq_runtime::interface::ActivationChoice;
use nq_runtime::weights::Census;
use nq_testkit::compare::nmse;
use nq_testkit::weights::normal;
use wgpu::Buffer;

/// The first adapter; `None`, said in print, where there is none.
fn gpu() -> Option<Gpu> {
    if crate::adapters().is_empty() {
        println!("skipped: no adapter for Vulkan, Metal or Direct3D 12");
        return None;
    }
    Some(Gpu::open(0).unwrap())
}

/// Runs a kernel once.
fn run(gpu: &Gpu, source: &KernelSource, buffers: &[&Buffer], grid: Grid) {
    let kernel = gpu.bound(source, buffers).unwrap();
    launch(gpu, |pass| kernel.launch(pass, grid));
}

/// Runs what `launches` adds to a pass.
fn launch(gpu: &Gpu, launches: impl FnOnce(&mut LaunchPass<'_>)) {
    let mut encoder = gpu.encoder();
    launches(&mut LaunchPass::new(&mut encoder, None));
    gpu.submit(encoder);
    gpu.finish().unwrap();
}

/// Sizes of a pass of `rows` rows.
fn sizes(gpu: &Gpu, rows: usize) -> Buffer {
    gpu.uniform(&[rows as u32, 0, 0, 0, 0, 0, 0, 0]).unwrap()
}

/// The first `n` values of a buffer.
fn read(gpu: &Gpu, buffer: &Buffer, n: usize) -> Vec<f32> {
    let staging = gpu.staging(4 * n).unwrap();
    let mut encoder = gpu.encoder();
    encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, 4 * n as u64);
    gpu.submit(encoder);
    let mut values = Vec::new();
    gpu.read(&staging, 4 * n, &mut values).unwrap();
    values
}

fn words(gpu: &Gpu, values: &[u32]) -> Buffer {
    let values: Vec<f32> = values.iter().map(|v| f32::from_bits(*v)).collect();
    gpu.upload("words", &values).unwrap()
}

#[test]
fn rows_are_normalized_in_the_order_that_is_wanted() {
    let Some(gpu) = gpu() else { return };
    let (hidden, eps) = (672, 1e-5);
    let (x, gains) = (normal(4 * hidden, 1), normal(hidden, 2));
    let mut expected = vec![0.0; x.len()];
    reference::rms_norm(&x, &gains, eps, &mut expected);
    // The wanted rows stand behind five other words.
    let step = gpu.uniform(&[4, 0, 0, 0, 0, 5, 0, 2]).unwrap();
    let batch = words(&gpu, &[9, 9, 9, 9, 9, 3, 1]);
    let (gains, x) = (
        gpu.upload("gains", &gains).unwrap(),
        gpu.upload("x", &x).unwrap(),
    );
    let y = gpu.buffer("y", 16 * hidden).unwrap();
    let buffers = [&step, &x, &batch, &gains, &y];
    run(&gpu, &norm(hidden, eps), &buffers, Grid::new(4, 1));
    assert!(nmse(&read(&gpu, &y, 4 * hidden), &expected) < 1e-11);
    let gathers = norm(hidden, eps).flag("GATHER", true);
    run(&gpu, &gathers, &buffers, Grid::new(2, 1));
    let wanted = [&expected[3 * hidden..], &expected[hidden..2 * hidden]].concat();
    assert!(nmse(&read(&gpu, &y, 2 * hidden), &wanted) < 1e-11);
    // The same in bytes, and their scales.
    let rounds = norm(hidden, eps).flag("ROUND", true);
    let (codes, scales) = (
        gpu.buffer("bytes", 4 * hidden).unwrap(),
        gpu.buffer("scales", hidden).unwrap(),
    );
    let buffers = [&step, &x, &batch, &gains, &codes, &scales];
    run(&gpu, &rounds, &buffers, Grid::new(4, 1));
    let (codes, scales) = (read(&gpu, &codes, hidden), read(&gpu, &scales, hidden / 4));
    let codes: Vec<i8> = codes
        .iter()
        .flat_map(|v| v.to_bits().to_le_bytes().map(|b| b as i8))
        .collect();
    let mut found = Vec::new();
    for (unit, scale) in codes.chunks_exact(32).zip(scales.chunks_exact(2)) {
        found.extend(unit.iter().map(|c| f32::from(*c) * scale[0]));
        let sum: f32 = unit.iter().map(|c| f32::from(*c)).sum();
        assert!((sum * scale[0] - scale[1]).abs() < 1e-3 * scale[0].abs());
    }
    reference::round_activations(&mut expected, hidden, Activations::Int8 { group: 32 });
    assert!(nmse(&found, &expected) < 1e-5);
}

#[test]
fn operations_are_timed_while_they_are_profiled() {
    let Some(gpu) = gpu() else { return };
    assert!(gpu.timer().unwrap().is_none());
    if !gpu.times {
        println!("skipped: no timestamps within lists of commands");
        return;
    }
    gpu.profile.start();
    let mut timer = gpu.timer().unwrap().unwrap();
    let logits = gpu.upload("logits", &normal(1 << 16, 9)).unwrap();
    let best = gpu.buffer("best", 8 * DRAW_PARTS).unwrap();
    let kernel = gpu.bound(&draw(1 << 16), &[&logits, &best]).unwrap();
    let mut encoder = gpu.encoder();
    // Two lists, the first with two operations.
    for ops in [&["a", "b"][..], &["a"]] {
        let mut pass = LaunchPass::new(&mut encoder, Some(&mut timer));
        for op in ops {
            kernel.launch(&mut pass, Grid::new(1, DRAW_PARTS));
            pass.ends((op, "draw", Dims::new(1, 1)), 100);
        }
    }
    timer.resolve(&mut encoder);
    gpu.submit(encoder);
    timer.count(&gpu).unwrap();
    let mut found = gpu.profile.stop();
    found.sort_by_key(|timing| timing.op);
    let counts: Vec<_> = found.iter().map(|t| (t.op, t.calls, t.bytes)).collect();
    assert_eq!(counts, [("a", 2, 200), ("b", 1, 100)]);
}

#[test]
fn the_first_of_the_best_tokens_is_drawn() {
    let Some(gpu) = gpu() else { return };
    let vocab = 5000;
    let mut logits = normal(4 * vocab, 9);
    logits[vocab - 1] = 9.0;
    for equal in [4999, 78, 79, 2500] {
        logits[vocab + equal] = 10.0;
    }
    logits[2 * vocab..3 * vocab].fill(-1e30);
    logits[3 * vocab + 4000] = f32::NAN;
    let (rows, best) = (
        gpu.upload("logits", &logits).unwrap(),
        gpu.buffer("best", 4 * 8 * DRAW_PARTS).unwrap(),
    );
    let grid = Grid::new(4, DRAW_PARTS);
    run(&gpu, &draw(vocab), &[&rows, &best], grid);
    let found = read(&gpu, &best, 4 * 2 * DRAW_PARTS);
    let found: Vec<Option<u32>> = found
        .chunks_exact(2 * DRAW_PARTS)
        .map(|row| best_token(row).ok())
        .collect();
    assert_eq!(found, [Some(4999), Some(78), Some(0), None]);
}

#[test]
fn what_fails_is_named() {
    let Some(gpu) = gpu() else { return };
    let too_much = gpu
        .buffer("everything", gpu.most_bytes() + 16)
        .unwrap_err()
        .to_string();
    assert!(too_much.contains("everything needs"), "{too_much}");
    let broken = KernelSource::new(&["fn main() { unknown(); }"]);
    let refused = gpu.kernel(&broken).err().unwrap().to_string();
    assert!(
        refused.contains("wgpu:0") && refused.contains("unknown"),
        "{refused}"
    );
    let absent = Gpu::open(999).err().unwrap().to_string();
    assert!(absent.contains("wgpu:999"), "{absent}");
    let trellis = "trellis4 octagon".parse().unwrap();
    let weight = nq_testkit::weights::trellis(trellis, nq_model::Dims::new(128, 128), 1, 2);
    let purpose = Purpose {
        name: "down",
        gated: false,
        experts: 1,
        choice: ActivationChoice::Auto,
    };
    let refused = Linear::new(&gpu, purpose, &[&weight], &mut Census::default());
    let refused = refused.err().unwrap().to_string();
    assert!(
        refused.contains("down") && refused.contains("trellis"),
        "{refused}"
    );
}
