//! `nq list` and `nq rm`: nq's own model folder.

use crate::cli::Global;
use clap::Args;
use std::process::ExitCode;

/// Flags of `nq rm`.
#[derive(Args, Debug)]
pub struct RmArgs {
    /// A name from `nq list`
    pub name: String,
    /// Do not ask
    #[arg(short, long)]
    pub yes: bool,
}

/// Runs `nq list`.
pub fn list(global: &Global) -> anyhow::Result<ExitCode> {
    let _ = global;
    anyhow::bail!("list is being built")
}

/// Runs `nq rm`.
pub fn remove(args: &RmArgs) -> anyhow::Result<ExitCode> {
    let _ = args;
    anyhow::bail!("rm is being built")
}
