//! Renders chat templates in a process of their own: this program, restarted with a first argument that
//! is not a subcommand.

use crate::chat::interrupt;
use nq_runtime::chat_template::{Isolation, isolate, serve};
use std::io;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The first argument of the process.
const ARGUMENT: &str = "template-process";

/// In that process: answers until its input ends. Otherwise returns `None`, and from now on templates
/// of this process are rendered in such processes.
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
