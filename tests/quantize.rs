//! `nq quantize` through the real binary: its output, resuming to the same bytes, and
//! a guard that leaves nothing but its work when it fails.

use crate::common::program;
use nq_formats::serialize::write_tensors;
use nq_formats::{Checkpoint, Tensor, synth};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The binary on the demo model with little text, so that a run takes seconds.
fn command(out: &Path, more: &[&str]) -> Command {
    command_of(Path::new("demo"), out, more)
}

fn command_of(model: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = program();
    command
        .arg("quantize")
        .arg(model)
        .args(["--json", "--device", "cpu", "--calib-tokens", "1024"])
        .args(["--eval-tokens", "512", "--out"])
        .arg(out)
        .args(more);
    command
}

pub(crate) fn quantize(out: &Path, more: &[&str]) -> Output {
    quantize_of(Path::new("demo"), out, more)
}

fn quantize_of(model: &Path, out: &Path, more: &[&str]) -> Output {
    let output = command_of(model, out, more).output();
    output.expect("the binary runs")
}

/// As little tuning as possible.
const AUTO: [&str; 6] = ["--method", "auto", "--tune-steps", "2", "--tune-batch", "2"];

/// The demo model with 128 positions, in `dir`: tuning uses texts as long as the model's context.
fn short_demo(dir: &Path) -> PathBuf {
    let source = nq_testkit::demo();
    let to = dir.join("short");
    std::fs::create_dir(&to).unwrap();
    for entry in std::fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let path = to.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = 128.into();
    std::fs::write(&path, config.to_string()).unwrap();
    to
}

pub(crate) fn report(output: &Output) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}\n{error}"));
    sizes_are_named(&report);
    report
}

/// Keys of sizes end in `_bytes`.
fn sizes_are_named(report: &Value) {
    match report {
        Value::Object(entries) => {
            for (key, value) in entries {
                assert!(!key.contains("bytes") || key.ends_with("_bytes"), "{key}");
                sizes_are_named(value);
            }
        }
        Value::Array(items) => items.iter().for_each(sizes_are_named),
        _ => {}
    }
}

fn weights(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("model.safetensors")).expect("the folder has weights")
}

/// 13 M random weights with an untied head, in `dir`.
fn untied(dir: &Path) -> PathBuf {
    let config = serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512,
        "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 4096,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": false, "eos_token_id": 4072, "torch_dtype": "bfloat16",
    });
    let config = nq_formats::config::parse(Path::new("c"), config.to_string().as_bytes()).unwrap();
    assert!((13_000_000..14_000_000).contains(&config.parameters()));
    let to = dir.join("untied");
    synth::write(&to, &config, 1, &()).unwrap();
    let demo = nq_testkit::demo();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(demo.join(name), to.join(name)).unwrap();
    }
    to
}

/// The memory estimated for a small model is what it takes, to 15 %, also with an untied
/// head.
#[test]
fn the_peak_said_is_the_peak_measured() {
    let dir = tempfile::tempdir().unwrap();
    let model = untied(dir.path());
    for method in ["rtn", "gptq"] {
        let made = quantize_of(&model, &dir.path().join(method), &["--method", method]);
        let report = report(&made);
        let bytes = |key: &str| report[key].as_u64().unwrap() as f64;
        let (said, measured) = (bytes("estimated_peak_bytes"), bytes("peak_rss_bytes"));
        let off = measured / said - 1.0;
        assert!(off.abs() < 0.15, "{method}: said {said}, took {measured}");
    }
}

#[test]
fn a_failed_guard_keeps_its_work_and_resuming_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));

    let failed = quantize(&a, &["--max-kld", "0.0001"]);
    assert_eq!(failed.status.code(), Some(1));
    let error = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(error.contains("the worst layers: model.layers."), "{error}");
    assert!(error.contains("is above 0.0001"), "{error}");
    assert!(!a.exists());

    // Without --resume, kept work is not silently discarded.
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
    assert!(in_the_bytes_of_int4(&report));
    assert_eq!(report["fallbacks"], serde_json::json!([]));
    assert_eq!(report["layers"].as_array().map(Vec::len), Some(36));
    let kld = report["quality"]["kld"]["mean"].as_f64().unwrap();
    assert!(kld > 0.0 && kld < 0.1, "{kld}");

    // An existing output is not overwritten.
    let again = quantize(&b, &[]);
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("already there"));
}

