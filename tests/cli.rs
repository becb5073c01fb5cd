//! The real binary: flags, exit codes, stdout and stderr.

use crate::common::{command, nq, stderr, stdout};
use std::fs::File;
use std::process::Stdio;

#[test]
fn version_names_the_features() {
    let home = tempfile::tempdir().expect("a folder");
    let out = nq(home.path(), &["--version"]);
    assert!(out.status.success());
    assert!(stdout(&out).starts_with("nq 0."), "{}", stdout(&out));
    assert_eq!(stdout(&out).contains("demo"), cfg!(feature = "demo"));
}

#[test]
fn a_misspelt_flag_is_exit_code_2() {
    let home = tempfile::tempdir().expect("a folder");
    let out = nq(home.path(), &["quantize", "demo", "--bit", "4"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(
        stderr(&out).contains("--bits"),
        "the right flag is suggested: {}",
        stderr(&out)
    );
    assert!(out.stdout.is_empty());
}

#[test]
fn threads_of_the_environment_are_checked_and_the_flag_comes_first() {
    let home = tempfile::tempdir().expect("a folder");
    let doctor = |args: &[&str], threads: &str| {
        let mut command = command(home.path(), &["doctor", "--json"]);
        command.args(args).env("NQ_THREADS", threads);
        command.output().expect("nq runs")
    };
    let used = |out: &std::process::Output| {
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).expect("a report");
        report["cpu"]["threads"].as_u64()
    };
    assert_eq!(used(&doctor(&[], "3")), Some(3));
    assert_eq!(used(&doctor(&["--threads", "2"], "3")), Some(2));
    let wrong = doctor(&[], "many");
    assert_eq!(wrong.status.code(), Some(1));
    let said = stderr(&wrong);
    assert!(
        said.contains("NQ_THREADS: expected 1 to 1024, found \"many\""),
        "{said}"
    );
}

#[test]
fn an_unknown_model_says_what_was_tried() {
    let home = tempfile::tempdir().expect("a folder");
    let out = nq(home.path(), &["inspect", "no-such-model"]);
    assert_eq!(out.status.code(), Some(1));
    let said = stderr(&out);
    assert!(
        said.contains("no-such-model") && said.contains("hub id"),
        "{said}"
    );
    assert!(!said.contains("did you mean"), "{said}");
    std::fs::create_dir_all(home.path().join("models/qwen3-int4")).expect("a folder");
    let out = nq(home.path(), &["inspect", "Qwen3-int8"]);
    let said = stderr(&out);
    assert!(said.contains("did you mean qwen3-int4?"), "{said}");
}

/// Mesa's drivers look for a desktop, and print an error of their own where there is none.
#[test]
fn drivers_without_a_desktop_say_nothing() {
    let home = tempfile::tempdir().expect("a folder");
    let bench = [
        "bench",
        "demo",
        "-p",
        "8",
        "-n",
        "2",
        "--repeats",
        "1",
        "--no-chat",
    ];
    for args in [&["doctor"][..], &bench] {
        let mut command = command(home.path(), args);
        let out = command
            .env_remove("XDG_RUNTIME_DIR")
            .output()
            .expect("nq runs");
        assert!(out.status.success(), "{out:?}");
        assert!(
            !stderr(&out).contains("XDG_RUNTIME_DIR"),
            "{}",
            stderr(&out)
        );
    }
}

#[test]
fn models_are_listed_and_removed_by_name() {
    let home = tempfile::tempdir().expect("a folder");
    let out = nq(home.path(), &["list"]);
    assert!(out.status.success() && out.stdout.is_empty(), "{out:?}");

    let model = home.path().join("models/broken");
    std::fs::create_dir_all(&model).expect("a folder");
    std::fs::write(model.join("config.json"), "{").expect("a file");
    let out = nq(home.path(), &["list", "--json"]);
    let rows: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(rows[0]["name"], "broken");
    assert!(
        rows[0]["problem"]
            .as_str()
            .is_some_and(|p| p.contains("config.json")),
        "{rows}"
    );

    for bad in ["../models", ".", "broken/config.json", ""] {
        assert_eq!(
            nq(home.path(), &["rm", bad, "--yes"]).status.code(),
            Some(1),
            "{bad}"
        );
    }
    assert_eq!(
        nq(home.path(), &["rm", "broken"]).status.code(),
        Some(1),
        "nobody to ask"
    );
    assert!(model.exists());
    assert!(nq(home.path(), &["rm", "broken", "--yes"]).status.success());
    assert!(!model.exists());
    assert_eq!(
        nq(home.path(), &["rm", "broken", "--yes"]).status.code(),
        Some(1)
    );
}

/// A manual page has the help of every flag, also of those that `-h` leaves out.
#[test]
fn manual_pages_explain_every_flag() {
    let home = tempfile::tempdir().unwrap();
    let pages = home.path().join("man");
    std::fs::create_dir(&pages).unwrap();
    let out = nq(home.path(), &["man", pages.to_str().unwrap()]);
    assert!(out.status.success(), "{out:?}");
    let page = std::fs::read_to_string(pages.join("nq-quantize.1")).unwrap();
    let simple = page.split("\\-\\-simple\\fR\n").nth(1).unwrap();
    assert!(simple.starts_with("One scheme for all layers"), "{simple}");
    for page in std::fs::read_dir(&pages).unwrap() {
        let text = std::fs::read_to_string(page.unwrap().path()).unwrap();
        for flag in text.split("\n.TP\n\\fB").skip(1) {
            let explained = flag.lines().nth(1).is_some_and(|help| !help.is_empty());
            assert!(explained, "{flag}");
        }
    }
}

#[test]
fn completions_are_printed_for_every_shell() {
    let home = tempfile::tempdir().expect("a folder");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let out = nq(home.path(), &["completions", shell]);
        assert!(
            out.status.success() && stdout(&out).contains("quantize"),
            "{shell}"
        );
    }
}

