//! `nq synth`: a random checkpoint of a published shape.

use crate::cli::Global;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `nq synth`.
#[derive(Args, Debug)]
pub struct SynthArgs {
    /// qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b or qwen3-32b
    pub preset: String,
    /// Folder to write; must not exist
    pub dir: PathBuf,
    /// Seed of the weights
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Runs `nq synth`.
pub fn run(args: &SynthArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let _ = (args, global);
    anyhow::bail!("synth is being built")
}
