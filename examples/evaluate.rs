//! Compares a model with another: `cargo run --release --example evaluate -- MODEL REFERENCE TEXT`, two
//! folders with the same vocabulary and a text file.

#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use anyhow::Context;
use nq_evals::{EvalSpec, Protocol, compare};
use nq_formats::Checkpoint;
use nq_runtime::{ActivationChoice, LoadOptions, Tokenizer};
use std::path::Path;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, reference, text] = &args[..] else {
        anyhow::bail!("expected MODEL REFERENCE TEXT");
    };
    // Activations are not rounded, so that only the weights are compared.
    let options = LoadOptions {
        activations: ActivationChoice::F32,
        ..LoadOptions::default()
    };
    let load = |folder: &str| -> anyhow::Result<_> {
        let checkpoint = Checkpoint::open(Path::new(folder))?;
        let engine = nq_load::load(checkpoint.config(), checkpoint.store(), &options, &())?;
        Ok((Tokenizer::from_files(checkpoint.files())?, engine))
    };
    let ((tokenizer, model), (_, reference)) = (load(model)?, load(reference)?);
    let tokens = tokenizer.encode(&std::fs::read_to_string(text).context("the text")?)?;
    let spec = EvalSpec {
        max_windows: Some(8),
        ..EvalSpec::new(Protocol::Llama, 512, "a text")
    };
    let measured = compare(model.as_ref(), reference.as_ref(), &tokens, &spec, &())?;
    let against = measured.report.against.context("a reference")?;
    println!(
        "perplexity {:.3}, of the reference {:.3}",
        measured.report.ppl, against.ppl_ref
    );
    println!(
        "KL divergence {:.5}, at 99 % {:.5}",
        against.kld.mean, against.kld.p99
    );
    Ok(())
}
