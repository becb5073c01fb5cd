//! `nq eval` and `nq bench` as users run them, on the demo model.

#![cfg(feature = "demo")]
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

use crate::common::program;
use nq_kernels::Isa;
use serde_json::Value;
use std::fs;
use std::process::Output;

pub(crate) fn nq(args: &[&str]) -> Output {
    program()
        .args(args)
        .args(["--offline", "--device", "cpu"])
        .output()
        .unwrap()
}

pub(crate) fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

pub(crate) fn json(out: &Output) -> Value {
    assert!(out.status.success(), "{}", stderr(out));
    serde_json::from_slice(&out.stdout).unwrap()
}

pub(crate) fn keys(value: &Value, expected: &[&str]) {
    for key in expected {
        assert!(value.get(key).is_some(), "{key} is missing in {value}");
    }
}

/// Enough for four windows of 128 tokens.
const SMALL: [&str; 6] = ["--text-bytes", "2500", "--ctx", "128", "--windows", "4"];

#[test]
fn eval_prints_perplexity_as_json_and_as_a_table() {
    let mut args = vec!["eval", "demo", "--json"];
    args.extend(SMALL);
    let r = json(&nq(&args))[0].clone(); // a list, for one model as for several
    keys(
        &r,
        &[
            "ppl", "ppl_se", "tokens", "windows", "ctx", "protocol", "text",
        ],
    );
    assert_eq!(r["windows"], 4);
    assert_eq!(r["tokens"], 4 * 127);
    assert_eq!(r["protocol"], "hf");
    assert_eq!(r["text"], "demo-eval (built in) (first 2500 bytes)");
    assert!(r.get("kld").is_none());
    let ppl = r["ppl"].as_f64().unwrap();
    assert!((2.0..30.0).contains(&ppl), "{ppl}");
    assert_eq!(r["window_ppl"].as_array().unwrap().len(), 4);

    args.retain(|a| *a != "--json");
    let out = nq(&args);
    let table = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(
        table.contains("hf protocol: 4 windows of 128 tokens"),
        "{table}"
    );
    assert!(table.contains(&format!("{ppl:.4}")), "{table}");
    assert!(
        stderr(&out).contains("demo-eval (built in)"),
        "{}",
        stderr(&out)
    );
}

#[test]
fn eval_against_itself_finds_no_divergence() {
    let mut args = vec![
        "eval",
        "demo",
        "--against",
        "demo",
        "--json",
        "--protocol",
        "llama",
        "--kv",
        "32",
    ];
    args.extend(SMALL);
    let r = json(&nq(&args))[0].clone(); // a list, for one model as for several
    keys(
        &r,
        &[
            "kld",
            "same_top1",
            "rms_dp",
            "ppl_ref",
            "ln_ppl_ratio",
            "ln_ppl_ratio_se",
        ],
    );
    keys(&r["kld"], &["mean", "median", "p90", "p99", "p999", "max"]);
    assert!(r["kld"]["max"].as_f64().unwrap().abs() < 1e-9, "{r}");
    assert_eq!(r["same_top1"], 1.0);
    assert_eq!(r["tokens"], 4 * 63);
    assert_eq!(r["worst_tokens"].as_array().unwrap().len(), 10);
}

