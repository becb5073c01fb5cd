//! The threads and instructions that an engine runs with.

use crate::{Cpu, TeamOptions};
use nq_runtime::interface::LoadOptions;
use nq_runtime::{Error, Result};

/// The CPU with the threads and the instruction set of `options`.
///
/// # Errors
/// A forced instruction set that this CPU lacks; binding threads to cores on a system that cannot
/// do it.
pub fn open(options: &LoadOptions) -> Result<Cpu> {
    if options.pin && !cfg!(target_os = "linux") {
        return Err(Error::Unsupported {
            engine: "nq",
            what: "threads bound to cores",
            expected: "Linux".into(),
            found: std::env::consts::OS.into(),
        });
    }
    let team = TeamOptions {
        threads: options.threads,
        pin: options.pin,
    };
    Ok(Cpu::with(team, options.isa)?)
}
