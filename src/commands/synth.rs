//! `nq synth`: a random checkpoint of a published shape.

use crate::flags::Global;
use crate::terminal::{Terminal, human_bytes, print_line, say};
use anyhow::Context;
use clap::Args;
use nq_formats::Checkpoint;
use nq_formats::synth;
use nq_model::Preset;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Flags of `nq synth`.
#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct SynthArgs {
    #[arg(help = presets(), value_parser = parse_preset)]
    pub preset: Preset,
    /// Folder to write; must not exist
    pub dir: PathBuf,
    /// Seed of the weights
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// The names of all presets.
fn presets() -> String {
    let names: Vec<_> = Preset::all().map(|p| p.name).collect();
    names.join(", ")
}

/// Parses the name of a preset, for flags.
pub(crate) fn parse_preset(name: &str) -> Result<Preset, String> {
    Preset::find(name).ok_or_else(|| format!("expected one of {}", presets()))
}

/// Runs `nq synth`.
pub fn run(args: &SynthArgs, global: &Global) -> anyhow::Result<ExitCode> {
    if let Some(threads) = global.threads {
        // Fails only if a pool exists already, which it does not here.
        let _ = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global();
    }
    let start = Instant::now();
    synth::write(
        &args.dir,
        &args.preset.config(),
        args.seed,
        &Terminal::new(),
    )?;
    let seconds = start.elapsed().as_secs_f64();
    let written = Checkpoint::open(&args.dir).context("the folder just written")?;
    let bytes = written.store().file_bytes();
    if global.json {
        let report = serde_json::json!({
            "out": args.dir, "preset": args.preset.name, "seed": args.seed,
            "parameters": written.config().parameters(), "file_bytes": bytes, "seconds": seconds,
        });
        print_line(&serde_json::to_string_pretty(&report)?)?;
    } else {
        say(&format!(
            "wrote {} ({}, random weights, seed {}) in {seconds:.1} s",
            args.dir.display(),
            human_bytes(bytes),
            args.seed
        ));
    }
    Ok(ExitCode::SUCCESS)
}
