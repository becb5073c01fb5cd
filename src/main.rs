//! The `nq` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        // Mesa's layer that asks a desktop which GPU it prefers prints an error where there is no desktop.
        // SAFETY: the process has no other thread yet.
        unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    }
    nq_llm::isolate_templates();
    nq_llm::program(std::env::args_os()).into()
}