/// One pass over windows as long as they may be, by the position in them.
#[test]
fn eval_shows_quality_by_depth() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let rounded = path("rounded");
    let how = ["--simple", "--bits", "4", "--method", "rtn", "--no-measure"];
    let made = nq(&[&["quantize", "demo", "--out", &rounded][..], &how].concat());
    assert!(made.status.success(), "{}", stderr(&made));
    let mut args = vec!["eval", &rounded, "--against", "demo", "--by-depth"];
    args.extend(["--text-bytes", "2500"]);
    let run = |more: &[&str]| nq(&[&args[..], more].concat());
    let r = json(&run(&["--json", "--report", &path("r.html")]))[0].clone();
    // The window is the whole text.
    let ctx = r["ctx"].as_u64().unwrap();
    assert!((513..1025).contains(&ctx), "{ctx}");
    assert_eq!(r["windows"], 1);
    let buckets = r["by_depth"].as_array().unwrap();
    let values =
        |key: &str| -> Vec<u64> { buckets.iter().map(|b| b[key].as_u64().unwrap()).collect() };
    assert_eq!(values("from"), [0, 128, 256, 512]);
    assert_eq!(values("to"), [127, 255, 511, ctx - 2]);
    assert_eq!(values("tokens"), [128, 128, 256, ctx - 1 - 512]);
    let number = |v: &Value| v.as_f64().unwrap();
    for bucket in buckets {
        keys(bucket, &["ppl", "ppl_se", "kld", "kld_se", "ppl_ref"]);
    }
    let weighted = buckets
        .iter()
        .map(|b| number(&b["kld"]) * number(&b["tokens"]));
    let mean = weighted.sum::<f64>() / number(&r["tokens"]);
    let whole = number(&r["kld"]["mean"]);
    assert!(
        whole > 0.0 && (mean / whole - 1.0).abs() < 1e-9,
        "{mean}, {whole}"
    );

    let report = fs::read_to_string(path("r.html")).unwrap();
    assert_eq!(report.matches("<h2>By depth").count(), 1);
    assert_eq!(report.matches("<h3>By depth").count(), 1);
    let plain = &args[..args.len() - 3];
    let text = ["--text-bytes", "2500", "--ctx", "512"];
    nq(&[plain, &text, &["--report", &path("plain.html")]].concat());
    let plain = fs::read_to_string(path("plain.html")).unwrap();
    let plots = |report: &str| report.matches("<svg").count();
    assert_eq!(plots(&report), plots(&plain) + 2);
    assert!(
        report.contains(r#"<td class="text" data-head="position">256-511</td>"#),
        "{report}"
    );

    let out = run(&["--ctx", "256", "--report", &path("r.md")]);
    let table = String::from_utf8_lossy(&out.stdout).into_owned();
    for row in ["KLD at 0-127", "KLD at 128-254", "perplexity at 128-254"] {
        assert_eq!(table.matches(row).count(), 1, "{row} in {table}");
    }
    let report = fs::read_to_string(path("r.md")).unwrap();
    let head = "| position | tokens | perplexity | its change | mean KLD |";
    assert!(report.contains(head), "{report}");
    assert!(report.contains("| 128-254 |"), "{report}");

    // By default, nothing says anything about depth.
    let plain = json(&nq(&[&["eval", "demo", "--json"], &SMALL[..]].concat()))[0].clone();
    assert!(plain.get("by_depth").is_none());
    let out = run(&["--protocol", "llama"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(
        stderr(&out).contains("--by-depth needs every position"),
        "{}",
        stderr(&out)
    );
}

#[test]
fn eval_writes_reports_that_stand_alone() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.txt");
    fs::write(&text, "She said <nothing> & left. ".repeat(200)).unwrap();
    let text = text.to_str().unwrap();
    for name in ["report.md", "report.html"] {
        let path = dir.path().join(name);
        let out = nq(&[
            "eval",
            "demo",
            "demo",
            "--against",
            "demo",
            "--kv",
            "8",
            "--text",
            text,
            "--ctx",
            "64",
            "--windows",
            "3",
            "--report",
            path.to_str().unwrap(),
        ]);
        assert!(out.status.success(), "{}", stderr(&out));
        let report = fs::read_to_string(&path).unwrap();
        assert!(report.contains("3 windows of 64 tokens"), "{report}");
        assert!(report.contains("text.txt"), "{report}");
        if name.ends_with("html") {
            assert_eq!(
                report.matches("<svg").count(),
                3,
                "bytes, windows, divergence"
            );
            for part in [
                "prefers-color-scheme:dark",
                "nq eval demo demo --against demo",
                "currentColor",
            ] {
                assert!(report.contains(part), "{part}");
            }
            for outside in ["<script", "<link", "src=", "url("] {
                assert!(!report.contains(outside), "{outside}");
            }
            assert!(!report.contains("<nothing>"), "text is escaped");
            for table in report.split("<table>").skip(1) {
                let columns = table.matches("<th").count() - 1; // one is <thead>
                for row in table.split("<tr>").skip(2) {
                    assert_eq!(row.matches("<td").count(), columns, "{row}");
                }
            }
        } else {
            let cells = |line: &str| line.replace("\\|", "").matches('|').count();
            for block in report.split("\n\n").filter(|b| b.starts_with('|')) {
                let mut rows = block.lines().map(cells);
                let columns = rows.next().unwrap();
                assert!(rows.all(|r| r == columns), "{block}");
            }
        }
    }
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        3,
        "no temporary file stays"
    );
}

