//! `nq rank` as users run it, on the demo model.

#![cfg(feature = "demo")]

use crate::common::{nq, stderr, stdout};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders and files that a test uses.
struct RankFolder(tempfile::TempDir);

impl RankFolder {
    /// With the demo model rounded to 8 and to 4 bits.
    fn new() -> Self {
        let place = RankFolder(tempfile::tempdir().unwrap());
        for bits in ["4", "8"] {
            let how = ["--simple", "--bits", bits, "--method", "rtn"];
            let out = place.path(bits);
            let out = ["--no-measure", "--out", &out];
            let made = place.nq(&[&["quantize", "demo"][..], &how, &out].concat());
            assert!(made.status.success(), "{}", stderr(&made));
        }
        place
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn nq(&self, args: &[&str]) -> std::process::Output {
        let common = ["--offline", "--device", "cpu"];
        nq(self.0.path(), &[args, &common].concat())
    }

    /// Ranks `files` on one window; what is printed, and notes.
    fn rank(&self, files: &[&str], more: &[&str]) -> (Value, String) {
        let args = [
            &["rank", "demo"],
            files,
            &["--windows", "1", "--json"],
            more,
        ]
        .concat();
        let out = self.nq(&args);
        assert!(out.status.success(), "{}", stderr(&out));
        (serde_json::from_str(&stdout(&out)).unwrap(), stderr(&out))
    }

    /// Files that were kept, with this extension.
    fn kept(&self, extension: &str) -> Vec<PathBuf> {
        let folder = self.0.path().join("cache/rank");
        let files = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
        let mut files: Vec<_> = files
            .filter(|p| p.extension().unwrap() == extension)
            .collect();
        files.sort();
        files
    }
}

fn number(value: &Value, pointer: &str) -> f64 {
    let found = value.pointer(pointer).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("{pointer} is missing in {value}"))
}

/// Changes a byte in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn files_are_ranked_and_what_was_measured_is_kept() {
    let place = RankFolder::new();
    let (four, eight) = (&*place.path("4"), &*place.path("8"));
    // What a run that was killed after the first file leaves.
    let (first, notes) = place.rank(&[four], &[]);
    assert!(notes.contains("1 of 1: 4"), "{notes}");
    let logits = place.kept("logits");
    assert_eq!(logits.len(), 6, "the text and five kinds");

    let report = place.path("report.html");
    let record = place.path("record.json");
    let more = ["--report", &report, "--record", &record];
    let (ranking, notes) = place.rank(&[eight, four], &more);
    assert!(notes.contains("1 of 2: 8\n"), "{notes}");
    assert!(
        notes.contains("2 of 2: 4, measured by an earlier run"),
        "{notes}"
    );
    let files = ranking["files"].as_array().unwrap();
    assert_eq!(files[0]["name"], "4", "the smallest first");
    assert_eq!(files[0]["text"], first["files"][0]["text"]);
    assert_eq!(place.kept("logits"), logits, "the source was not run again");
    assert_eq!(ranking["standard"], false);

    for file in files {
        assert_eq!(file["frontier"], true, "{file}");
        let parts = ["body", "embedding_and_head", "mtp", "tower"];
        let parts = parts.map(|p| number(file, &format!("/parts/{p}")));
        assert_eq!(parts.iter().sum::<f64>(), number(file, "/bytes"));
        assert!(parts[0] > 0.0 && parts[1] > 0.0 && parts[2] + parts[3] == 0.0);
        assert_eq!(number(file, "/text/tokens"), 1023.0);
        for key in [
            "kld/p99",
            "kld/p999",
            "kld_errors/p999",
            "errors/kld",
            "same_top1",
        ] {
            assert!(number(file, &format!("/text/{key}")) > 0.0, "{key}");
        }
        assert_eq!(number(file, "/tasks/tasks"), 12.0);
        let valid = |how: &str| number(file, &format!("/tasks/{how}/valid"));
        assert!(valid("held") > valid("free"), "{}", file["tasks"]);
        let kinds = file["kinds"].as_array().unwrap();
        let names: Vec<&str> = kinds.iter().map(|k| k["text"].as_str().unwrap()).collect();
        assert_eq!(names, ["prose", "code", "mathematics", "languages", "chat"]);
    }
    let kld = |i: usize| number(&files[i], "/text/kld/mean");
    assert!(kld(0) > 10.0 * kld(1), "{} {}", kld(0), kld(1));
    assert!(kld(1) > number(&ranking, "/floor/mean"));
    let same = |i: usize| number(&files[i], "/answers/mean_equal");
    assert!(same(0) < same(1), "{} {}", same(0), same(1));

    let page = fs::read_to_string(report).unwrap();
    assert_eq!(page.matches("<svg").count(), 1);
    for part in [
        "* 4",
        "Closest at their size (*): 4, 8.",
        "width=device-width",
    ] {
        assert!(page.contains(part), "{part}");
    }

    // What is sent to others has the same figures, hashes and no paths.
    let sent = fs::read_to_string(record).unwrap();
    assert!(!sent.contains(place.0.path().to_str().unwrap()), "{sent}");
    let sent: Value = serde_json::from_str(&sent).unwrap();
    let protocol = sent["protocol"].as_str().unwrap();
    assert!(protocol.starts_with("nq-rank 1: ") && protocol.ends_with(", 1 windows of 1024"));
    let names: Vec<&Value> = (0..3).map(|i| &sent["models"][i]["name"]).collect();
    assert_eq!(names, ["demo", "4", "8"]);
    for (i, file) in files.iter().enumerate() {
        assert_eq!(sent["quality"][i]["kld"], file["text"]["kld"]);
        let hashes = &sent["models"][i + 1]["files"];
        assert_eq!(hashes[0]["sha256"].as_str().map(str::len), Some(64));
        let more = &sent["more"]["files"][i];
        assert_eq!(
            more["kinds"]["code"]["kld"],
            file["kinds"][1]["kld"]["mean"]
        );
        assert_eq!(more["answers"]["same_32"], file["answers"]["same_32"]);
        assert_eq!(more["tasks"], file["tasks"]);
        assert!(more["answers"].get("equal_tokens").is_none());
    }
    assert_eq!(sent["more"]["floor"], ranking["floor"]);

    // What was changed on disk is computed again, with the same result.
    damage(&logits[0]);
    place.kept("json").iter().for_each(|p| damage(p));
    let (again, notes) = place.rank(&[eight, four], &[]);
    assert!(notes.contains("computing them again"), "{notes}");
    assert!(notes.contains("measuring again"), "{notes}");
    assert_eq!(again["files"], ranking["files"]);
}

