//! A quantization method of your own: stochastic rounding, in which chance, weighted by the distance,
//! decides between the two neighbours. `cargo run --release --example method -- FOLDER OUT`
//!
//! As a part of nq, it would be a file in `quantize/src/methods` and a row of `METHODS`.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use nq_formats::{Bits, Checkpoint};
use nq_kernels::rng::Philox;
use nq_quantize::methods::{Method, Needs, Outcome, Problem};
use nq_quantize::{Fit, Job, QuantizeOptions, Rounded};
use serde_json::{Map, Value};
use std::path::Path;

struct Stochastic {
    seed: u64,
}

impl Method for Stochastic {
    fn name(&self) -> &'static str {
        "stochastic"
    }

    /// The method needs no statistics of inputs, so no text is run.
    fn needs(&self) -> Needs {
        Needs::Nothing
    }

    /// Stored in the record of the file.
    fn settings(&self) -> Map<String, Value> {
        Map::from_iter([("seed".into(), self.seed.into())])
    }

    fn round(&self, problem: &Problem<'_>) -> nq_quantize::Result<Outcome> {
        let (weight, grid) = (problem.weight, problem.grid);
        let mut rounded = Rounded::new(grid, weight.rows, weight.cols);
        let size = grid.group().size(weight.cols);
        let mut random = Philox::new(self.seed, 0);
        let groups = weight
            .data
            .chunks(weight.cols)
            .flat_map(|row| row.chunks(size));
        let codes = rounded
            .codes
            .chunks_mut(weight.cols)
            .flat_map(|row| row.chunks_mut(size));
        for ((values, codes), params) in groups.zip(codes).zip(&mut rounded.params) {
            *params = Fit::absmax().params(&grid, values, &[]);
            // Adds random noise as wide as a step, then rounds to nearest: up as often as the distance
            // says.
            let moved: Vec<f32> = (values.iter())
                .map(|w| w + params.scale * (random.uniform() - 0.5))
                .collect();
            grid.round(*params, &moved, codes);
        }
        Ok(Outcome {
            rounded,
            method: self.name(),
            fallbacks: Vec::new(),
        })
    }
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, out] = &args[..] else {
        anyhow::bail!("expected FOLDER OUT");
    };
    let checkpoint = Checkpoint::open(Path::new(folder))?;
    let options = QuantizeOptions {
        eval_tokens: Some(2048),
        ..QuantizeOptions::new(checkpoint.config(), Bits::B8, out)?
    };
    let method = Box::new(Stochastic { seed: 0 });
    let report = Job::with_method(&checkpoint, &options, method, &())?.run()?;
    if let Some(against) = report.quality.and_then(|q| q.against) {
        println!("mean KL divergence {:.5} nats", against.kld.mean);
    }
    Ok(())
}
