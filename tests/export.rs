//! `nq quantize --format` and `nq convert --requantize` through the real binary.

use crate::common::{nq, stderr, stdout};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Runs `nq` with `--json` and returns its report.
#[track_caller]
fn report(home: &Path, args: &[&str]) -> Value {
    let mut all = args.to_vec();
    all.push("--json");
    let output = nq(home, &all);
    assert!(output.status.success(), "{}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

/// Quantizes the demo model, with little text and no calibration.
const QUANTIZE: [&str; 8] = [
    "quantize",
    "demo",
    "--method",
    "rtn",
    "--eval-tokens",
    "256",
    "--device",
    "cpu",
];

fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_model_is_quantized_for_another_engine() {
    for (format, more, dtype) in [
        ("gptq", &[][..], "int4 g64 symmetric"),
        ("gptq", &["--bits", "8"], "int8 g128 symmetric"),
        ("awq", &["--group-size", "128"], "int4 g128 asymmetric"),
        ("compressed-tensors", &[], "int4 g64 asymmetric"),
        ("gguf", &["--head-bits", "8"], "Q4_K"),
        ("gguf", &["--sym"], "Q4_0"),
        ("gguf", &["--bits", "6", "--simple"], "Q6_K"),
        ("gguf", &["--bits", "8"], "Q8_0"),
    ] {
        let home = tempfile::tempdir().unwrap();
        let out = home.path().join("out");
        let mut args = QUANTIZE.to_vec();
        args.extend(["--format", format, "--out", out.to_str().unwrap()]);
        args.extend(more);
        let made = report(home.path(), &args);
        assert_eq!(made["format"], format);
        assert_eq!(made["out"], out.to_str().unwrap());
        assert!(made["quality"]["kld"]["mean"].as_f64().unwrap() < 0.2);
        // Only the result is left, and it matches the report.
        assert_eq!(files(home.path()), ["out"], "{format}");
        let seen = report(home.path(), &["inspect", out.to_str().unwrap(), "--verify"]);
        for key in ["tensor_bytes", "file_bytes", "bits_per_weight"] {
            assert_eq!(seen[key], made[key], "{format} {key}");
        }
        assert_eq!(seen["format"], format);
        if format == "gguf" {
            let all = seen["tensors"].as_array().unwrap();
            let linear = |t: &&Value| t["name"] == "blk.0.attn_q.weight";
            assert_eq!(all.iter().find(linear).unwrap()["dtype"], dtype);
        } else {
            // Another conversion finds the quantized weights.
            let again = home.path().join("again");
            let args = ["convert", out.to_str().unwrap(), again.to_str().unwrap()];
            let converted = report(home.path(), &[&args[..], &["--format", "nq"]].concat());
            assert_eq!(converted["weights"][1]["from"], dtype);
            // Embedding and head are as loaders need them.
            assert_eq!(converted["weights"][0]["from"], "BF16");
        }
    }
}

#[test]
fn what_a_format_cannot_hold_is_refused_before_any_work() {
    let home = tempfile::tempdir().unwrap();
    let out = home.path().join("out");
    for (more, parts) in [
        (
            &["--format", "gptq", "--asym"][..],
            &["GPTQ", "no zero-point of 0", "q_proj"][..],
        ),
        (
            &["--format", "awq", "--bits", "8"],
            &["4 bits, the only width of AWQ", "found 8"],
        ),
        (
            &["--format", "gguf", "--bits", "8", "--asym"],
            &["GGUF", "no zero-points", "int8 g32 asymmetric"],
        ),
    ] {
        let mut args = QUANTIZE.to_vec();
        args.extend(["--out", out.to_str().unwrap()]);
        args.extend(more);
        let output = nq(home.path(), &args);
        assert_eq!(output.status.code(), Some(1), "{more:?}");
        for part in parts {
            assert!(
                stderr(&output).contains(part),
                "{part}: {}",
                stderr(&output)
            );
        }
        assert!(files(home.path()).is_empty());
    }
    std::fs::create_dir(&out).unwrap();
    let mut args = QUANTIZE.to_vec();
    args.extend(["--format", "gguf", "--out", out.to_str().unwrap()]);
    let output = nq(home.path(), &args);
    assert!(stderr(&output).contains("already there; --force"));
    assert_eq!(files(home.path()), ["out"]);
}

/// A GGUF file of mixed types, with offsets, which folder formats do not have.
fn mixed(home: &Path) -> PathBuf {
    let out = home.join("mixed.gguf");
    let args = ["convert", "demo", out.to_str().unwrap()];
    report(
        home,
        &[&args[..], &["--format", "gguf", "--type", "q4_k_m"]].concat(),
    );
    out
}

#[test]
fn weights_are_rounded_again_only_where_asked() {
    let home = tempfile::tempdir().unwrap();
    let source = mixed(home.path());
    for (format, name, schemes) in [
        ("awq", "AWQ", &["int4 g32 asymmetric"][..]),
        (
            "gptq",
            "GPTQ",
            &["int4 g32 symmetric", "int8 g16 symmetric"],
        ),
        (
            "compressed-tensors",
            "compressed-tensors",
            &["int4 g32 asymmetric", "int8 g16 symmetric"],
        ),
    ] {
        let out = home.path().join(format);
        let args = ["convert", source.to_str().unwrap(), out.to_str().unwrap()];
        let args = [&args[..], &["--format", format]].concat();
        let refused = nq(home.path(), &args);
        assert_eq!(refused.status.code(), Some(1));
        for part in [name, "int4 g32 offset", "--requantize", "nq quantize"] {
            assert!(stderr(&refused).contains(part), "{}", stderr(&refused));
        }
        assert!(!out.exists());

        let made = report(
            home.path(),
            &[&args[..], &["--requantize", "--verify"]].concat(),
        );
        let notes = made["notes"].to_string();
        assert!(notes.contains("loads in transformers 5.17"), "{notes}");
        let weights = made["weights"].as_array().unwrap();
        let again = |w: &&Value| w["change"] == "quantized a second time";
        assert!(weights.iter().filter(again).count() >= 20, "{format}");
        for w in weights.iter().filter(again) {
            assert!(w["from"].as_str().unwrap().ends_with("_K"), "{w}");
            assert!(schemes.iter().any(|s| w["to"] == *s), "{w}");
        }
        // The embedding is unquantized there: its numbers are rounded to the model's type.
        assert_eq!(weights[0]["from"], "Q6_K");
        assert_eq!(weights[0]["change"], "values rounded to BF16");
        let worst = made["verify"]["worst_relative_rms"].as_f64().unwrap();
        assert!(worst > 1e-3 && worst < 0.15, "{format}: {worst}");
    }
    // Weights that fit are kept, whatever is allowed.
    let plain = home.path().join("plain");
    let awq = home.path().join("awq");
    let args = ["convert", awq.to_str().unwrap(), plain.to_str().unwrap()];
    let made = report(
        home.path(),
        &[&args[..], &["--format", "awq", "--requantize", "--verify"]].concat(),
    );
    assert_eq!(made["verify"]["identical"], true);
}

/// What convert refuses is nowhere, and an older output stays as it was.
#[test]
fn what_is_refused_is_not_written() {
    let home = tempfile::tempdir().unwrap();
    let source = mixed(home.path());
    let source = source.to_str().unwrap();
    let damaged = home.path().join("damaged");
    let args = [
        "convert",
        source,
        damaged.to_str().unwrap(),
        "--format",
        "nq",
    ];
    assert!(nq(home.path(), &args).status.success());
    let tokenizer = damaged.join("tokenizer.json");
    let text = std::fs::read(&tokenizer).unwrap();
    std::fs::write(&tokenizer, &text[..text.len() / 2]).unwrap();
    let (new, old) = (home.path().join("new"), home.path().join("old"));
    let args = ["convert", source, old.to_str().unwrap(), "--format", "nq"];
    assert!(nq(home.path(), &args).status.success());
    let before = files(home.path());
    for (out, force) in [(&new, &[][..]), (&old, &["--force"])] {
        let args = ["convert", damaged.to_str().unwrap(), out.to_str().unwrap()];
        let refused = nq(
            home.path(),
            &[&args[..], &["--format", "nq"], force].concat(),
        );
        assert_eq!(refused.status.code(), Some(1));
        assert!(
            stderr(&refused).contains("tokenizer.json"),
            "{}",
            stderr(&refused)
        );
        assert_eq!(files(home.path()), before);
    }
    report(home.path(), &["inspect", old.to_str().unwrap(), "--verify"]);
}
