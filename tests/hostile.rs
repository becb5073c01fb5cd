//! Limits on a model of unknown origin, a text without end and a signal, through the real
//! binary.

use crate::common::{command, nq, stderr, stdout};
use nq_formats::safetensors::SafetensorsFile;
use nq_formats::serialize::write_tensors;
use nq_formats::{Tensor, synth};
use nq_model::DType;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A model with a few thousand parameters in `home`, with changed tensors.
fn model(home: &Path, change: impl FnOnce(&mut Vec<(String, Tensor)>)) -> PathBuf {
    let dir = home.join("small");
    let config = br#"{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":32,
        "intermediate_size":64,"num_hidden_layers":2,"num_attention_heads":2,
        "num_key_value_heads":1,"head_dim":16,"vocab_size":512,"max_position_embeddings":64,
        "rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":true,"eos_token_id":511}"#;
    let config = nq_formats::config::parse(Path::new("config.json"), config).unwrap();
    synth::write(&dir, &config, 0, &()).unwrap();
    let path = dir.join("model.safetensors");
    let file = SafetensorsFile::parse(&path, std::fs::read(&path).unwrap().into()).unwrap();
    let mut tensors: Vec<(String, Tensor)> = file
        .names()
        .map(|n| (n.to_owned(), file.get(n).unwrap().clone()))
        .collect();
    change(&mut tensors);
    write_tensors(&path, &tensors, &BTreeMap::new()).unwrap();
    dir
}

fn path(p: &Path) -> &str {
    p.to_str().unwrap()
}

#[test]
fn names_of_tensors_are_cut_and_cleaned() {
    let home = tempfile::tempdir().unwrap();
    let long = format!("extra.\x1b]0;title\x07{}", "x".repeat(70_000));
    let model = model(home.path(), |tensors| {
        let one = Tensor::new(DType::F32, vec![1], vec![0; 4].into()).unwrap();
        tensors.push((long.clone(), one));
    });
    // No model has such a tensor: the error names it.
    for more in [&[][..], &["--json"]] {
        let out = nq(home.path(), &[&["inspect", path(&model)], more].concat());
        assert_eq!(out.status.code(), Some(1));
        let said = stderr(&out);
        assert!(
            said.contains(r"extra.\u001b]0;title\u0007xxx"),
            "{said:.300}"
        );
        assert!(!said.contains(['\x1b', '\x07']) && said.contains(" characters]"));
        assert!(said.len() < 10_000, "{}", said.len());
    }
}

#[test]
fn errors_that_quote_a_file_are_cut_and_cleaned() {
    let home = tempfile::tempdir().unwrap();
    let model = model(home.path(), |_| ());
    let config = model.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let long = format!("\\u001b]52;c;AAAA\\u0007{}", "y".repeat(300_000));
    std::fs::write(&config, text.replace("\"qwen3\"", &format!("\"{long}\""))).unwrap();
    let out = nq(home.path(), &["inspect", path(&model)]);
    assert_eq!(out.status.code(), Some(1));
    let said = stderr(&out);
    assert!(
        !said.contains(['\x1b', '\x07']) && said.contains(" characters]"),
        "{said:.1500}"
    );
    assert!(
        said.lines().all(|l| l.chars().count() <= 1000),
        "{}",
        said.len()
    );

    // The same in a list of models, one of which has a hostile name too.
    let models = home.path().join("models");
    std::fs::create_dir(&models).unwrap();
    std::fs::rename(&model, models.join("a\x1b[2Jb")).unwrap();
    let out = nq(home.path(), &["list"]);
    let table = stdout(&out);
    assert!(
        out.status.success() && table.contains(r"a\u001b[2Jb"),
        "{table:.1500}"
    );
    assert!(!table.contains('\x1b'));
    assert!(table.lines().all(|l| l.chars().count() <= 1000));
}

