//! Helpers of the tests that run the real binary.

use std::path::Path;
#[cfg(target_os = "linux")]
use std::process::Stdio;
use std::process::{Command, Output};

/// The program, computing on one thread: tests run side by side, and with a thread for each core, they would wait for one
/// another.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nq"));
    command.env("NQ_THREADS", "1");
    command
}

/// Runs `nq` with a model folder and caches of its own, so that nothing outside is seen or changed.
pub(crate) fn nq(home: &Path, args: &[&str]) -> Output {
    command(home, args).output().expect("nq runs")
}

/// The same as a command, to be run differently.
pub(crate) fn command(home: &Path, args: &[&str]) -> Command {
    let mut command = program();
    command
        .args(args)
        .env("NQ_HOME", home)
        .env("HF_HOME", home.join("hf"))
        .env_remove("HF_HUB_CACHE")
        .env("HF_ENDPOINT", "http://127.0.0.1:9") // nothing listens there
        .env("NO_COLOR", "1");
    command
}

/// Runs a command: its peak resident memory in MB, and its output.
#[cfg(target_os = "linux")]
pub(crate) fn peak(command: &mut Command) -> (f64, Output) {
    let mut child =
        (command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()).expect("nq runs");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0.0;
    while child.try_wait().expect("it can be waited for").is_none() {
        peak = resident_peak(&status).unwrap_or(peak);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    (peak, child.wait_with_output().expect("its output"))
}

/// Peak resident memory in MB of a process that is still running.
#[cfg(target_os = "linux")]
fn resident_peak(status: &str) -> Option<f64> {
    let status = std::fs::read_to_string(status).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024.0 / 1e6)
}

pub(crate) fn stdout(out: &Output) -> String {
    String::from_utf8(out.stdout.clone()).expect("stdout is UTF-8")
}

pub(crate) fn stderr(out: &Output) -> String {
    String::from_utf8(out.stderr.clone()).expect("stderr is UTF-8")
}