#[test]
fn a_report_of_no_known_form_is_a_wrong_command_line() {
    let out = nq(&["eval", "demo", "--report", "x.pdf"]);
    assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
    assert!(stderr(&out).contains("ends in .md or .html"));
}

#[test]
fn eval_refuses_with_exit_code_1_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("bad.txt");
    fs::write(&bad, b"ab\xff").unwrap();
    let short = dir.path().join("short.txt");
    fs::write(&short, "three words only").unwrap();
    let (bad, short) = (bad.to_str().unwrap(), short.to_str().unwrap());
    for (args, expected) in [
        (
            vec!["eval", "demo", "--text", bad],
            "expected UTF-8, found byte 0xff",
        ),
        (
            vec!["eval", "demo", "--text", short],
            "expected at least one window of 1024 tokens",
        ),
        (vec!["eval", "demo", "--text", "/no/such"], "/no/such"),
        (
            vec!["eval", "demo", "--ctx", "4096"],
            "at most the model's 1024, found 4096",
        ),
        (vec!["eval", "no-such-model"], "no-such-model"),
    ] {
        let out = nq(&args);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {}", stderr(&out));
        assert!(
            stderr(&out).contains(expected),
            "{args:?}: {}",
            stderr(&out)
        );
        assert!(out.stdout.is_empty(), "{args:?}");
    }
    let usage = nq(&["eval", "demo", "--protocol", "mine"]);
    assert_eq!(usage.status.code(), Some(2));
}