/// A limit that no choice of bits reaches is refused before text is sampled.
#[test]
fn a_limit_that_nothing_reaches_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let target = ["--target-bpw", "6", "--min-top1", "99.99%"];
    for (limit, found) in [
        (&["--max-kld", "0.000001"][..], "0.000001"),
        (&["--min-top1", "0.9999"], "0.9999"),
        (&target, "0.9999"),
    ] {
        let refused = quantize(&dir.path().join("x"), limit);
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{error}");
        let expected = format!("which 8-bit weights have on a short text, found {found}");
        assert!(error.contains(&expected), "{error}");
        assert!(!dir.path().join("x.partial").exists());
    }
}

/// An adapter that adds `value` to each weight of the first layer's queries.
pub(crate) fn write_adapter(folder: &Path, value: f32) {
    let demo = nq_testkit::demo();
    let demo = Checkpoint::open(&demo).unwrap();
    let config = demo.config();
    let tensor = |shape: [usize; 2], value| {
        Tensor::from_f32(shape.to_vec(), vec![value; shape[0] * shape[1]]).unwrap()
    };
    let queries = config.num_attention_heads * config.head_dim;
    let name =
        |part: &str| format!("base_model.model.model.layers.0.self_attn.q_proj.{part}.weight");
    let tensors = [
        (name("lora_A"), tensor([1, config.hidden_size], value)),
        (name("lora_B"), tensor([queries, 1], 1.0)),
    ];
    std::fs::create_dir_all(folder).unwrap();
    let weights = folder.join("adapter_model.safetensors");
    write_tensors(&weights, &tensors, &BTreeMap::default()).unwrap();
    let settings =
        r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}"#;
    std::fs::write(folder.join("adapter_config.json"), settings).unwrap();
}

#[test]
fn work_with_an_adapter_is_resumed_with_the_same_one() {
    let dir = tempfile::tempdir().unwrap();
    let (out, adapter) = (dir.path().join("out"), dir.path().join("adapter"));
    write_adapter(&adapter, 0.001);
    let run = |more: &[&str]| {
        let with = ["--method", "rtn", "--adapter", adapter.to_str().unwrap()];
        quantize(&out, &[&with, more].concat())
    };
    let stderr = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let failed = run(&["--max-kld", "0.0001"]);
    assert_eq!(failed.status.code(), Some(1), "{}", stderr(&failed));
    write_adapter(&adapter, 0.002);
    let other = run(&["--resume"]);
    assert_eq!(other.status.code(), Some(1));
    assert!(stderr(&other).contains("plan.json"), "{}", stderr(&other));
    let without = quantize(&out, &["--method", "rtn", "--resume"]);
    assert!(
        stderr(&without).contains("plan.json"),
        "{}",
        stderr(&without)
    );
    write_adapter(&adapter, 0.001);
    let same = run(&["--resume"]);
    assert_eq!(same.status.code(), Some(0), "{}", stderr(&same));
}

/// All files of a folder by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("the folder is there");
    entries
        .map(|e| {
            let path = e.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, std::fs::read(path).unwrap())
        })
        .collect()
}

#[test]
fn a_run_killed_in_the_middle_of_layers_resumes_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (killed, whole) = (dir.path().join("killed"), dir.path().join("whole"));
    let steps = dir.path().join("killed.partial").join("steps");
    let staged = || {
        let entries = std::fs::read_dir(&steps).map(Iterator::count);
        entries.unwrap_or(0)
    };
    let mut kills = 0;
    // With this many layers staged, and this many milliseconds later.
    for (layers, later) in [(0, 5), (1, 20), (2, 60), (4, 35), (5, 10)] {
        let mut child = command(&killed, &["--resume"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary runs");
        while staged() < layers && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(later));
        child.kill().unwrap(); // SIGKILL where there are signals
        let status = child.wait().unwrap();
        kills += usize::from(!status.success());
        assert!(!killed.exists() || status.success(), "{status}");
    }
    assert!(
        kills >= 3,
        "only {kills} of 5 runs were killed before their end"
    );
    let resumed = quantize(&killed, &["--resume"]);
    assert_eq!(resumed.status.code(), Some(0));
    assert_eq!(quantize(&whole, &[]).status.code(), Some(0));
    // Codes, scales, record and measured quality: two runs with one seed are identical.
    assert!(files(&killed) == files(&whole));
}

/// True if a mix takes no more bytes than INT4 g64 with an 8-bit head, and hardly fewer.
fn in_the_bytes_of_int4(report: &Value) -> bool {
    (8_450_000..=8_502_784).contains(&report["tensor_bytes"].as_u64().unwrap())
}