/// Conflicts that clap's own rules cannot express are usage errors too, before any loading.
#[test]
fn flags_that_make_no_sense_are_exit_code_2() {
    let home = tempfile::tempdir().expect("a folder");
    for (args, said) in [
        (&["chat", "no-such", "--bits", "7"][..], "6, 8 or 16"),
        (&["bench", "no-such", "--bits", "2"], "6, 8 or 16"),
        (&["bench", "--preset", "qwen3-9b"], "qwen3-8b"),
        (
            &["bench", "no-such", "-p", "0", "-n", "0"],
            "nothing to measure",
        ),
        (&["bench", "no-such", "--repeats", "0"], "expected 1 to"),
        (
            &[
                "convert", "no-such", "x", "--format", "nq", "--type", "q4_0",
            ],
            "--type",
        ),
        (&["quantize", "no-such", "--max-kld", "nan"], "more than 0"),
        (&["quantize", "no-such", "--max-kld", "-1"], "more than 0"),
        (&["quantize", "no-such", "--min-top1", "2"], "0 to 1"),
        (
            &["quantize", "no-such", "--sym", "--asym"],
            "cannot be used with",
        ),
        (
            &["quantize", "no-such", "--budget", "5"],
            "--budget needs --method auto",
        ),
        (
            &[
                "quantize",
                "no-such",
                "--target-bpw",
                "5",
                "--format",
                "awq",
            ],
            "--target-bpw: expected a format in which",
        ),
        (
            &[
                "quantize",
                "no-such",
                "--format",
                "gptq",
                "--head-bits",
                "8",
            ],
            "--head-bits: expected 16, which loaders of GPTQ need",
        ),
        // A negative number is a value, not a flag.
        (&["chat", "no-such", "--seed", "-1"], "invalid digit"),
        (&["eval", "no-such", "--ctx", "-3"], "invalid digit"),
    ] {
        let out = nq(home.path(), args);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {}", stderr(&out));
        assert!(stderr(&out).contains(said), "{args:?}: {}", stderr(&out));
    }
    // Valid: refused only for the model's name.
    for flag in ["--presence-penalty", "--frequency-penalty"] {
        let out = nq(home.path(), &["chat", "no-such", flag, "-0.5", "-p", "x"]);
        assert!(stderr(&out).contains("no model"), "{}", stderr(&out));
    }
}

/// Errors that a long run would hit at its end, or after a folder is made, are reported at once.
#[test]
fn files_are_looked_for_before_the_work() {
    let home = tempfile::tempdir().expect("a folder");
    let path = |name: &str| home.path().join(name).display().to_string();
    let (none, report, folder) = (path("none.txt"), path("none/r.md"), path("r.md"));
    std::fs::create_dir(&folder).expect("a folder");
    for (args, parts) in [
        (
            ["quantize", "no-such", "--calib", &none],
            ["--calib", "none.txt"],
        ),
        (
            ["quantize", "no-such", "--eval-text", &none],
            ["--eval-text", "none.txt"],
        ),
        (
            ["quantize", "no-such", "--calib", &folder],
            ["--calib", "found a folder"],
        ),
        (
            ["eval", "no-such", "--report", &report],
            ["a folder that exists", "none/r.md"],
        ),
        (
            ["eval", "no-such", "--report", &folder],
            ["expected a file", "r.md"],
        ),
    ] {
        let out = nq(home.path(), &args);
        let said = stderr(&out);
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(parts.iter().all(|p| said.contains(p)), "{args:?}: {said}");
        // The system's reason appears once.
        assert!(said.matches("os error").count() <= 1, "{said}");
    }
}

