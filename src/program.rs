//! The program `nq`: what its binary and the command of its Python package run.

use crate::{cli, flags, terminal};
use nq_runtime::Error;
use std::ffi::OsString;
use std::process::ExitCode;

/// Runs `nq` with a command line, whose first word is the program's name, and returns its exit code. Handles signals
/// and prints: not for a program that does something else as well.
#[doc(hidden)]
pub fn program(command_line: impl IntoIterator<Item = OsString>) -> u8 {
    let words = flags::command_line(command_line);
    match cli::run(cli::parse(words)) {
        Ok(code) => number(code),
        Err(e) if terminal::is_broken_pipe(&e) => 0,
        Err(e) => {
            if let Some(conflict) = e.downcast_ref() {
                cli::refuse(conflict);
            }
            terminal::say(&format!("nq: {e:#}"));
            match e.downcast_ref() {
                Some(Error::Interrupted) => terminal::INTERRUPTED,
                _ => 1,
            }
        }
    }
}

/// The number of an exit code, which the standard library does not tell.
fn number(code: ExitCode) -> u8 {
    (0..=u8::MAX)
        .find(|&n| ExitCode::from(n) == code)
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::number;
    use std::process::ExitCode;

    #[test]
    fn exit_codes_have_numbers() {
        for n in [0, 1, 2, 130, 255] {
            assert_eq!(number(ExitCode::from(n)), n);
        }
    }
}
