//! Chat templates are rendered in processes of their own: this program, restarted with a first argument that
//! no user gives.

#[cfg(feature = "cli")]
use crate::chat::interrupt::is_asked_for;
use nq_runtime::chat_template::{Isolation, isolate, serve};
use std::io;
use std::path::Path;
use std::process::Command;

/// The first argument of such a process.
const ARGUMENT: &str = "template-process";

/// From now on, renders chat templates in processes of their own: a template is a program by a model's makers, which
/// could otherwise fill this program's memory or overflow its stack.
///
/// A program calls this before anything else in `main`, since the processes are the program itself, started again
/// with a first argument `template-process`. In such a process this function does not return.
pub fn isolate_templates() {
    if std::env::args_os().nth(1).is_some_and(|a| a == ARGUMENT) {
        serve_templates();
    }
    isolate_templates_by(this_program);
}

/// Like [`isolate_templates`], for code that is not a program of its own: `command` starts a process that
/// calls [`serve_templates`].
pub fn isolate_templates_by(command: fn() -> io::Result<Command>) {
    isolate(Isolation {
        command,
        interrupted: is_asked_for,
    });
}

/// In a process that [`isolate_templates_by`] started: renders until its input ends, then ends the process.
pub fn serve_templates() -> ! {
    let served = serve(io::stdin().lock(), io::stdout());
    // An error means that nobody reads the answers any more.
    std::process::exit(i32::from(served.is_err()))
}

/// A program without nq's command line ends its answers by other means.
#[cfg(not(feature = "cli"))]
fn is_asked_for() -> bool {
    false
}

fn this_program() -> io::Result<Command> {
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
