//! The `nq` command. This package alone parses arguments, prints and draws progress.
#![forbid(unsafe_op_in_unsafe_fn)]
#![allow(unreachable_pub, reason = "a binary has no outside")]

mod at_load;
mod chat;
mod cli;
mod commands;
mod demo;
mod draft;
mod flags;
mod model;
mod system;
mod templates;
mod terminal;
mod texts;
mod written;

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = templates::serve_or_isolate() {
        return code;
    }
    let cli = cli::parse();
    match cli::run(cli) {
        Ok(code) => code,
        Err(e) if terminal::is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            if let Some(conflict) = e.downcast_ref() {
                cli::refuse(conflict);
            }
            terminal::say(&format!("nq: {e:#}"));
            match e.downcast_ref() {
                Some(nq_runtime::Error::Interrupted) => ExitCode::from(terminal::INTERRUPTED),
                _ => ExitCode::from(1),
            }
        }
    }
}