/// The figures of the text are those that `nq eval` finds, but for the rounding of kept log-probabilities.
#[test]
fn a_ranking_agrees_with_an_evaluation() {
    let place = RankFolder::new();
    let four = &*place.path("4");
    let list = place.path("list.txt");
    fs::write(&list, format!("# one file\n\n{four}\n")).unwrap();
    let (ranking, _) = place.rank(&[], &["--list", &list, "--sort", "kld"]);
    let how = ["--ctx", "1024", "--windows", "1", "--json"];
    let out = place.nq(&[&["eval", four, "--against", "demo"][..], &how].concat());
    let evaluation: Value = serde_json::from_str(&stdout(&out)).unwrap();
    for (key, bound) in [
        ("mean", 1e-4),
        ("median", 2e-3),
        ("p99", 2e-3),
        ("max", 2e-3),
    ] {
        let found = number(&ranking, &format!("/files/0/text/kld/{key}"));
        let expected = number(&evaluation, &format!("/0/kld/{key}"));
        assert!(
            (found - expected).abs() < bound / 100.0 + bound * expected,
            "{key}: {found} {expected}"
        );
    }
    let ppl = number(&ranking, "/files/0/text/ppl") / number(&evaluation, "/0/ppl");
    assert!((ppl - 1.0).abs() < 1e-12, "{ppl}");
}

/// A source that does not fit the memory is run so.
#[test]
fn a_source_run_layer_by_layer_is_the_source() {
    let place = RankFolder::new();
    let four = &*place.path("4");
    let (whole, _) = place.rank(&[four], &[]);
    let (streamed, notes) = place.rank(&[four], &["--layer-by-layer"]);
    assert!(notes.contains("demo is run layer by layer"), "{notes}");
    for text in ["text", "kinds/0", "kinds/4"] {
        let kld = |r: &Value| number(r, &format!("/files/0/{text}/kld/mean"));
        let ratio = kld(&streamed) / kld(&whole);
        assert!((ratio - 1.0).abs() < 1e-3, "{text}: {ratio}");
    }
    let floor = |r: &Value| number(r, "/floor/mean");
    let ratio = floor(&streamed) / floor(&whole);
    assert!((0.2..5.0).contains(&ratio), "{ratio}");
    for left_out in ["answers", "tasks"] {
        assert!(streamed["files"][0][left_out].is_null() && !whole["files"][0][left_out].is_null());
    }
    assert!(
        streamed["source_engine"]
            .as_str()
            .unwrap()
            .contains("layer by layer")
    );
}

#[test]
fn what_cannot_be_ranked_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let refused = |args: &[&str], code: i32, why: &str| {
        let args = [&["rank", "demo"], args, &["--offline", "--device", "cpu"]].concat();
        let out = nq(home.path(), &args);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {}", stderr(&out));
        assert!(stderr(&out).contains(why), "{args:?}: {}", stderr(&out));
    };
    refused(&[], 2, "expected files to rank");
    refused(&["demo", "--report", "x.md"], 2, "ends in .html");
    refused(
        &["demo", "--record", "no-such/x.json"],
        1,
        "record: expected a file in a folder",
    );
    refused(&["demo", "--windows", "0"], 2, "1 to 4096");
    refused(&["no-such-model"], 1, "no model \"no-such-model\"");
    refused(&["demo", "--keep", "1MB"], 1, "--windows needs less");
}
