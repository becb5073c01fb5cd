//! `nq doctor`: this machine, and what to do about problems.

use crate::cli::Global;
use std::process::ExitCode;

/// Runs `nq doctor`.
pub fn run(global: &Global) -> anyhow::Result<ExitCode> {
    let _ = global;
    anyhow::bail!("doctor is being built")
}
