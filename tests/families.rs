//! Models of other families than Qwen3 through the real binary: quantized, and written for other engines.

use crate::common::{nq, stderr, stdout};
use nq_formats::synth;
use nq_model::{DType, ModelConfig, find};
use nq_testkit::models::{delta, experts, rope, tiny};
use serde_json::Value;
use std::path::Path;

/// Runs `nq` with `--json` and returns its report.
#[track_caller]
fn report(home: &Path, args: &[&str]) -> Value {
    let output = nq(home, &[args, &["--json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    serde_json::from_str(&stdout(&output)).unwrap()
}

fn config(gguf: &str) -> ModelConfig {
    let architecture = find(|a| a.gguf, gguf).unwrap();
    let experts = architecture.router().map(|_| experts(4, 128, 128));
    let delta = architecture.has_delta().then_some(delta(4, 32, 2));
    ModelConfig {
        hidden_size: 128,
        intermediate_size: 256,
        experts,
        delta,
        num_attention_heads: 8,
        vocab_size: 512,
        max_position_embeddings: 1024,
        rope: rope(1e5, delta.map(|_| 4)),
        mtp_layers: usize::from(delta.is_some()),
        eos_token_ids: vec![300],
        dtype: Some(DType::BF16),
        ..tiny(gguf)
    }
}

/// Every method leaves a model of the same function, biases included, and every format keeps it.
#[test]
fn families_are_quantized_and_exported() {
    for family in ["qwen2", "llama", "qwen35", "qwen35moe", "qwen3next"] {
        // A rounded score may choose another expert.
        let most = if config(family).experts.is_some() {
            4e-5
        } else {
            2e-5
        };
        let home = tempfile::tempdir().unwrap();
        let path = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
        synth::write(&home.path().join("source"), &config(family), 5, &()).unwrap();
        let divergence = |model: &str| {
            let args = ["eval", &path(model), "--against", &path("source")];
            let text = ["--text", &path("text"), "--ctx", "64", "--device", "cpu"];
            let seen = report(home.path(), &[&args[..], &text].concat());
            seen[0]["kld"]["mean"].as_f64().unwrap()
        };
        std::fs::write(path("text"), "The river runs to the sea. ".repeat(12)).unwrap();
        for method in ["rtn", "awq", "gptq"] {
            let args = ["quantize", &path("source"), "--out", &path(method)];
            let how = ["--method", method, "--bits", "8", "--simple"];
            let text = ["--calib-tokens", "512", "--eval-tokens", "256"];
            let on = ["--device", "cpu"];
            let command = [&args[..], &how, &text, &on].concat();
            let planned = report(home.path(), &[&command[..], &["--dry-run"]].concat());
            let made = report(home.path(), &command);
            // Sizes to be kept are planned by this. awq writes in f32 what it has scaled.
            if method != "awq" {
                assert_eq!(planned["file_bytes"], made["tensor_bytes"], "{family}");
            }
            let mean = made["quality"]["kld"]["mean"].as_f64().unwrap();
            assert!(mean < most, "{family} by {method}: {mean:e}");
            // Rounded to nearest, whatever the method.
            let seen = report(home.path(), &["inspect", &path(method)]);
            let mtp = &seen["quantization"]["settings"]["mtp"];
            let expected = config(family).mtp_layers == 1;
            assert_eq!(*mtp == "rtn-clip", expected, "{family} by {method}: {mtp}");
        }
        let biases = |model: &str| {
            let seen = report(home.path(), &["inspect", &path(model), "--verify"]);
            let names = seen["tensors"].as_array().unwrap();
            // Of Linears: GGUF files call another vector of recurrences one.
            let bias = |t: &&Value| {
                let name = t["name"].as_str().unwrap();
                name.ends_with(".bias") && !name.ends_with("ssm_dt.bias")
            };
            assert_eq!(seen["left_over"], Value::Array(Vec::new()), "{model}");
            let mtp = names.iter().any(|t| {
                let name = t["name"].as_str().unwrap();
                name.starts_with("mtp.fc.") || name == "blk.2.nextn.eh_proj.weight"
            });
            assert_eq!(mtp, config(family).mtp_layers == 1, "{family}: {model}");
            names.iter().filter(bias).count()
        };
        let expected = if family == "qwen2" { 6 } else { 0 };
        for format in ["nq", "compressed-tensors", "gguf"] {
            let out = format!("as-{format}");
            let args = ["convert", &path("rtn"), &path(&out), "--format", format];
            report(home.path(), &args);
            assert_eq!(biases(&out), expected, "{family} as {format}");
            let mean = divergence(&out);
            assert!(mean < most, "{family} as {format}: {mean:e}");
            // Where the file has a layer to draft with, it drafts, and the answer is the one without.
            let chat = |more: &[&str]| {
                let args = ["chat", &path(&out), "--raw", "-p", "The river", "-v"];
                let how = ["--max-tokens", "40", "--seed", "7", "--device", "cpu"];
                let output = nq(home.path(), &[&args[..], &how, more].concat());
                assert!(output.status.success(), "{format}: {}", stderr(&output));
                let drafts = stderr(&output).contains("for the MTP layer");
                (stdout(&output), drafts)
            };
            let (answer, drafts) = chat(&[]);
            let config = config(family);
            let expected = config.mtp_layers == 1 && config.experts.is_none();
            assert_eq!(drafts, expected, "{family} as {format}");
            assert_eq!(
                chat(&["--draft", "none"]),
                (answer, false),
                "{family} as {format}"
            );
        }
    }
}

/// Trellis codes hold every kind of weight: with biases, of experts, of recurrences, of MTP layers.
#[test]
fn families_are_quantized_to_trellises() {
    for family in ["qwen2", "qwen35moe"] {
        let home = tempfile::tempdir().unwrap();
        let path = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
        synth::write(&home.path().join("source"), &config(family), 5, &()).unwrap();
        let quantize = |out: &str, how: &[&str]| {
            let args = [
                "quantize",
                &path("source"),
                "--out",
                &path(out),
                "--trellis",
            ];
            let text = [
                "--calib-tokens",
                "512",
                "--eval-tokens",
                "256",
                "--device",
                "cpu",
            ];
            let command = [&args[..], how, &text].concat();
            let planned = report(home.path(), &[&command[..], &["--dry-run"]].concat());
            let made = report(home.path(), &command);
            assert_eq!(planned["file_bytes"], made["tensor_bytes"], "{family}");
            let again = [&command[..], &["--dry-run", "--force"]].concat();
            let told = stdout(&nq(home.path(), &again));
            assert!(told.contains("compared with 4-bit integers"), "{told}");
            made["quality"]["kld"]["mean"].as_f64().unwrap()
        };
        let six = quantize("six", &["--bits", "6", "--simple"]);
        let nearest = quantize("nearest", &["--bits", "2.5", "--method", "rtn"]);
        let fed = quantize("fed", &["--bits", "2.5"]);
        assert!(
            // On random weights and few tokens, feeding errors forward may gain nothing.
            six < 0.05 * fed && fed < 1.3 * nearest,
            "{family}: {six:e} {fed:e} {nearest:e}"
        );
        if family == "qwen2" {
            let steps = ["--tune-steps", "6", "--tune-batch", "4"];
            let auto = [&["--bits", "2.5", "--method", "auto"][..], &steps[..]].concat();
            let tuned = quantize("tuned", &auto);
            assert!(tuned < 1.01 * fed, "{tuned:e} {fed:e}");
            let seen = report(home.path(), &["inspect", &path("tuned"), "--verify"]);
            assert_eq!(seen["quantization"]["method"], "gptq+tuned");
        }
        let seen = report(home.path(), &["inspect", &path("six"), "--verify"]);
        let linears = serde_json::json!({"trellis": "sum", "bits": 6.0});
        assert_eq!(seen["quantization"]["linears"], linears);
        assert_eq!(seen["quantization"]["version"], 3);

        // No other format has such codes; rounded again, GGUF takes the weights.
        let convert = ["convert", &path("six"), &path("out"), "--format", "gguf"];
        let refused = nq(home.path(), &convert);
        assert!(!refused.status.success());
        assert!(
            stderr(&refused).contains("trellis6 sum"),
            "{}",
            stderr(&refused)
        );
        report(home.path(), &[&convert[..], &["--requantize"]].concat());
    }
}

#[test]
fn flags_that_trellises_do_not_go_with_are_refused() {
    let home = tempfile::tempdir().unwrap();
    for (flags, expect) in [
        ("--bits 8", "6"),
        ("--bits 3.5 --trellis=sum", "2, 3, 4"),
        ("--bits 2.25", "2.5"),
        ("--group-size 64", "--group-size"),
        ("--format gguf", "nq"),
        ("--head-bits 5 --sym", "--sym"),
    ] {
        let words = ["quantize", "demo", "--device", "cpu"];
        let own = (!flags.contains("--trellis")).then_some("--trellis");
        let args: Vec<&str> = (words.into_iter().chain(own))
            .chain(flags.split(' '))
            .collect();
        let refused = nq(home.path(), &args);
        assert_eq!(refused.status.code(), Some(2), "{flags}");
        assert!(stderr(&refused).contains(expect), "{}", stderr(&refused));
    }
    let awq = [
        "quantize",
        "demo",
        "--trellis",
        "--method",
        "awq",
        "--device",
        "cpu",
    ];
    let awq = nq(home.path(), &awq);
    assert!(!awq.status.success() && stderr(&awq).contains("gptq, auto or rtn for trellis codes"));
    let plain = nq(home.path(), &["quantize", "demo", "--bits", "2.5"]);
    assert_eq!(plain.status.code(), Some(2));
    assert!(
        stderr(&plain).contains("3, 4, 5, 6, 8"),
        "{}",
        stderr(&plain)
    );
}

/// A model whose residual has several streams, with a table of n-grams: what is not quantized stays as it is, and what is
/// left out of other formats is refused.
#[test]
fn flash_next_is_quantized() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let config = ModelConfig {
        mtp_layers: 0,
        ..config("qwen4exp")
    };
    synth::write(&home.path().join("source"), &config, 5, &()).unwrap();
    for (method, bits, most) in [
        ("rtn", "8", 1e-4),
        ("gptq", "8", 1e-4),
        ("rtn", "4", 1e-2),
        ("gptq", "4", 1e-2),
    ] {
        let name = format!("{method}{bits}");
        let args = ["quantize", &path("source"), "--out", &path(&name)];
        let how = ["--method", method, "--bits", bits, "--simple"];
        let text = ["--calib-tokens", "512", "--eval-tokens", "256"];
        let command = [&args[..], &how, &text, &["--device", "cpu"]].concat();
        let planned = report(home.path(), &[&command[..], &["--dry-run"]].concat());
        let made = report(home.path(), &command);
        assert_eq!(planned["file_bytes"], made["tensor_bytes"], "{name}");
        let mean = made["quality"]["kld"]["mean"].as_f64().unwrap();
        assert!(mean < most, "{name}: {mean:e}");
        let seen = report(home.path(), &["inspect", &path(&name), "--verify"]);
        let kept = ["hyper_connection", "indexer", "mlp.gate.weight", "ple."];
        for tensor in seen["tensors"].as_array().unwrap() {
            let (name, dtype) = (tensor["name"].as_str().unwrap(), &tensor["dtype"]);
            if name.ends_with(".weight") && kept.iter().any(|part| name.contains(part)) {
                assert!(*dtype == "BF16" || *dtype == "F32", "{name}: {dtype}");
            }
        }
    }
    // Tables of fewer bits are measured apart from the rest.
    for (bits, most) in [("8", 1e-4), ("4", 1e-2)] {
        let name = format!("table{bits}");
        let args = ["quantize", &path("source"), "--out", &path(&name)];
        let how = [
            "--method",
            "rtn",
            "--bits",
            "8",
            "--simple",
            "--table-bits",
            bits,
        ];
        let text = ["--calib-tokens", "512", "--eval-tokens", "256"];
        let command = [&args[..], &how, &text, &["--device", "cpu"]].concat();
        let planned = report(home.path(), &[&command[..], &["--dry-run"]].concat());
        let made = report(home.path(), &command);
        assert_eq!(planned["file_bytes"], made["tensor_bytes"], "{name}");
        let mean = |part: &str| made["table_loss"][part]["mean"].as_f64().unwrap();
        let whole = made["quality"]["kld"]["mean"].as_f64().unwrap();
        assert!(
            mean("tables") > 0.0 && mean("tables") < most,
            "{bits}: {:e}",
            mean("tables")
        );
        assert!(mean("body") < 1e-4, "{bits}: {:e}", mean("body"));
        assert!(
            whole < 2.0 * (mean("tables") + mean("body")) + 1e-6,
            "{bits}: {whole:e}"
        );
        let layers = made["layers"].as_array().unwrap();
        let parts = layers
            .iter()
            .filter(|l| l["name"].as_str().unwrap().contains("shard_"));
        let of_part: u64 = bits.parse().unwrap();
        assert!(parts.clone().all(|l| l["bits"] == of_part));
        assert_eq!(parts.count(), 4, "{bits}");
        let seen = report(home.path(), &["inspect", &path(&name), "--verify"]);
        let tensors = seen["tensors"].as_array().unwrap();
        let codes = |t: &&Value| t["name"].as_str().unwrap().ends_with("shard_0.codes");
        assert!(tensors.iter().any(|t| codes(&t)), "{tensors:?}");
    }
    let refused = nq(
        home.path(),
        &[
            "quantize",
            "demo",
            "--table-bits",
            "4",
            "--out",
            &path("no"),
        ],
    );
    assert!(
        stderr(&refused).contains("a model with a table of n-grams"),
        "{}",
        stderr(&refused)
    );
    let seen = nq(home.path(), &["inspect", &path("rtn8")]);
    for part in ["3 streams", "sparse attention", "n-grams"] {
        assert!(stdout(&seen).contains(part), "{part}: {}", stdout(&seen));
    }
    let folder = path("m-gptq");
    let refused = nq(
        home.path(),
        &["convert", &path("rtn8"), &folder, "--format", "gptq"],
    );
    assert!(!refused.status.success());
    let said = stderr(&refused);
    assert!(
        said.contains("Qwen3.8-Flash-Next as a folder for other programs"),
        "{said}"
    );
}
