//! `nq quantize`: from a checkpoint to a quantized file of known quality.

use crate::cli::Global;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `nq quantize`.
#[derive(Args, Debug)]
pub struct QuantizeArgs {
    /// demo, a folder, a hub id or a name from `nq list` [default: Qwen/Qwen3-0.6B]
    pub model: Option<String>,
    /// Bits of a weight: 4 or 8
    #[arg(long, default_value_t = 4, value_parser = parse_bits)]
    pub bits: u32,
    /// How codes are chosen
    #[arg(long, value_enum, default_value_t = MethodArg::Gptq)]
    pub method: MethodArg,
    /// Inputs that share a scale: 32, 64, 128 or channel [default: 64 at 4 bits, 128 at 8]
    #[arg(long, value_name = "N")]
    pub group_size: Option<String>,
    /// Store a zero-point per group [default: at 4 bits]
    #[arg(long, overrides_with = "sym")]
    pub asym: bool,
    /// No zero-points [default: at 8 bits]
    #[arg(long)]
    pub sym: bool,
    /// Bits of the embedding and head: 4, 8 or 16
    #[arg(long, default_value_t = 8, value_parser = parse_head_bits)]
    pub head_bits: u32,
    /// Search the clipping range of each group (rtn; always on for awq and gptq)
    #[arg(long)]
    pub clip: bool,
    /// Folder to write [default: nq's own model folder]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace an existing output
    #[arg(long)]
    pub force: bool,
    /// Calibration text: self (sampled from the model) or a .txt or .jsonl file
    #[arg(long, default_value = "self", value_name = "self|FILE")]
    pub calib: String,
    /// Calibration tokens
    #[arg(long, value_name = "N")]
    pub calib_tokens: Option<usize>,
    /// Seed of everything random
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Fail if the mean KL divergence against the source exceeds this
    #[arg(long, value_name = "X")]
    pub max_kld: Option<f64>,
    /// Fail if the best token agrees less often than this share
    #[arg(long, value_name = "Y")]
    pub min_top1: Option<f64>,
    /// Text to measure quality on [default: held-out text sampled from the model]
    #[arg(long, value_name = "FILE")]
    pub eval_text: Option<PathBuf>,
    /// Print the plan and the memory it needs, and stop
    #[arg(long)]
    pub dry_run: bool,
    /// Go on with an interrupted run
    #[arg(long)]
    pub resume: bool,
}

/// Methods by their command-line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MethodArg {
    /// Second-order rounding with error feedback (arXiv 2210.17323)
    Gptq,
    /// Activation-aware scaling (arXiv 2306.00978)
    Awq,
    /// Round to nearest
    Rtn,
}

fn parse_bits(s: &str) -> Result<u32, String> {
    match s {
        "4" => Ok(4),
        "8" => Ok(8),
        _ => Err("expected 4 or 8".into()),
    }
}

fn parse_head_bits(s: &str) -> Result<u32, String> {
    match s {
        "4" => Ok(4),
        "8" => Ok(8),
        "16" => Ok(16),
        _ => Err("expected 4, 8 or 16".into()),
    }
}

/// Runs `nq quantize`.
pub fn run(args: &QuantizeArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let _ = (args, global);
    anyhow::bail!("quantize is being built")
}
