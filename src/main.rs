//! The `nq` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    let is_set = |name: &str| std::env::var_os(name).is_some();
    if !is_set("XDG_RUNTIME_DIR") && !is_set("NODEVICE_SELECT") {
        // A Vulkan layer of Mesa asks the desktop which GPU it prefers, and prints an error where there is no desktop.
        // SAFETY: the process has no other thread yet.
        unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    }
    nq_llm::isolate_templates();
    nq_llm::program(std::env::args_os()).into()
}