/// Mean KL divergence of a report.
fn kld(report: &Value) -> f64 {
    report["quality"]["kld"]["mean"].as_f64().unwrap()
}

#[test]
fn a_target_size_is_met_by_choosing_schemes_and_the_record_says_which() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x");
    // Less text may be unlike that of the prediction.
    let mut command = program();
    command
        .args(["quantize", "demo", "--json", "--device", "cpu"])
        .args(["--calib-tokens", "4096", "--eval-tokens", "2048"])
        .args(["--target-size", "8.2MB", "--seed", "2", "--out"]);
    let made = command.arg(&out).output().unwrap();
    let report = report(&made);
    let bytes = report["tensor_bytes"].as_u64().unwrap();
    assert!((8_100_000..=8_200_000).contains(&bytes), "{bytes}");
    let rows = report["allocation"].as_array().unwrap();
    assert_eq!(rows.len(), 1 + 5 * 4); // the tied head, and four inputs in each layer
    let listed: u64 = rows
        .iter()
        .map(|r| r["tensor_bytes"].as_u64().unwrap())
        .sum();
    let norms = 2 * (5 * (2 * 512 + 2 * 128) + 512);
    assert_eq!(listed + norms, bytes);
    let schemes: BTreeSet<&str> = rows.iter().filter_map(|r| r["scheme"].as_str()).collect();
    assert!(schemes.len() > 1, "{schemes:?}");
    // The predictions for the method are near the measurement, even with so little text, which is sampled from the
    // source and so differs between instruction sets: a ratio of 0.68 was seen.
    let losses = rows.iter().map(|r| r["loss"].as_f64().unwrap());
    let (predicted, measured) = (losses.sum::<f64>(), kld(&report));
    let ratio = measured / predicted;
    assert!((0.6..1.6).contains(&ratio), "{predicted} {measured}");

    let config = std::fs::read(out.join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let settings = &config["quantization_config"]["settings"];
    assert_eq!(&settings["allocation"], &report["allocation"]);
    assert!(settings["damping"].is_number(), "{settings}");

    let refused = quantize(&dir.path().join("y"), &["--target-bpw", "2.5"]);
    assert_eq!(refused.status.code(), Some(1));
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(error.contains("target size: expected at least"), "{error}");
}

#[test]
fn a_broken_limit_raises_bits_until_it_holds() {
    let dir = tempfile::tempdir().unwrap();
    let plain = report(&quantize(&dir.path().join("a"), &[]));
    let limit = format!("{}", 0.5 * kld(&plain));
    let out = dir.path().join("b");
    let made = quantize(&out, &["--max-kld", &limit]);
    assert_eq!(made.status.code(), Some(0));
    let error = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(error.contains("chosen by sensitivity"), "{error}");
    let raised = report(&made);
    assert!(kld(&raised) <= 0.5 * kld(&plain));
    let bytes = |r: &Value| r["tensor_bytes"].as_u64().unwrap();
    assert!(bytes(&raised) > bytes(&plain) && bytes(&raised) < 14_300_000);
}

/// Tuning takes long, so it is skipped if it could not reach the limit. The work of a run
/// that failed this way is used by a run with another limit.
#[test]
fn auto_tunes_only_what_can_keep_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let model = short_demo(dir.path());
    let quantize = |out: &Path, more: &[&str]| quantize_of(&model, out, more);
    let out = dir.path().join("out");
    let run = |limit: &str, more: &[&str]| {
        let made = quantize(&out, &[&AUTO[..], &["--max-kld", limit], more].concat());
        let error = String::from_utf8_lossy(&made.stderr).into_owned();
        (made, error)
    };
    let (hopeless, error) = run("0.00005", &[]);
    assert_eq!(hopeless.status.code(), Some(1));
    assert!(error.contains("not tuned, as 0.00005 is wanted"), "{error}");
    assert!(error.contains("is predicted to reach"), "{error}");
    assert!(!error.contains("tuning took"), "{error}");
    assert!(!out.exists());

    // The method's measured result keeps this limit: it is tuned at once.
    let (made, error) = run("0.2", &["--resume"]);
    assert_eq!(made.status.code(), Some(0), "{error}");
    assert!(error.contains("tuning took"), "{error}");
    assert!(!error.contains("not tuned, as"), "{error}");
    let report = report(&made);
    assert!(kld(&report) <= 0.2);
    assert!(in_the_bytes_of_int4(&report));
}

