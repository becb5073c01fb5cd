//! Products with EXL3's codes, of parts that differ in bits, codes and scales of inputs.

use super::trellis::{check_gates_of, check_halves_of, check_step_of};
use super::{gpu, is_sanitizing};
use nq_formats::{Exl3Scheme, Weight};
use nq_model::Dims;
use nq_testkit::weights::{exl3, exl3_schemes};

/// Weights of these heights in the schemes from the `nth` on.
fn stack(nth: usize, heights: &[usize], inputs: usize) -> Vec<Weight> {
    let schemes: Vec<Exl3Scheme> = exl3_schemes().collect();
    let one = |(i, &height): (usize, &usize)| {
        let scheme = schemes[(nth + 5 * i) % schemes.len()];
        let seed = (nth + i) as u64;
        exl3(scheme, Dims::new(height, inputs), seed, seed)
    };
    heights.iter().enumerate().map(one).collect()
}

#[test]
fn products_of_a_step() {
    let Some(gpu) = gpu() else { return };
    for nth in 0..exl3_schemes().count() {
        check_step_of(&gpu, &stack(nth, &[128], 128), true);
        check_step_of(&gpu, &stack(nth, &[256, 128, 128], 384), false);
    }
}

/// Strips that one block has alone, and strips that several blocks have parts of.
#[test]
fn products_of_a_step_in_real_shapes() {
    let Some(gpu) = gpu() else { return };
    if is_sanitizing() {
        return;
    }
    check_step_of(&gpu, &stack(2, &[1024], 3072), true);
    check_step_of(&gpu, &stack(9, &[2048, 512, 512], 4096), false);
    check_step_of(&gpu, &stack(18, &[640], 12288), true);
    check_step_of(&gpu, &stack(4, &[40_960], 256), true);
}

#[test]
fn products_of_many_rows() {
    let Some(gpu) = gpu() else { return };
    for nth in 0..exl3_schemes().count() {
        check_halves_of(&gpu, &stack(nth, &[256, 128, 128], 384));
    }
    check_halves_of(&gpu, &stack(3, &[1024], 1024));
}

#[test]
fn gates_and_ups() {
    let Some(gpu) = gpu() else { return };
    for nth in 0..exl3_schemes().count() {
        check_gates_of(&gpu, &stack(nth, &[128, 128], 128));
        check_gates_of(&gpu, &stack(nth, &[1536, 1536], 384));
    }
}