/// A single NaN is found by `--verify`, wherever it is, and no figures are computed from it.
#[test]
fn values_that_are_no_numbers_are_found() {
    for (name, at, value) in [
        ("model.layers.1.self_attn.q_proj.weight", 77, 0x7fc0u16), // NaN
        ("model.layers.0.mlp.down_proj.weight", 64 * 32 - 1, 0x7f80), // infinity
        ("model.layers.1.input_layernorm.weight", 31, 0xff80),     // -infinity
        ("model.norm.weight", 0, 0xff80),
        ("model.embed_tokens.weight", 511 * 32, 0xffc0),
    ] {
        let home = tempfile::tempdir().unwrap();
        let model = model(home.path(), |tensors| {
            let (_, tensor) = tensors.iter_mut().find(|(n, _)| n == name).unwrap();
            assert_eq!(tensor.dtype(), DType::BF16);
            let mut bytes = tensor.data().to_vec();
            bytes[2 * at..2 * at + 2].copy_from_slice(&value.to_le_bytes());
            *tensor = Tensor::new(DType::BF16, tensor.shape().to_vec(), bytes.into()).unwrap();
        });
        let parameter = name.strip_suffix(".weight").unwrap();
        let out = nq(home.path(), &["inspect", path(&model), "--verify"]);
        assert_eq!(out.status.code(), Some(1), "{name}");
        let said = stderr(&out);
        assert!(
            said.contains(parameter) && said.contains("finite"),
            "{said}"
        );
        let text = home.path().join("text.txt");
        std::fs::write(&text, "abc ".repeat(200)).unwrap();
        let eval = [
            "eval",
            path(&model),
            "--text",
            path(&text),
            "--device",
            "cpu",
            "--json",
        ];
        let out = nq(home.path(), &eval);
        assert_eq!(out.status.code(), Some(1), "{name}: {}", stdout(&out));
        assert!(
            out.stdout.is_empty() && stderr(&out).contains(parameter),
            "{}",
            stderr(&out)
        );
    }
}