/// What was not measured is not claimed, in the report or in the file.
#[test]
fn a_run_without_measuring_says_so_in_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x");
    let mut command = program();
    command.args([
        "quantize",
        "demo",
        "--json",
        "--device",
        "cpu",
        "--method",
        "rtn",
        "--no-measure",
        "--out",
    ]);
    let output = command.arg(&out).output().unwrap();
    let made = report(&output);
    assert!(made["quality"].is_null(), "{made}");
    let stages: Vec<&str> = made["stages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["name"].as_str().unwrap())
        .collect();
    assert!(
        !stages
            .iter()
            .any(|s| s.contains("sampling") || s.contains("KL")),
        "{stages:?}"
    );
    let checkpoint = nq_formats::Checkpoint::open(&out).unwrap();
    let record = nq_formats::nq::record(&checkpoint).unwrap().unwrap();
    assert!(record.quality.is_none());
    assert_eq!(record.settings["measured"], false);
    let refused = quantize(&dir.path().join("y"), &["--no-measure", "--max-kld", "0.1"]);
    assert_eq!(refused.status.code(), Some(2));
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

/// What comes out of a model with a weight that is no number says nothing of where it is.
#[test]
fn a_weight_that_is_no_number_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = untied(dir.path());
    let path = model.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let name = "model.layers.1.mlp.down_proj";
    let at = tensors[format!("{name}.weight")]["data_offsets"][0].as_u64();
    // Row 2, column 5 of 1536 in BF16.
    let at = header + at.unwrap() as usize + 2 * (2 * 1536 + 5);
    bytes[at..at + 2].copy_from_slice(&[0xc0, 0x7f]);
    std::fs::write(&path, bytes).unwrap();
    for method in ["rtn", "gptq"] {
        let refused = quantize_of(&model, &dir.path().join("x"), &["--method", method]);
        assert_eq!(refused.status.code(), Some(1));
        let said = String::from_utf8_lossy(&refused.stderr);
        let named = format!("{name}: expected finite weights, found NaN in row 2, column 5");
        assert!(said.contains(&named), "{method}: {said}");
    }
}