/// A reader that leaves early (`| head`) is no failure; output that cannot be written is an error;
/// neither is a panic.
#[test]
fn closed_and_full_outputs_are_no_panics() {
    let home = tempfile::tempdir().expect("a folder");
    let commands: [&[&str]; 4] = [
        &["completions", "bash"],
        &["list", "--json"],
        &["doctor", "--json"],
        &["inspect", "--help"],
    ];
    for args in commands {
        let mut child = command(home.path(), args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nq runs");
        drop(child.stdout.take());
        let out = child.wait_with_output().expect("nq ends");
        assert_eq!(out.status.code(), Some(0), "{args:?}: {}", stderr(&out));
    }
    let full = |args: &[&str]| {
        let full = File::options()
            .write(true)
            .open("/dev/full")
            .expect("a device");
        command(home.path(), args)
            .stdout(full)
            .output()
            .expect("nq runs")
    };
    for args in &commands[..3] {
        let out = full(args);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {}", stderr(&out));
        assert!(stderr(&out).contains("standard output"), "{}", stderr(&out));
    }
    for args in [&["--help"][..], &["--version"], &["help", "chat"]] {
        let out = full(args);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {}", stderr(&out));
        assert!(stderr(&out).contains("standard output"), "{}", stderr(&out));
    }
    // Notes without a reader cost nothing.
    let mut child = command(home.path(), &["list"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("nq runs");
    drop(child.stderr.take());
    assert_eq!(child.wait().expect("nq ends").code(), Some(0));
}

/// A flag without effect is reported.
#[cfg(feature = "demo")]
#[test]
fn a_gpus_memory_is_no_matter_on_a_cpu() {
    let home = tempfile::tempdir().expect("a folder");
    let plan = ["quantize", "demo", "--dry-run", "--device", "cpu"];
    let out = nq(home.path(), &plan);
    assert!(out.status.success() && !stderr(&out).contains("ignored"));
    let out = nq(
        home.path(),
        &[&plan[..], &["--device-memory", "1GB"]].concat(),
    );
    assert!(out.status.success());
    assert!(
        stderr(&out).contains("--device-memory is ignored"),
        "{}",
        stderr(&out)
    );
}

/// The demo model in a folder whose name is not UTF-8, and in nq's own with bits but no divergence.
#[cfg(all(feature = "demo", target_os = "linux"))]
#[test]
fn a_models_path_need_not_be_utf8_and_the_list_has_bits() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let home = tempfile::tempdir().expect("a folder");
    let demo = nq_testkit::demo();
    let odd = home.path().join(OsStr::from_bytes(b"\xff model"));
    let own = home.path().join("models/plain");
    for to in [&odd, &own] {
        std::fs::create_dir_all(to).expect("a folder");
        for file in std::fs::read_dir(&demo).expect("the demo") {
            let file = file.expect("a file");
            std::fs::copy(file.path(), to.join(file.file_name())).expect("a copy");
        }
    }
    let out = command(home.path(), &["inspect", "--json"])
        .arg(&odd)
        .output()
        .expect("nq runs");
    assert!(out.status.success(), "{}", stderr(&out));
    let out = nq(home.path(), &["list", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&stdout(&out)).expect("JSON");
    assert_eq!(rows[0]["bits_per_weight"], 16.0);
    assert!(rows[0]["file_bytes"].as_u64() > Some(27_000_000) && rows[0]["kld"].is_null());
    // A link to a model is as large as the model.
    let links = home.path().join("links");
    std::fs::create_dir(&links).expect("a folder");
    std::os::unix::fs::symlink(&own, links.join("linked")).expect("a link");
    let out = nq(
        home.path(),
        &["list", links.to_str().expect("UTF-8"), "--json"],
    );
    let linked: serde_json::Value = serde_json::from_str(&stdout(&out)).expect("JSON");
    assert_eq!(linked[0]["name"], "linked");
    assert_eq!(linked[0]["file_bytes"], rows[0]["file_bytes"]);
    // Downloads are reported with their path; one that fails gives exit code 1.
    let out = nq(home.path(), &["pull", "nobody/nothing", "--offline"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(stderr(&out).contains("nobody/nothing"), "{}", stderr(&out));
    // Who means a folder is told first that there is none.
    let out = nq(home.path(), &["inspect", "nobody/nothing", "--offline"]);
    assert_eq!(out.status.code(), Some(1));
    let expected =
        "nq: there is no folder or file nobody/nothing here; as a hub id, nobody/nothing: offline";
    assert!(stderr(&out).starts_with(expected), "{}", stderr(&out));
}
