//! `nq chat`: a conversation in the terminal, or one answer for a script.

use crate::cli::Global;
use clap::{Args, ValueEnum};
use std::process::ExitCode;

/// Flags of `nq chat`.
#[derive(Args, Debug)]
pub struct ChatArgs {
    /// demo, a folder, a hub id or a name from `nq list` [default: the quantized Qwen3-0.6B]
    pub model: Option<String>,
    /// Answer this prompt and exit
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// System prompt
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Turn thinking off
    #[arg(long)]
    pub no_think: bool,
    /// Do not show the thinking
    #[arg(long)]
    pub hide_thinking: bool,
    /// Quantize an unquantized model at load: 4, 8 or 16 (keep it)
    #[arg(long, value_parser = clap::value_parser!(u32))]
    pub bits: Option<u32>,
    /// Softmax temperature; 0 is greedy [default: the model's]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Keep this many best tokens; 0 keeps all [default: the model's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Keep the smallest set of this probability [default: the model's]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Drop tokens below this share of the best one's probability
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Divide the logits of tokens already seen by this
    #[arg(long, value_name = "R")]
    pub repetition_penalty: Option<f32>,
    /// Subtract this from the logits of tokens already written
    #[arg(long, value_name = "R")]
    pub presence_penalty: Option<f32>,
    /// Seed of the sampler [default: drawn from the clock, shown by -v]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Most tokens of one answer
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Context length in tokens [default: the model's, at most 8192]
    #[arg(long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Bits of the KV cache
    #[arg(long, default_value_t = 16, value_parser = parse_kv)]
    pub kv: u32,
    /// What to do when the context is full
    #[arg(long, value_enum, default_value_t = Overflow::Stop)]
    pub on_overflow: Overflow,
}

/// What to do when the context is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Overflow {
    /// End the answer and say so
    Stop,
    /// Forget the oldest turns and say so
    DropOldest,
}

/// KV cache widths that commands take: 8, 16, or 32 for comparison with f32 references.
pub fn parse_kv(s: &str) -> Result<u32, String> {
    match s {
        "8" => Ok(8),
        "16" => Ok(16),
        "32" => Ok(32),
        _ => Err("expected 8, 16 or 32".into()),
    }
}

/// Runs `nq chat`.
pub fn run(args: &ChatArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let _ = (args, global);
    anyhow::bail!("chat is being built")
}
