//! `nq fit` as users run it, for named cards: nothing is measured and nothing downloaded.

#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use crate::common::program;
use serde_json::Value;
use std::process::Output;

fn fit(args: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    program()
        .arg("fit")
        .args(args)
        .arg("--offline")
        .env("HF_HOME", home.path())
        .env("NQ_HOME", home.path())
        .output()
        .unwrap()
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

fn report(args: &[&str]) -> Value {
    let out = fit(&[args, &["--json"]].concat());
    serde_json::from_slice(&out.stdout)
        .unwrap_or_else(|e| panic!("{args:?}: {e}: {}", stderr(&out)))
}

#[test]
fn a_named_card_is_answered_for_by_shape_and_published_figures() {
    if !nq_load::gpu::BUILT_IN {
        println!("skipped: no CUDA in this build");
        return;
    }
    let found = report(&["qwen3:8b", "--gpu", "RTX 4090"]);
    assert_eq!(found["model"], "Qwen3-8B");
    assert_eq!(found["shape_from"], "the published shape that nq knows");
    assert_eq!(found["cards"]["name"], "RTX 4090");
    assert_eq!(found["cards"]["bandwidth_known"], "computed");
    assert_eq!(
        found["host"]["read_gb_s"],
        Value::Null,
        "nothing is measured"
    );
    assert_eq!(
        (&found["context"], &found["clients"]),
        (&8192.into(), &1.into())
    );
    assert_eq!(found["speeds_known"], "computed");
    assert_eq!(found["divergences_known"], "from a record");
    let files = found["files"].as_array().unwrap();
    for file in files {
        for key in [
            "file",
            "kv",
            "fits",
            "why_not",
            "weights_bytes",
            "kv_bytes",
            "buffers_bytes",
            "needed_bytes",
            "cpu_layers",
            "cpu_bytes",
            "read_bytes",
            "tok_s",
            "tok_s_full",
            "tok_s_all",
            "prompt_tok_s",
            "speed_record",
            "kld",
            "kld_record",
        ] {
            assert!(file.get(key).is_some(), "{key} in {file}");
        }
        let sum: u64 = ["weights_bytes", "kv_bytes", "buffers_bytes"]
            .iter()
            .map(|key| file[key].as_u64().unwrap())
            .sum();
        assert_eq!(file["needed_bytes"], sum);
    }
    let kinds: Vec<&str> = files.iter().map(|f| f["file"].as_str().unwrap()).collect();
    for flags in [
        "--bits 3",
        "--bits 4",
        "--bits 8",
        "--trellis --bits 2",
        "--trellis",
        "",
    ] {
        assert_eq!(
            kinds.iter().filter(|k| **k == flags).count(),
            2,
            "{flags}: {kinds:?}"
        );
    }
    let best = &found["recommendation"];
    let commands = best["commands"].as_array().unwrap();
    let make = commands[0].as_str().unwrap();
    assert!(
        make.starts_with("nq quantize Qwen/Qwen3-8B --bits 8 --name "),
        "{best}"
    );
    assert!(
        commands[1].as_str().unwrap().contains("--ctx 8192"),
        "{best}"
    );
    assert!(
        best["sentence"].as_str().unwrap().contains("RTX 4090"),
        "{best}"
    );
}

#[test]
fn the_table_says_how_each_figure_is_known() {
    if !nq_load::gpu::BUILT_IN {
        println!("skipped: no CUDA in this build");
        return;
    }
    let out = fit(&["qwen3-0.6b", "--gpu", "H100 SXM", "--clients", "4"]);
    assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    for words in [
        "computed",
        "from a record",
        "tok/s of all",
        "nq serve",
        "--parallel 4",
        "2026-11-24-gpu-layers.csv",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn what_is_not_known_is_refused() {
    let unknown = fit(&["qwen3:8b", "--gpu", "RTX 4091"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(
        stderr(&unknown).contains("RTX 4090"),
        "{}",
        stderr(&unknown)
    );
    for (args, why) in [
        (
            &["qwen3:8b", "--gpu", "RTX 4090", "--context", "99999"][..],
            "at most the model's",
        ),
        (
            &["someone/some-model", "--gpu", "RTX 4090"],
            "config.json is not in the cache",
        ),
        (&["someone/some-GGUF:Q4_K_M", "--gpu", "RTX 4090"], "GGUF"),
        (&["no such model", "--gpu", "RTX 4090"], "no model"),
    ] {
        let out = fit(args);
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        assert!(stderr(&out).contains(why), "{args:?}: {}", stderr(&out));
    }
    if nq_load::gpu::BUILT_IN {
        let out = fit(&["qwen3-235b-a22b", "--gpu", "RTX 3060", "--ram", "8GB"]);
        assert_eq!(out.status.code(), Some(1), "{}", stderr(&out));
        assert!(String::from_utf8_lossy(&out.stdout).contains("None of these fits"));
    }
}