#[test]
fn bench_reports_rows_beside_the_measured_bandwidth() {
    let out = nq(&[
        "bench",
        "demo",
        "-p",
        "32",
        "-n",
        "8",
        "--depth",
        "16",
        "--repeats",
        "2",
        "--json",
    ]);
    let rows: Value =
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", stderr(&out)));
    let rows = rows.as_array().unwrap();
    let tests: Vec<&str> = rows.iter().map(|r| r["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["pp32", "tg8", "chat8"]);
    for row in rows {
        keys(
            row,
            &[
                "test",
                "depth",
                "batch",
                "engine",
                "kernels",
                "activations",
                "bits",
                "codes",
                "device",
                "threads",
                "tok_s",
                "tok_s_std",
                "gb_s",
                "bandwidth_share",
                "ms_per_token_p50",
                "ms_per_token_p99",
                "repeats",
            ],
        );
        let f = |key: &str| row[key].as_f64().unwrap();
        assert!(
            f("tok_s") > 0.0 && f("ms_per_token_p50") <= f("ms_per_token_p99"),
            "{row}"
        );
        assert!((f("bandwidth_share") - f("gb_s") / f("machine_gb_s")).abs() < 1e-9);
        assert_eq!(
            (row["depth"].as_u64(), row["repeats"].as_u64()),
            (Some(16), Some(2))
        );
    }
    assert!(rows[2]["streaming_overhead"].is_number());
    // A figure above the machine's limit is an error, in the row and in the exit code.
    let impossible = rows.iter().any(|r| r.get("measurement_error").is_some());
    assert_eq!(
        out.status.code(),
        Some(i32::from(impossible)),
        "{}",
        stderr(&out)
    );
}

/// Rows of `nq bench demo --json` with more flags, a short prefill and a short decode.
pub(crate) fn bench_rows(model: &str, more: &[&str]) -> Vec<Value> {
    let mut args = vec!["bench", model, "-p", "8", "-n", "4", "--repeats", "1"];
    args.extend(["--json"]);
    args.extend(more);
    let out = nq(&args);
    let rows = serde_json::from_slice(&out.stdout);
    let rows: Value = rows.unwrap_or_else(|e| panic!("{args:?}: {e}: {}", stderr(&out)));
    rows.as_array().unwrap().clone()
}

/// What `--bits 4` makes has one name, wherever it is shown.
#[test]
fn codes_are_called_the_same_everywhere() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("mixed").to_str().unwrap().to_owned();
    let how = ["--bits", "4", "--method", "rtn", "--no-measure", "--json"];
    let made = json(&nq(
        &[&["quantize", "demo", "--out", &path][..], &how].concat()
    ));
    assert_eq!(made["codes"], "4-bit mix");
    let inspected = json(&nq(&["inspect", &path, "--json"]));
    assert_eq!(inspected["codes"], made["codes"]);
    for row in bench_rows(&path, &[]) {
        assert_eq!(row["codes"], made["codes"]);
    }
    for (flags, codes) in [(&[][..], "unquantized"), (&["--bits", "8"], "8-bit")] {
        assert_eq!(
            bench_rows("demo", &[flags, &["--no-chat"]].concat())[0]["codes"],
            codes
        );
    }
    let out = nq(&["bench", &path, "-p", "8", "-n", "0", "--repeats", "1"]);
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(said.contains(": 4-bit mix, "), "{said}");
}

#[test]
fn bench_breaks_a_token_down_into_operations() {
    let rows = bench_rows("demo", &["--breakdown", "--bits", "4"]);
    for row in &rows[..2] {
        let b = &row["breakdown"];
        let f = |v: &Value, key: &str| v[key].as_f64().unwrap_or_else(|| panic!("{key} in {v}"));
        let ops = b["ops"].as_array().unwrap();
        for name in [
            "qkv",
            "o",
            "gate_up",
            "down",
            "head",
            "attention",
            "rms_norm",
        ] {
            let op = ops.iter().find(|o| {
                let op = o["op"].as_str().unwrap();
                op.split(' ').next() == Some(name)
            });
            let op = op.unwrap_or_else(|| panic!("{name} is not in {b}"));
            assert!(f(op, "us_per_token") > 0.0 && f(op, "calls_per_token") > 0.0);
        }
        // Operations and the time between them add up to the token's time.
        let sum: f64 = ops.iter().map(|o| f(o, "us_per_token")).sum();
        let all = sum + f(b, "other_us_per_token");
        assert!((all / f(b, "us_per_token") - 1.0).abs() < 1e-6, "{b}");
    }
    let table = nq(&[
        "bench",
        "demo",
        "-p",
        "0",
        "-n",
        "4",
        "--repeats",
        "1",
        "--breakdown",
    ]);
    let text = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(text.contains("of bandwidth |") && text.contains("| between operations"));
}

#[test]
fn bench_decodes_several_sequences_at_once() {
    let rows = bench_rows("demo", &["--batch", "3", "--depth", "20", "--kv", "8"]);
    for row in &rows[..2] {
        assert_eq!(
            (row["batch"].as_u64(), row["depth"].as_u64()),
            (Some(3), Some(20))
        );
        assert!(row["tok_s"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn bench_says_what_activations_and_instructions_it_ran_with() {
    let activations = |bits: &str, choice: &str| {
        let rows = bench_rows("demo", &["--bits", bits, "--activations", choice]);
        rows[0]["activations"].as_str().unwrap().to_owned()
    };
    assert_eq!(activations("4", "auto"), "int8 g32 + int16 g128");
    assert_eq!(activations("8", "auto"), "int16 g128");
    assert_eq!(activations("8", "int8-g16"), "int8 g16");
    assert_eq!(activations("16", "bf16"), "bf16");
    let wrong = nq(&["bench", "demo", "--activations", "int4"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(stderr(&wrong).contains("expected auto, auto-bf16, f32, bf16"));

    for isa in Isa::ALL {
        if isa.available() {
            let rows = bench_rows("demo", &["--bits", "4", "--isa", isa.name()]);
            assert_eq!(rows[0]["device"], format!("cpu ({isa})"));
        } else {
            println!("skipped: {isa} is not available on this CPU");
            let out = nq(&["bench", "demo", "--isa", isa.name()]);
            assert_eq!(out.status.code(), Some(1));
            assert!(stderr(&out).contains(isa.name()), "{}", stderr(&out));
        }
    }
}

/// The baseline runs unquantized models and GGUF files.
#[test]
fn bench_runs_candle_beside() {
    let rows = bench_rows("demo", &["--engine", "candle"]);
    assert!(
        rows.iter()
            .all(|r| r["engine"] == "candle" && r["bits"] == 32)
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("demo-q8_0.gguf");
    let file = file.to_str().unwrap();
    let convert = [
        "convert", "demo", file, "--format", "gguf", "--type", "q8_0",
    ];
    let out = nq(&[&convert[..], &["--requantize"]].concat());
    assert!(out.status.success(), "{}", stderr(&out));
    let rows = bench_rows(file, &["--engine", "candle", "--depth", "4"]);
    for row in &rows {
        assert_eq!(
            (row["engine"].as_str(), row["bits"].as_u64()),
            (Some("candle"), Some(8))
        );
        assert!(row["tok_s"].as_f64().unwrap() > 0.0);
    }
    let refused = nq(&["bench", "demo", "--bits", "4", "--engine", "candle"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("expected unquantized ones"));
}

#[test]
fn eval_rounds_the_model_but_not_what_it_is_held_against() {
    let kld = |activations: &str| {
        let mut args = vec!["eval", "demo", "--against", "demo", "--json"];
        args.extend(SMALL);
        args.extend(["--activations", activations]);
        json(&nq(&args))[0]["kld"]["mean"].as_f64().unwrap()
    };
    assert!(kld("f32").abs() < 1e-9);
    let rounded = kld("bf16");
    assert!((1e-9..1e-3).contains(&rounded), "{rounded}");
}

#[test]
fn bench_refuses_what_it_cannot_measure() {
    for (args, code, expected) in [
        (
            vec!["bench", "demo", "-p", "0", "-n", "0"],
            2,
            "nothing to measure",
        ),
        (
            vec!["bench", "--preset", "qwen3-7b"],
            2,
            "expected one of qwen3-0.6b",
        ),
        (
            vec!["bench", "demo", "-p", "4096"],
            1,
            "at most the model's 1024 positions",
        ),
    ] {
        let out = nq(&args);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {}", stderr(&out));
        assert!(
            stderr(&out).contains(expected),
            "{args:?}: {}",
            stderr(&out)
        );
    }
    let both = nq(&["bench", "demo", "--preset", "qwen3-0.6b"]);
    assert_eq!(both.status.code(), Some(2));
}

/// Texts are the same with drafts, of the model's own and of a given text.
#[test]
fn bench_measures_drafts_on_a_text() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo-eval.txt");
    let args = ["bench", "demo", "--bits", "8", "--text", text];
    let run = |more: &[&str]| {
        let few = ["-n", "24", "--repeats", "1", "--json"];
        json(&nq(&[&args[..], &few, more].concat()))
    };
    let own = run(&["--draft", "demo"]);
    let drafts = &own[1]["drafts"];
    assert!(
        own[0].get("drafts").is_none() && drafts["same"] == true,
        "{own}"
    );
    // Whether drafting goes on depends on measured times, which say little on a busy machine.
    let off = drafts["off"].as_str();
    assert!(
        drafts["replayed"] == false && off.is_none_or(|o| o.contains("drafting is off")),
        "{own}"
    );
    let dir = tempfile::tempdir().unwrap();
    let part = dir.path().join("part.txt");
    fs::write(&part, &fs::read(text).unwrap()[..1200]).unwrap();
    let part = part.to_str().unwrap();
    let few = ["bench", "demo", "--bits", "8", "--repeats", "1", "--json"];
    // A fixed number of tokens is drafted however long that takes.
    let edit = ["--text", part, "--before", part, "--draft-tokens", "4"];
    let edit = json(&nq(&[&few[..], &edit].concat()));
    let drafts = &edit[1]["drafts"];
    assert!(
        drafts["replayed"] == true && drafts["same"] == true && drafts["off"].is_null(),
        "{edit}"
    );
    assert!(drafts["right"].as_f64() > Some(0.8), "{edit}");
    for (args, why) in [
        (vec!["bench", "demo", "--draft", "ngram"], "--text"),
        (
            vec!["bench", "demo", "--text", text, "--draft", "eagle3:"],
            "expected a folder",
        ),
        (
            vec![
                "bench",
                "demo",
                "--bits",
                "8",
                "--text",
                text,
                "--draft",
                "eagle3:/nowhere/head",
            ],
            "/nowhere/head: no config.json",
        ),
    ] {
        let out = nq(&args);
        assert!(
            !out.status.success() && stderr(&out).contains(why),
            "{}",
            stderr(&out)
        );
    }
}

/// A model with other tokens does not draft.
#[test]
fn other_vocabularies_draft_for_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo");
    for entry in fs::read_dir(demo).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    // The flags of tokenizer_config.json count.
    let file = dir.path().join("tokenizer_config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let added = json["added_tokens_decoder"].as_object_mut().unwrap();
    let (id, token) = added.iter_mut().next().unwrap();
    let id = id.clone();
    token["special"] = false.into();
    fs::write(&file, json.to_string()).unwrap();
    let draft = dir.path().to_str().unwrap();
    let out = nq(&[
        "chat", "demo", "--bits", "8", "-p", "Hello!", "--draft", draft,
    ]);
    let said = stderr(&out);
    let wanted = ["its vocabulary differs", &format!("token {id} is special")];
    assert!(
        !out.status.success() && wanted.iter().all(|w| said.contains(w)),
        "{said}"
    );
}