/// With several models and files, a user must learn which one an error is about.
#[test]
fn errors_name_the_model_or_its_file() {
    let home = tempfile::tempdir().unwrap();
    let whole = model(home.path(), |_| ());
    let ask = |model: &str| {
        let args = ["chat", model, "--raw", "-p", "hi", "--device", "cpu"];
        let out = nq(home.path(), &args);
        assert_eq!(out.status.code(), Some(1), "{}", stdout(&out));
        stderr(&out)
    };
    let generation = whole.join("generation_config.json");
    std::fs::write(&generation, r#"{"top_p": 7}"#).unwrap();
    let said = ask(path(&whole));
    assert!(said.contains("generation_config.json: top_p"), "{said}");
    std::fs::remove_file(generation).unwrap();

    let rounded = home.path().join("rounded.gguf");
    let convert = ["convert", path(&whole), path(&rounded), "--format", "gguf"];
    let out = nq(home.path(), &[&convert[..], &["--type", "q8_0"]].concat());
    assert!(out.status.success(), "{}", stderr(&out));
    let quantize = ["quantize", path(&rounded), "--group-size", "32"];
    let more = ["--head-bits", "16", "--device", "cpu", "--dry-run"];
    let out = nq(home.path(), &[&quantize[..], &more].concat());
    let said = stderr(&out);
    assert!(
        said.contains("rounded.gguf") && said.contains("expected an unquantized model"),
        "{said}"
    );

    let broken = tempfile::tempdir().unwrap();
    let broken = model(broken.path(), |tensors| {
        let norm = "model.layers.0.input_layernorm.weight";
        let (_, tensor) = tensors.iter_mut().find(|(n, _)| n == norm).unwrap();
        let mut bytes = tensor.data().to_vec();
        bytes[..2].copy_from_slice(&0x7fc0u16.to_le_bytes());
        *tensor = Tensor::new(DType::BF16, tensor.shape().to_vec(), bytes.into()).unwrap();
    });
    let said = ask(path(&broken));
    assert!(said.contains("small") && said.contains("layer"), "{said}");
}

#[test]
fn verification_loads_the_tokenizer() {
    let home = tempfile::tempdir().unwrap();
    let model = model(home.path(), |_| ());
    let verify = ["inspect", path(&model), "--verify"];
    let out = nq(home.path(), &verify);
    assert!(out.status.success(), "{}", stderr(&out));
    let file = model.join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    json["normalizer"] = serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    std::fs::write(&file, json.to_string()).unwrap();
    let out = nq(home.path(), &verify);
    assert_eq!(out.status.code(), Some(1));
    let said = stderr(&out);
    assert!(
        said.contains("tokenizer.json") && said.contains("Precompiled"),
        "{said}"
    );
}

/// Without a MODEL and without a hub there is an error that says what to do, not another model.
#[test]
fn no_model_is_no_demo() {
    let home = tempfile::tempdir().unwrap();
    for args in [
        &["chat", "-p", "hi"][..],
        &["eval"],
        &["quantize", "--bits", "4", "--dry-run"],
        &["bench"],
        &["chat", "-p", "hi", "--offline"],
    ] {
        let out = command(home.path(), args)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {}", stderr(&out));
        let said = stderr(&out);
        for part in [
            "Qwen/Qwen3-0.6B",
            "no MODEL was given",
            "is not on this machine",
        ] {
            assert!(said.contains(part), "{args:?}: {said}");
        }
        assert_eq!(said.contains("`demo`"), cfg!(feature = "demo"), "{said}");
        assert!(out.stdout.is_empty());
    }
}

#[test]
fn requests_without_bound_are_refused_with_figures() {
    let home = tempfile::tempdir().unwrap();
    for (args, said, code) in [
        (&["bench", "demo", "--batch", "100000"][..], "1 to 1024", 2),
        (
            &["bench", "demo", "--depth", "18446744073709551615"],
            "0 to 16777216",
            2,
        ),
        (&["bench", "demo", "-p", "99999999999"], "0 to 16777216", 2),
        (&["bench", "demo", "--repeats", "99999"], "1 to 1024", 2),
        (&["eval", "demo", "--text", "/dev/zero"], "/dev/zero", 1),
    ] {
        if code == 1 && !cfg!(feature = "demo") {
            continue;
        }
        let out = nq(home.path(), args);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {}", stderr(&out));
        assert!(stderr(&out).contains(said), "{args:?}: {}", stderr(&out));
    }
    // A prompt without end.
    let mut child = command(home.path(), &["chat", "demo"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        let lines = "y\n".repeat(1 << 20);
        (0..1000)
            .take_while(|_| stdin.write_all(lines.as_bytes()).is_ok())
            .count()
    });
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let said = stderr(&out);
    assert!(
        said.contains("standard input: expected at most 16.00 MB"),
        "{said}"
    );
    assert!(writer.join().unwrap() < 50);
}

/// Signals leave no temporary files.
#[test]
fn a_signal_leaves_no_temporary_files() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let home = tempfile::tempdir().unwrap();
        let out = home.path().join("out");
        let mut child = command(home.path(), &["synth", "qwen3-0.6b", path(&out)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let temporary = || {
            let names = std::fs::read_dir(home.path()).unwrap().flatten();
            names
                .filter(|e| e.file_name().to_string_lossy().starts_with(".nq-"))
                .count()
        };
        let begun = Instant::now();
        while temporary() == 0 {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "nothing is written"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(50));
        // SAFETY: the process is this test's child and has not been waited for.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert_eq!(temporary(), 0, "signal {signal}");
        assert!(!out.exists());
    }
}

/// A signal that comes before the program has said anything ends it as a later one does.
#[test]
fn a_signal_before_the_first_line_is_handled() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys");
    let made = std::process::Command::new("mkfifo").arg(&keys).status();
    assert!(made.unwrap().success());
    let arguments = [
        "serve",
        "demo",
        "--port",
        "0",
        "--api-key-file",
        path(&keys),
    ];
    let mut child = command(home.path(), &arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Opens once the server waits for its keys, with which it begins.
    let writer = std::fs::OpenOptions::new().write(true).open(&keys).unwrap();
    // SAFETY: the process is this test's child and has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(writer);
}
