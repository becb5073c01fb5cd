//! `nq inspect` and `nq synth` through the real binary.

use crate::common::{nq, stderr};
use serde_json::Value;

fn demo() -> String {
    format!("{}/assets/demo", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_checkpoint_is_listed_and_verified() {
    let home = tempfile::tempdir().expect("a folder");
    let out = nq(home.path(), &["inspect", &demo(), "--json", "--verify"]);
    assert!(out.status.success(), "{}", stderr(&out));
    let report: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(report["format"], "safetensors");
    assert_eq!(report["parameters"], 13_900_544);
    assert_eq!(report["tensor_bytes"], 27_801_088);
    assert_eq!(report["bits_per_weight"], 16.0);
    assert_eq!(report["verified"], true);
    let rest = report["not_checked"].as_array().unwrap();
    assert!(
        rest[0].as_str().unwrap().contains("stay finite"),
        "{rest:?}"
    );
    assert_eq!(report["config"]["hidden_size"], 512);
    assert!(report["quantization"].is_null());
    let tensors = report["tensors"].as_array().expect("a list");
    assert_eq!(tensors.len(), 57);
    assert_eq!(tensors[0]["name"], "model.embed_tokens.weight");
    assert_eq!(tensors[0]["shape"], serde_json::json!([4096, 512]));
    assert_eq!(tensors[0]["bits"], 16.0);

    let out = nq(home.path(), &["inspect", &demo(), "--verify", "--tensors"]);
    let table = String::from_utf8(out.stdout).expect("UTF-8");
    assert_eq!(table.matches("  verified ").count(), 1, "{table}");
    // What sums it up first: the table of tensors may be long.
    assert!(
        table.starts_with("demo (") && table.contains("\n\nTENSOR"),
        "{table}"
    );
    for part in [
        "model.norm.weight",
        "[1024, 512]",
        "27801088",
        "bits per weight  16.0000",
    ] {
        assert!(table.contains(part), "{part:?} is not in {table}");
    }
    // Without the flag, what a user asks first fits a screen.
    let out = nq(home.path(), &["inspect", &demo()]);
    let short = String::from_utf8(out.stdout).expect("UTF-8");
    assert!(short.lines().count() < 24, "{short}");
    let lines: Vec<&str> = short.lines().skip(1).collect();
    for (line, start) in lines.iter().zip([
        "  context          1024 tokens",
        "  chat template    yes",
        "  sampling         ",
        "  licence          MIT or Apache-2.0, at your choice",
        "  format           safetensors",
    ]) {
        assert!(line.starts_with(start), "{line:?}, expected {start:?}");
    }
    assert!(
        short.contains("57 tensors (--tensors lists them)"),
        "{short}"
    );
}

#[test]
fn a_truncated_file_is_named() {
    let home = tempfile::tempdir().expect("a folder");
    let dir = home.path().join("broken");
    std::fs::create_dir(&dir).expect("a folder");
    for entry in std::fs::read_dir(demo()).expect("the demo model") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, dir.join(path.file_name().expect("a name"))).expect("a copy");
    }
    let shard = dir.join("model-00002-of-00002.safetensors");
    let bytes = std::fs::read(&shard).expect("the shard");
    std::fs::write(&shard, &bytes[..bytes.len() - 1000]).expect("a shorter one");
    let out = nq(home.path(), &["inspect", dir.to_str().expect("UTF-8")]);
    assert_eq!(out.status.code(), Some(1));
    assert!(out.stdout.is_empty());
    let said = stderr(&out);
    for part in [
        "model-00002-of-00002.safetensors",
        "bytes, as the header says",
        "an incomplete download",
    ] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
}

#[test]
fn synth_refuses_what_it_cannot_write() {
    let home = tempfile::tempdir().expect("a folder");
    let path = home.path().to_str().expect("UTF-8");
    let out = nq(home.path(), &["synth", "qwen3-7b", path]);
    assert_eq!(out.status.code(), Some(2));
    assert!(stderr(&out).contains("qwen3-8b"), "{}", stderr(&out));
    let out = nq(home.path(), &["synth", "qwen3-0.6b", path]);
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("already there"), "{}", stderr(&out));
}
