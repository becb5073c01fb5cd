//! `nq inspect`: what a checkpoint holds.

use crate::cli::Global;
use clap::Args;
use std::process::ExitCode;

/// Flags of `nq inspect`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// demo, a folder, a file, a hub id or a name from `nq list`
    pub path: String,
}

/// Runs `nq inspect`.
pub fn run(args: &InspectArgs, global: &Global) -> anyhow::Result<ExitCode> {
    let _ = (args, global);
    anyhow::bail!("inspect is being built")
}
