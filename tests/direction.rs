//! The crates depend on each other in one direction only.

use cargo_metadata::{DependencyKind, MetadataCommand};
use std::path::Path;

/// Each crate may use those before it.
const ORDER: [&str; 20] = [
    "nq-model",
    "nq-pictures",
    "nq-formats",
    "nq-kernels",
    "nq-runtime",
    "nq-cpu",
    "nq-f32",
    "nq-kernels-ampere",
    "nq-kernels-hopper",
    "nq-kernels-blackwell",
    "nq-kernels-ptx",
    "nq-cuda",
    "nq-wgpu",
    "nq-load",
    "nq-evals",
    "nq-quantize",
    "nq-answers",
    "nq-serve",
    "nq-llm",
    "nq-python",
];

/// Fuzz targets: programs that nothing depends on.
const FUZZ: &str = "nq-fuzz";

/// What tests use. It may use every crate, and no crate but for its tests.
const TESTKIT: &str = "nq-testkit";

#[test]
fn crates_depend_leftwards_only() {
    let metadata = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo metadata");
    let rank = |name: &str| ORDER.iter().position(|n| *n == name);
    let mut seen = 0;
    let ordered = |name: &str| ![FUZZ, TESTKIT].contains(&name);
    for package in metadata.packages.iter().filter(|p| ordered(&p.name)) {
        let own = rank(&package.name)
            .unwrap_or_else(|| panic!("{} has no place in the order of crates", package.name));
        seen += 1;
        // A crate's own tests may enable its features.
        let others = package.dependencies.iter();
        for dependency in others.filter(|d| d.name != *package.name) {
            let for_tests = dependency.kind == DependencyKind::Development;
            assert!(for_tests || dependency.name != TESTKIT, "{}", package.name);
            if let Some(other) = rank(&dependency.name) {
                assert!(
                    other < own,
                    "{} must not use {}",
                    package.name,
                    dependency.name
                );
            }
        }
    }
    assert_eq!(seen, ORDER.len());
}

/// The Python module is a program like others: it knows the library for programs alone.
#[test]
fn the_python_module_uses_the_library_alone() {
    let metadata = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo metadata");
    let module = metadata.packages.iter().find(|p| p.name == "nq-python");
    let used = module.expect("nq-python").dependencies.iter();
    let own: Vec<&str> = used
        .map(|d| d.name.as_str())
        .filter(|name| name.starts_with("nq-"))
        .collect();
    assert_eq!(own, ["nq-llm"]);
}

/// A program that uses the library need not build the command line: what only that uses is left out without `cli`.
#[test]
fn the_library_does_without_the_command_line() {
    let metadata = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo metadata");
    let package = metadata.packages.iter().find(|p| p.name == "nq-llm");
    let dependencies = &package.expect("nq-llm").dependencies;
    let normal = dependencies
        .iter()
        .filter(|d| d.kind == DependencyKind::Normal);
    let always: Vec<&str> = normal
        .filter(|d| !d.optional)
        .map(|d| d.name.as_str())
        .collect();
    let needed = [
        "nq-answers",
        "nq-cpu",
        "nq-evals",
        "nq-formats",
        "nq-kernels",
        "nq-load",
        "nq-model",
        "nq-pictures",
        "nq-quantize",
        "nq-runtime",
        "serde_json",
        "strsim",
        "thiserror",
    ];
    assert_eq!(always, needed);
}

/// Only the binary parses arguments, prints and wraps errors untyped; only files, kernels and drivers
/// may need `unsafe`.
#[test]
fn libraries_do_not_use_what_belongs_to_the_binary() {
    let metadata = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo metadata");
    let libraries = |name: &str| !["nq-llm", FUZZ].contains(&name);
    for package in metadata.packages.iter().filter(|p| libraries(&p.name)) {
        for banned in ["clap", "anyhow", "indicatif", "rustyline"] {
            assert!(
                package.dependencies.iter().all(|d| d.name != banned),
                "{} must not use {banned}",
                package.name
            );
        }
        if !["nq-formats", "nq-kernels", "nq-cpu", "nq-cuda"].contains(&package.name.as_str()) {
            let folder = package.manifest_path.parent().expect("a folder");
            let root = std::fs::read_to_string(folder.join("src/lib.rs")).expect("lib.rs");
            assert!(
                root.contains("#![forbid(unsafe_code)]"),
                "{} forbids unsafe",
                package.name
            );
        }
    }
}

/// A library without tests, or without examples in its docs, says so: each is a program to link, or a run of rustdoc, for
/// nothing. One with them does not leave them out.
#[test]
fn libraries_are_tested_where_they_have_tests() {
    let metadata = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo metadata");
    let libraries = metadata.packages.iter().flat_map(|p| &p.targets);
    for library in libraries.filter(|t| t.is_lib()) {
        let sources = sources(library.src_path.as_std_path().parent().expect("a folder"));
        let has = |what: &dyn Fn(&str) -> bool| sources.lines().any(|l| what(l.trim_start()));
        let tests = has(&|l| l == "#[test]");
        assert_eq!(library.test, tests, "tests of {}", library.name);
        let examples = has(&|l| l.starts_with("//! ```") || l.starts_with("/// ```"));
        assert_eq!(library.doctest, examples, "examples of {}", library.name);
    }
}

/// All Rust code below a folder.
fn sources(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let paths = entries.map(|e| e.expect("an entry").path());
    let code = paths.map(|path| match path.extension() {
        _ if path.is_dir() => sources(&path),
        Some(e) if e == "rs" => std::fs::read_to_string(&path).expect("UTF-8"),
        _ => String::new(),
    });
    code.collect()
}

/// The tests of a crate are one program, so a file that no module names would not be run, without a word.
#[test]
fn every_file_of_tests_is_in_a_program() {
    let metadata = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo metadata");
    let (mut programs, mut alone) = (0, 0);
    for package in &metadata.packages {
        let tests = package.targets.iter().filter(|t| t.is_test());
        let roots: Vec<&Path> = tests.map(|t| t.src_path.as_std_path()).collect();
        programs += roots.len();
        alone += roots
            .iter()
            .filter(|r| !r.ends_with("tests/main.rs"))
            .count();
        let folder = package.manifest_path.as_std_path().parent();
        let main = folder.expect("a folder").join("tests/main.rs");
        if main.exists() {
            assert!(roots.contains(&&*main), "{} is no program", main.display());
            named_by(&main, &roots);
        }
    }
    assert!(
        alone <= 2,
        "{alone} programs beside those of all tests of a crate, each of which links nq once more"
    );
    assert!(programs <= 12, "{programs} programs of tests");
}

/// Fails for a file beside or below `parent`, a file with modules, that it does not name.
fn named_by(parent: &Path, roots: &[&Path]) {
    let source = std::fs::read_to_string(parent).expect("UTF-8");
    let entries = std::fs::read_dir(parent.parent().expect("a folder")).expect("a folder");
    for path in entries.map(|e| e.expect("an entry").path()) {
        let own = path == parent || roots.contains(&path.as_path());
        let below = path.join("mod.rs");
        if own || !(below.exists() || path.extension().is_some_and(|e| e == "rs")) {
            continue;
        }
        let module = path.file_stem().and_then(|s| s.to_str()).expect("UTF-8");
        let named = source
            .lines()
            .any(|l| l.ends_with(&format!("mod {module};")));
        assert!(named, "{} has no `mod {module};`", parent.display());
        if below.exists() {
            named_by(&below, roots);
        }
    }
}
