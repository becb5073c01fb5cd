//! Prints, for every trellis scheme, the squared error of Gaussians of variance 1 and how many weights one core rounds
//! in a second, the greatest of several runs: the record `trellis-encoding-cpu` in benches/records.
//!
//! `cargo run --release -p nq-quantize --example trellis`

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use nq_formats::TrellisScheme;
use nq_formats::trellis::SEQUENCE;
use nq_kernels::rng::Philox;
use nq_quantize::trellis::Trellis;
use std::time::Instant;

/// Sequences of a run, and runs.
const SEQUENCES: usize = 64;
const RUNS: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build_global()?;
    println!("code,bits,squared_error,weights_a_second");
    for scheme in TrellisScheme::all() {
        let trellis = Trellis::new(scheme);
        let mut words = vec![0; SEQUENCES * scheme.words()];
        let (mut error, mut least) = (0.0, f64::INFINITY);
        let mut rng = Philox::new(1, 0);
        for _ in 0..RUNS {
            let gaussians = std::iter::repeat_with(|| rng.normal() / trellis.unit());
            let targets: Vec<f32> = gaussians.take(SEQUENCES * SEQUENCE).collect();
            let mut values = targets.clone();
            let start = Instant::now();
            trellis.encode(&mut values, &mut words);
            least = start.elapsed().as_secs_f64().min(least);
            let errors = targets
                .iter()
                .zip(&values)
                .map(|(a, b)| f64::from(a - b).powi(2));
            error += errors.sum::<f64>() * f64::from(trellis.unit()).powi(2);
        }
        let weights = SEQUENCES * SEQUENCE;
        println!(
            "{},{},{:.6},{:.0}",
            scheme.code(),
            scheme.bits(),
            error / (RUNS * weights) as f64,
            weights as f64 / least
        );
    }
    Ok(())
}