/// Sensitivity takes long: a target that it cannot help with is refused before measuring.
#[test]
fn a_target_that_nothing_reaches_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let plan = |target: &str| {
        quantize(
            &dir.path().join("x"),
            &["--dry-run", "--target-size", target],
        )
    };
    let refused = plan("1");
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("found 1 bytes of tensors"), "{said}");
    let (_, least) = said.split_once("expected at least ").expect(&said);
    let least: u64 = least.split(' ').next().unwrap().parse().expect(&said);
    assert!(least > 7_163_904, "norms included: {said}");
    assert_eq!(plan(&least.to_string()).status.code(), Some(0));
    assert_eq!(plan(&(least - 1).to_string()).status.code(), Some(1));
    let bpw = quantize(
        &dir.path().join("x"),
        &["--dry-run", "--target-bpw", "4.05"],
    );
    let said = String::from_utf8_lossy(&bpw.stderr);
    assert!(said.contains("(4.050 bits per weight)"), "{said}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Tuning keeps the file's size and format, and the file records what was done; a run that is
/// killed while tuning resumes to the same bytes.
#[test]
fn auto_tunes_what_gptq_made() {
    let dir = tempfile::tempdir().unwrap();
    let model = short_demo(dir.path());
    let quantize = |out: &Path, more: &[&str]| quantize_of(&model, out, more);
    let out = dir.path().join("auto");
    let tuned = quantize(&out, &AUTO);
    let report = report(&tuned);
    assert!(in_the_bytes_of_int4(&report));
    let config: Value = {
        let bytes = std::fs::read(out.join("config.json")).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    };
    let tuning = &config["quantization_config"]["settings"]["tuning"];
    assert_eq!(tuning["done"], true);
    assert_eq!(tuning["settings"]["steps"], 2);
    assert_eq!(tuning["settings"]["codes"], true);
    assert_eq!(tuning["checks"].as_array().map(Vec::len), Some(3));
    // Tuned or left unchanged: either way the report says which.
    let fallback = tuning["fallback"].as_str().map(str::to_owned);
    let named: Vec<String> = fallback.into_iter().collect();
    assert_eq!(report["fallbacks"], serde_json::json!(named));
    let method = if named.is_empty() {
        "gptq+tuned"
    } else {
        "gptq"
    };
    assert_eq!(report["method"], method);
    assert_eq!(report["tuning"].is_object(), named.is_empty());
    if named.is_empty() {
        let (before, after) = ("held_out_before", "held_out_after");
        let at = |key: &str| report["tuning"][key].as_f64().expect("a KL divergence");
        assert!(at(after) < at(before), "{}", report["tuning"]);
        assert_eq!(report["tuning"]["steps"], 2);
    }

    let killed = dir.path().join("killed");
    let mut child = command_of(&model, &killed, &AUTO)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let said = BufReader::new(child.stderr.take().unwrap()).lines();
    let begun = |line: String| line.contains("tuning: step 0 of 2");
    assert!(said.map_while(Result::ok).any(begun), "no tuning");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!killed.exists(), "killed after its end");
    let mut again = AUTO.to_vec();
    again.push("--resume");
    assert_eq!(quantize(&killed, &again).status.code(), Some(0));
    assert!(files(&killed) == files(&out));

    let refused = quantize(&out, &["--tune-steps", "2"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{error}");
    assert!(error.contains("--method auto"), "{error}");
}

/// A search for schemes may return to earlier ones, in the same run or in the next one: models
/// tuned under them are kept, not tuned again.
#[test]
fn auto_goes_back_to_what_it_tuned() {
    let dir = tempfile::tempdir().unwrap();
    let model = short_demo(dir.path());
    let quantize = |out: &Path, more: &[&str]| quantize_of(&model, out, more);
    let (out, whole) = (dir.path().join("out"), dir.path().join("whole"));
    let undisturbed = quantize(&whole, &[&AUTO[..], &["--max-kld", "0.2"]].concat());
    assert_eq!(undisturbed.status.code(), Some(0));
    // Near enough for tuning to be tried, too far for two steps of it.
    let limit = (0.8 * kld(&report(&undisturbed))).to_string();
    let mut child = command_of(&model, &out, &[&AUTO[..], &["--max-kld", &limit]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let said = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut tuned = false;
    let mut lines = said.map_while(Result::ok);
    let left = lines.any(|line| {
        tuned |= line.contains("tuning took");
        line.contains("chosen by sensitivity")
    });
    assert!(tuned && left, "tuned {tuned}, left {left}");
    let other = dir.path().join("out.partial").join("steps-1");
    while !other.exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();

    let resumed = quantize(
        &out,
        &[&AUTO[..], &["--max-kld", "0.2", "--resume"]].concat(),
    );
    let error = String::from_utf8_lossy(&resumed.stderr).into_owned();
    assert_eq!(resumed.status.code(), Some(0), "{error}");
    assert!(
        error.contains("resuming from") && error.contains("1 model measured"),
        "{error}"
    );
    assert!(!error.contains("tuning"), "{error}");
    assert!(files(&out) == files(&whole));
    assert!(!dir.path().join("out.partial").exists());
}

/// A requested size is kept: limits do not raise it.
#[test]
fn a_limit_does_not_raise_a_target_size() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x");
    let made = quantize(&out, &["--target-size", "8.2MB", "--max-kld", "0.001"]);
    let error = String::from_utf8_lossy(&made.stderr).into_owned();
    assert_eq!(made.status.code(), Some(1), "{error}");
    assert!(error.contains("the target size leaves no room"), "{error}");
    assert!(!error.contains("trying"), "{error}");
    assert!(!out.exists());
}

#[test]
fn resuming_nothing_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let made = quantize(&dir.path().join("x"), &["--resume", "--method", "rtn"]);
    let error = String::from_utf8_lossy(&made.stderr).into_owned();
    assert_eq!(made.status.code(), Some(0), "{error}");
    let partial = dir.path().join("x.partial");
    let expected = format!("no unfinished work in {}", partial.display());
    assert!(error.contains(&expected), "{error}");
}

/// Calibration files that cannot be read, or are too short, are reported.
#[test]
fn calibration_files_are_looked_at_before_and_counted_after() {
    let dir = tempfile::tempdir().unwrap();
    let (other, short) = (dir.path().join("a.md"), dir.path().join("a.txt"));
    for path in [&other, &short] {
        std::fs::write(path, "The river was quiet. ".repeat(150)).unwrap();
    }
    let run = |path: &Path| {
        let calib = ["--method", "awq", "--calib", path.to_str().unwrap()];
        quantize(&dir.path().join("x"), &calib)
    };
    let refused = run(&other);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{error}");
    assert!(
        error.contains(".txt or .jsonl") && !error.contains("memory:"),
        "{error}"
    );
    let made = run(&short);
    let error = String::from_utf8_lossy(&made.stderr).into_owned();
    assert_eq!(made.status.code(), Some(0), "{error}");
    let counted = "calibrated on all of its 512 tokens, fewer than the 1024 requested";
    assert!(error.contains(counted), "{error}");
}
