//! Which destinations `force` may overwrite: a file with a file and a model with a model, nothing
//! else.

use crate::common::names;
use nq_formats::durable::{Form, check_destination, check_writable};
use nq_formats::export::Mix;
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::gguf::BlockType;
use nq_formats::nq::{Writer, WriterOptions};
use nq_formats::{Checkpoint, Files};
use serde_json::json;
use std::fs;
use std::path::Path;

const FORCE: ExportOptions = ExportOptions {
    requantize: false,
    mix: Mix::All(BlockType::Q8_0),
    force: true,
};

fn folder_with(dir: &Path, entries: &[&str]) {
    for entry in entries {
        match entry.strip_suffix('/') {
            Some(folder) => fs::create_dir_all(dir.join(folder)).unwrap(),
            None => fs::write(dir.join(entry), "mine").unwrap(),
        }
    }
}

#[test]
fn only_its_like_is_replaced() {
    for (entries, refused) in [
        (&[][..], None),
        (&["config.json"], None),
        (
            &[
                "config.json",
                "model.safetensors",
                "LICENSE.txt",
                "tokenizer.json",
            ],
            None,
        ),
        (
            &["config.json", "model.safetensors", "thesis.docx"],
            Some("found thesis.docx"),
        ),
        (&["config.json", "README.md"], Some("found README.md")),
        (&["letter.txt"], Some("found letter.txt")),
        (&["config.json", "photos/"], Some("found the folder photos")),
    ] {
        let dir = tempfile::tempdir().unwrap();
        folder_with(dir.path(), entries);
        let check = |form, force| check_destination(dir.path(), form, force);
        names(check(Form::Folder, false), &["already there", "--force"]);
        names(check(Form::File, true), &["expected a file", "folder"]);
        match refused {
            None => check(Form::Folder, true).unwrap(),
            Some(found) => names(check(Form::Folder, true), &["config.json", found]),
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "mine").unwrap();
    names(
        check_destination(&file, Form::Folder, true),
        &["found a file"],
    );
    names(check_destination(&file, Form::File, false), &["--force"]);
    names(
        check_destination(&file, Form::File, true),
        &["expected a GGUF file"],
    );
    for like in [&b"GGUF\x03"[..], b""] {
        fs::write(&file, like).unwrap();
        check_destination(&file, Form::File, true).unwrap();
    }
    check_destination(&dir.path().join("new"), Form::Folder, false).unwrap();
}

#[test]
fn writers_touch_no_folder_of_other_things_and_no_source() {
    let dir = tempfile::tempdir().unwrap();
    let demo = Checkpoint::open(&nq_testkit::demo()).unwrap();
    let home = dir.path().join("home");
    fs::create_dir(&home).unwrap();
    folder_with(&home, &["letter.txt"]);
    let write = |out: &Path, source: &Files| {
        let options = WriterOptions {
            force: true,
            ..WriterOptions::default()
        };
        Writer::open(out, source, &json!({}), options).map(drop)
    };
    names(write(&home, demo.files()), &["home", "letter.txt"]);
    for format in [ExportFormat::Gptq, ExportFormat::Gguf] {
        names(
            export(&demo, format, &home, &FORCE, &()),
            &["home", "found"],
        );
    }
    assert_eq!(fs::read(home.join("letter.txt")).unwrap(), b"mine");

    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    for entry in fs::read_dir(nq_testkit::demo()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() == "README.md" {
            continue; // no file that nq writes: refused earlier
        }
        fs::copy(entry.path(), source.join(entry.file_name())).unwrap();
    }
    let before = fs::read_dir(&source).unwrap().count();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&source, &link).unwrap();
    for out in [&source, &link] {
        names(
            write(out, &Files::Folder(source.clone())),
            &["the source itself"],
        );
    }
    assert_eq!(fs::read_dir(&source).unwrap().count(), before);

    let gguf = dir.path().join("new/folder/m.gguf");
    export(&demo, ExportFormat::Gguf, &gguf, &FORCE, &()).unwrap();
    let bytes = fs::read(&gguf).unwrap();
    let opened = Checkpoint::open(&gguf).unwrap();
    names(
        export(&opened, ExportFormat::Gguf, &gguf, &FORCE, &()),
        &["m.gguf", "the source itself"],
    );
    assert_eq!(fs::read(&gguf).unwrap(), bytes);
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    check_writable(dir.path()).unwrap();
    check_writable(&dir.path().join("a/b")).unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    names(
        check_writable(&dir.path().join("file/b")),
        &["file: write to"],
    );
}

/// Files left by a killed run are removed by the next run that writes there, but not those that
/// another process is working on, or that only look similar.
#[test]
fn temporary_files_of_killed_runs_are_removed() {
    use std::time::{Duration, SystemTime};
    let dir = tempfile::tempdir().unwrap();
    folder_with(
        dir.path(),
        &[
            ".nq-abc123.tmp",
            ".nq-locked.tmp",
            ".nq-new456.tmp",
            ".nq-letter.tmp.txt",
            "nq-abc123.tmp",
            ".nq-dir123.tmp/",
        ],
    );
    folder_with(&dir.path().join(".nq-dir123.tmp"), &["model.safetensors"]);
    let old = SystemTime::now() - Duration::from_secs(3600);
    for entry in fs::read_dir(dir.path()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != ".nq-new456.tmp" {
            fs::File::open(entry.path())
                .unwrap()
                .set_modified(old)
                .unwrap();
        }
    }
    let locked = fs::File::open(dir.path().join(".nq-locked.tmp")).unwrap();
    locked.try_lock().unwrap();
    nq_formats::durable::write_bytes(&dir.path().join("out"), b"x").unwrap();
    let mut left: Vec<String> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(
        left,
        [
            ".nq-letter.tmp.txt",
            ".nq-locked.tmp",
            ".nq-new456.tmp",
            "nq-abc123.tmp",
            "out"
        ]
    );
}
