//! What is said of the machine: by `nq doctor`, and beside figures in the records of `nq bench`.

#![cfg(feature = "demo")]

use crate::common::program;
use crate::eval_bench::{bench_rows, json, keys, nq, stderr};
use nq_evals::{BenchRow, RECORD_FORM, Record};
use std::fs;

/// Figures as they are printed, and the hash that `sha256sum` finds.
#[test]
fn bench_writes_a_record_of_files_and_machine() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("record.json");
    let rows = bench_rows("demo", &["--no-chat", "--record", path.to_str().unwrap()]);
    let text = fs::read_to_string(&path).unwrap();
    let record: Record = serde_json::from_str(&text).unwrap();
    assert_eq!(record.form, RECORD_FORM);
    let printed: Vec<BenchRow> = serde_json::from_value(rows.into()).unwrap();
    assert_eq!(record.speed, printed);
    assert!(record.protocol.starts_with("nq bench -p 8 -n 4"), "{text}");
    let [model] = &record.models[..] else {
        panic!("{text}");
    };
    assert_eq!((&*model.name, &*model.codes), ("demo", "unquantized"));
    assert_eq!(model.files.len(), 2, "{text}");
    for file in &model.files {
        let weights = fs::read(format!("assets/demo/{}", file.name)).unwrap();
        assert_eq!(file.bytes, weights.len() as u64);
        assert_eq!(file.sha256, nq_formats::hash::sha256_hex(&weights));
    }
    assert!(!text.contains(home.path().to_str().unwrap()), "{text}");

    let none = home.path().join("none/record.json");
    let out = nq(&[
        "bench",
        "demo",
        "-p",
        "8",
        "-n",
        "0",
        "--repeats",
        "1",
        "--record",
        none.to_str().unwrap(),
    ]);
    assert!(
        !out.status.success() && stderr(&out).contains("--record"),
        "{}",
        stderr(&out)
    );
}

#[test]
fn doctor_describes_the_machine() {
    let r = json(&nq(&["doctor", "--json"]));
    keys(
        &r,
        &[
            "version",
            "cpu",
            "memory",
            "gpu",
            "adapters",
            "folders",
            "environment",
            "problems",
        ],
    );
    assert!(r["cpu"]["threads"].as_u64().unwrap() >= 1);
    assert!(
        r["cpu"]["isas"]
            .as_array()
            .unwrap()
            .contains(&r["cpu"]["isa"])
    );
    for problem in r["problems"].as_array().unwrap() {
        assert!(!problem["remedy"].as_str().unwrap().is_empty(), "{problem}");
    }

    let out = program()
        .arg("doctor")
        .env("HF_TOKEN", "hf_secret")
        .env("NQ_HOME", "/nowhere/nq")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success());
    assert!(
        text.contains("HF_TOKEN=(set)") && !text.contains("hf_secret"),
        "{text}"
    );
    assert!(text.contains("/nowhere/nq/models"), "{text}");
}
