//! `nq bench`: tokens per second beside the machine's measured bandwidth.

use crate::cli::Global;
use clap::{Args, ValueEnum};
use std::process::ExitCode;

/// Flags of `nq bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// demo, a folder, a hub id or a name from `nq list` [default: Qwen/Qwen3-0.6B]
    #[arg(conflicts_with = "preset")]
    pub model: Option<String>,
    /// Random weights of a published shape: qwen3-0.6b, -1.7b, -4b, -8b, -14b or -32b
    #[arg(long)]
    pub preset: Option<String>,
    /// Quantize an unquantized model at load: 4, 8 or 16 (keep it)
    #[arg(long)]
    pub bits: Option<u32>,
    /// Prompt tokens of the prefill test; 0 leaves it out
    #[arg(short = 'p', long, default_value_t = 512, value_name = "N")]
    pub prompt_tokens: usize,
    /// Tokens of the decode test; 0 leaves it out
    #[arg(short = 'n', long, default_value_t = 128, value_name = "N")]
    pub gen_tokens: usize,
    /// Tokens already in the context when the test starts
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub depth: usize,
    /// Sequences decoded at once
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub batch: usize,
    /// Measured repeats after a warm-up
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub repeats: usize,
    /// What runs the model
    #[arg(long, value_enum, default_value_t = EngineArg::Nq)]
    pub engine: EngineArg,
    /// Show time, bandwidth and calls per operation
    #[arg(long)]
    pub breakdown: bool,
    /// Bits of the KV cache
    #[arg(long, default_value_t = 16, value_parser = super::chat::parse_kv)]
    pub kv: u32,
}

/// Engines by their command-line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EngineArg {
    /// nq's own
    Nq,
    /// candle-transformers, the baseline
    Candle,
}

/// Runs `nq bench`.
pub fn run(args: &BenchArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let _ = (args, global);
    anyhow::bail!("bench is being built")
}
