//! Mixtures of experts from the command line: quantized, written, read back and run.

use crate::common::{nq, stderr, stdout};
use nq_formats::synth;
use nq_model::ModelConfig;
use nq_testkit::models::experts;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

/// A random mixture of 4 experts, 2 per token.
fn mixture(dir: &Path) -> PathBuf {
    let config = ModelConfig {
        hidden_size: 128,
        intermediate_size: 80,
        experts: Some(experts(4, 64, 0)),
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 32,
        vocab_size: 300,
        max_position_embeddings: 512,
        eos_token_ids: vec![299],
        ..nq_model::Preset::find("30b-a3b").unwrap().config()
    };
    let to = dir.join("mixture");
    synth::write(&to, &config, 1, &()).unwrap();
    to
}

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[track_caller]
fn succeeded(out: Output) -> Output {
    assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
    out
}

fn quantize(home: &Path, model: &Path, to: &Path, more: &[&str]) -> Output {
    let mut args = vec!["quantize", path(model), "--out", path(to), "--json"];
    let few = ["--calib-tokens", "2048", "--eval-tokens", "512"];
    args.extend(few.iter().chain(["--device", "cpu"].iter()));
    args.extend(more);
    nq(home, &args)
}

#[test]
fn every_method_quantizes_a_mixture_that_runs_and_is_converted() {
    let dir = tempfile::tempdir().unwrap();
    let (home, model) = (dir.path(), mixture(dir.path()));
    let mut divergences = Vec::new();
    for method in ["rtn", "awq", "gptq", "auto"] {
        let to = home.join(method);
        let bits = ["--bits", "4", "--group-size", "32", "--method", method];
        let made = succeeded(quantize(home, &model, &to, &bits));
        let report: Value = serde_json::from_str(&stdout(&made)).unwrap();
        let names = |row: &Value| row["name"].as_str().unwrap().to_owned();
        let rows: Vec<String> = report["layers"]
            .as_array()
            .unwrap()
            .iter()
            .map(names)
            .collect();
        assert!(rows.contains(&"model.layers.1.mlp.experts.down_proj".to_owned()));
        assert!(
            !rows.iter().any(|name| name.ends_with("mlp.gate")),
            "{rows:?}"
        );
        divergences.push(report["quality"]["kld"]["mean"].as_f64().unwrap());
        let said = stderr(&made).contains("a mixture of experts is not tuned");
        assert_eq!(said, method == "auto");
    }
    // Random weights do not produce structured text: all that can be checked here is that the methods
    // have similar results.
    assert!(
        divergences.iter().all(|&d| d > 0.0 && d < 0.05),
        "{divergences:?}"
    );

    let gptq = home.join("gptq");
    let shown = stdout(&succeeded(nq(home, &["inspect", path(&gptq), "--verify"])));
    assert!(shown.contains("2 of 4 a token"), "{shown}");
    let answer = nq(
        home,
        &[
            "chat",
            path(&gptq),
            "-p",
            "hi",
            "--max-tokens",
            "4",
            "--temperature",
            "0",
        ],
    );
    succeeded(answer);
    let json = |file: &Path| {
        let args = [
            "eval",
            path(file),
            "--against",
            path(&model),
            "--json",
            "--text",
        ];
        let text = home.join("text.txt");
        std::fs::write(
            &text,
            "The quick brown fox jumps over the lazy dog. ".repeat(20),
        )
        .unwrap();
        let out = succeeded(nq(
            home,
            &[&args[..], &[path(&text), "--ctx", "64"]].concat(),
        ));
        let report: Value = serde_json::from_str(&stdout(&out)).unwrap();
        report[0]["kld"]["mean"].as_f64().unwrap()
    };
    let own = json(&gptq);
    for (format, name) in [("gguf", "m.gguf"), ("compressed-tensors", "ct")] {
        let to = home.join(name);
        let args = [
            "convert",
            path(&gptq),
            path(&to),
            "--format",
            format,
            "--verify",
        ];
        succeeded(nq(home, &args));
        let other = json(&to);
        assert!(
            (other - own).abs() < 0.05 * own + 1e-5,
            "{format}: {other}, not {own}"
        );
    }
}

#[test]
fn schemes_of_a_mixture_are_chosen_under_a_budget_and_work_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (home, model) = (dir.path(), mixture(dir.path()));
    let (a, b) = (home.join("a"), home.join("b"));
    let budget = ["--bits", "4", "--method", "gptq", "--target-bpw", "6"];
    let whole = succeeded(quantize(home, &model, &b, &budget));
    let whole: Value = serde_json::from_str(&stdout(&whole)).unwrap();
    // Missed, but not so far beyond 8 bits that the work would not begin.
    let limit = 0.7 * whole["quality"]["kld"]["mean"].as_f64().unwrap();
    let limit = limit.to_string();
    let fails = [&budget[..], &["--max-kld", &limit]].concat();
    let failed = quantize(home, &model, &a, &fails);
    assert_eq!(failed.status.code(), Some(1), "{}", stderr(&failed));
    let resumed = succeeded(quantize(
        home,
        &model,
        &a,
        &[&budget[..], &["--resume"]].concat(),
    ));
    assert!(
        stderr(&resumed).contains("3 of 3 steps done"),
        "{}",
        stderr(&resumed)
    );
    let report: Value = serde_json::from_str(&stdout(&resumed)).unwrap();
    assert!(report["bits_per_weight"].as_f64().unwrap() <= 6.0);
    assert!(!report["allocation"].as_array().unwrap().is_empty());
    let weights = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights(&a) == weights(&b));
}
