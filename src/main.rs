//! The `nq` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    nq_llm::isolate_templates();
    nq_llm::program(std::env::args_os()).into()
}
