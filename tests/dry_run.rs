//! `nq quantize --dry-run` through the real binary.

use crate::common::program;
use crate::quantize::{quantize, report};

#[test]
fn a_dry_run_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x");
    let output = quantize(&out, &["--dry-run", "--bits", "8"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(report(&output)["peak_bytes"].as_u64().unwrap() > 0);
    assert!(report(&output)["tuning"].is_null());
    let output = quantize(&out, &["--dry-run", "--method", "auto"]);
    let tuning = report(&output)["tuning"].take();
    assert_eq!(tuning["on_cpu"], true);
    assert_eq!(tuning["plan"]["codes"], true);
    // At least latent weights, gradients, two moments and the teacher, in f32.
    let bytes = tuning["plan"]["device_bytes"].as_u64().unwrap();
    assert!(bytes > 5 * 4 * 13_900_000 && bytes <= tuning["limit_bytes"].as_u64().unwrap());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// The stages to come are known beforehand, and how long they may take.
#[test]
fn a_dry_run_lists_the_stages() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x");
    let stages = |more: &[&str]| -> Vec<String> {
        let report = report(&quantize(&out, &[&["--dry-run"], more].concat()));
        let all = report["stages"].as_array().unwrap().iter();
        all.map(|s| {
            assert!(s["seconds"].as_f64().unwrap() > 0.0, "{report}");
            s["name"].as_str().unwrap().to_owned()
        })
        .collect()
    };
    let load = "loading weights";
    let text = ["hash source", load, "sampling calibration text"];
    let made = ["quantizing layers", "quantizing embedding and head"];
    let write = ["write"];
    let measured = [load, "reference", "KL divergence", load, "KL divergence"];
    assert_eq!(
        stages(&[]),
        [
            &text[..],
            &["sampling held-out text"],
            &made,
            &measured,
            &write
        ]
        .concat()
    );
    assert_eq!(
        stages(&["--no-measure"]),
        [&text[..], &made, &write].concat()
    );
    let sensitivity = [load, "sampling text to probe with", "measuring sensitivity"];
    assert_eq!(
        stages(&["--no-measure", "--target-size", "9MB"]),
        [&text[..], &sensitivity, &made, &write].concat()
    );
    let mut command = program();
    let said = command.args(["quantize", "demo", "--device", "cpu", "--dry-run", "--out"]);
    let said = said.arg(&out).output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(
        said.contains("time: about ") && said.contains(made[0]),
        "{said}"
    );
}

/// A dry run prints its plan on stdout, with the folder and whether it is
/// free.
#[test]
fn a_dry_run_says_where_the_result_would_go() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x");
    let plan = |more: &[&str]| {
        let mut command = program();
        command.args(["quantize", "demo", "--device", "cpu", "--dry-run", "--out"]);
        let output = command.arg(&out).args(more).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        String::from_utf8(output.stdout).unwrap()
    };
    let free = plan(&[]);
    assert!(
        free.ends_with(&format!("out: {}\n", out.display())),
        "{free}"
    );
    assert!(
        free.contains("4-bit mix, 8.50 MB") && free.contains("memory: "),
        "{free}"
    );
    std::fs::create_dir(&out).unwrap();
    assert!(plan(&[]).contains("needs --force"));
    assert!(plan(&["--force"]).contains("replaced"));
}
