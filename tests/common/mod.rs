//! Helpers of the tests that run the real binary.

use std::path::Path;
use std::process::{Command, Output};

/// Runs `nq` with a model folder and caches of its own, so that nothing outside is seen or changed.
pub(crate) fn nq(home: &Path, args: &[&str]) -> Output {
    command(home, args).output().expect("nq runs")
}

/// The same as a command, to be run differently.
pub(crate) fn command(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nq"));
    command
        .args(args)
        .env("NQ_HOME", home)
        .env("HF_HOME", home.join("hf"))
        .env_remove("HF_HUB_CACHE")
        .env("HF_ENDPOINT", "http://127.0.0.1:9") // nothing listens there
        .env("NO_COLOR", "1");
    command
}

pub(crate) fn stdout(out: &Output) -> String {
    String::from_utf8(out.stdout.clone()).expect("stdout is UTF-8")
}

pub(crate) fn stderr(out: &Output) -> String {
    String::from_utf8(out.stderr.clone()).expect("stderr is UTF-8")
}
