//! Chat templates in a process of their own: this program, started anew with a first argument that
//! is no subcommand.

use crate::chat::interrupt;
use nq_runtime::chat_template::{Isolation, isolate, serve};
use std::io;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The first argument of the process.
const ARGUMENT: &str = "template-process";

/// If this is that process: answers until its input ends. Else `None`, and templates of this
/// process are rendered in such a one from now on.
pub fn serve_or_isolate() -> Option<ExitCode> {
    if std::env::args_os().nth(1).is_some_and(|a| a == ARGUMENT) {
        return Some(match serve(io::stdin().lock(), io::stdout()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE, // the reader is gone
        });
    }
    isolate(Isolation {
        command,
        interrupted: interrupt::is_asked_for,
    });
    None
}

fn command() -> io::Result<Command> {
    // On Linux this names the running program even after an update has replaced its file.
    let running = Path::new("/proc/self/exe");
    let program = if running.exists() {
        running.into()
    } else {
        std::env::current_exe()?
    };
    let mut command = Command::new(program);
    command.arg(ARGUMENT);
    Ok(command)
}
