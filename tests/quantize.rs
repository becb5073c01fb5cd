//! `nq quantize` from the outside: what it writes, that a run resumes to the same bytes, and
//! that a guard that fails leaves nothing but its work.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// Runs the binary on the demo model with little text, so that a run takes seconds.
fn quantize(out: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nq"))
        .args(["quantize", "demo", "--json", "--device", "cpu"])
        .args(["--calib-tokens", "1024", "--eval-tokens", "512", "--out"])
        .arg(out)
        .args(more)
        .output()
        .expect("the binary runs")
}

fn report(output: &Output) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}\n{error}"))
}

fn weights(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("model.safetensors")).expect("the folder has weights")
}

#[test]
fn a_failed_guard_keeps_its_work_and_resuming_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));

    let failed = quantize(&a, &["--max-kld", "0.000001"]);
    assert_eq!(failed.status.code(), Some(1));
    let error = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(error.contains("the worst layers: model.layers."), "{error}");
    assert!(error.contains("is above 0.000001"), "{error}");
    assert!(!a.exists());

    // Without --resume the kept work is not silently discarded.
    let refused = quantize(&a, &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--resume"));

    let resumed = quantize(&a, &["--resume"]);
    assert_eq!(resumed.status.code(), Some(0));
    let fresh = quantize(&b, &[]);
    assert_eq!(fresh.status.code(), Some(0));
    assert_eq!(weights(&a), weights(&b));

    let report = report(&resumed);
    assert_eq!(report["method"], "gptq");
    assert_eq!(report["bits"], 4);
    assert_eq!(report["group_size"], 64);
    assert_eq!(report["tensor_bytes"], 8_502_784);
    assert_eq!(report["fallbacks"], serde_json::json!([]));
    assert_eq!(report["layers"].as_array().map(Vec::len), Some(36));
    let kld = report["quality"]["kld"]["mean"].as_f64().unwrap();
    assert!(kld > 0.0 && kld < 0.1, "{kld}");

    // An existing output is not overwritten.
    let again = quantize(&b, &[]);
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("already there"));
}

#[test]
fn a_dry_run_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x");
    let output = quantize(&out, &["--dry-run", "--bits", "8"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(report(&output)["peak"].as_u64().unwrap() > 0);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn requests_that_fit_no_model_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x");
    let bad = quantize(&out, &["--group-size", "100"]);
    assert_eq!(bad.status.code(), Some(2));
    let missing = quantize(&out, &["--calib", "no-such.txt"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no-such.txt"));
}
