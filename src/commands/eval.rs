//! `nq eval`: perplexity, and KL divergence against a reference.

use crate::cli::Global;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `nq eval`.
#[derive(Args, Debug)]
pub struct EvalArgs {
    /// One or several of: demo, a folder, a hub id, a name from `nq list` [default: Qwen/Qwen3-0.6B]
    pub models: Vec<String>,
    /// Compare with this model, token by token
    #[arg(long, value_name = "REF")]
    pub against: Option<String>,
    /// Text to evaluate on [default: WikiText-2 from the hub, else the built-in text]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Read only this many bytes of the text
    #[arg(long, value_name = "N")]
    pub text_bytes: Option<usize>,
    /// Window length in tokens [default: 2048 (hf) or 512 (llama), at most the model's]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// How windows are cut and scored
    #[arg(long, value_enum, default_value_t = ProtocolArg::Hf)]
    pub protocol: ProtocolArg,
    /// Bits of the KV cache
    #[arg(long, default_value_t = 16, value_parser = super::chat::parse_kv)]
    pub kv: u32,
    /// Write a report as .md or self-contained .html
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// Evaluation protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProtocolArg {
    /// Non-overlapping windows, every token but the first scored
    Hf,
    /// Windows of 512, the second half scored
    Llama,
}

/// Runs `nq eval`.
pub fn run(args: &EvalArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let _ = (args, global);
    anyhow::bail!("eval is being built")
}
