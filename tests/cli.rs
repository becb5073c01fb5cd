//! The real binary: flags, exit codes, stdout against stderr.

mod common;

use common::{nq, stderr, stdout};

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
fn an_unknown_model_says_what_was_tried() {
    let home = tempfile::tempdir().expect("a folder");
    let out = nq(home.path(), &["inspect", "no-such-model"]);
    assert_eq!(out.status.code(), Some(1));
    let said = stderr(&out);
    assert!(
        said.contains("no-such-model") && said.contains("hub id"),
        "{said}"
    );
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
