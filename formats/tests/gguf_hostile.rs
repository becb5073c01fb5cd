//! GGUF files that are truncated, contradict themselves or are of another kind are refused by name.

use crate::common::names;
use nq_formats::Files;
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::gguf::{Array, BlockType, GgufFile, GgufPlan, Value};
use nq_formats::{Checkpoint, Result};
use proptest::prelude::*;
use std::fs;
use std::path::Path;

const FILE: &str = "x.gguf";

fn parse(bytes: &[u8]) -> Result<GgufFile> {
    GgufFile::parse(Path::new(FILE), bytes.to_vec().into())
}

/// Builds a file piece by piece, valid or not.
#[derive(Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn header(tensors: u64, entries: u64) -> Raw {
        Raw(b"GGUF\x03\0\0\0".to_vec()).u64(tensors).u64(entries)
    }
    fn u32(mut self, v: u32) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn u64(mut self, v: u64) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn str(self, s: &str) -> Raw {
        let mut raw = self.u64(s.len() as u64);
        raw.0.extend(s.as_bytes());
        raw
    }
    fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Raw {
        let raw = self.str(name).u32(dims.len() as u32);
        let raw = dims.iter().fold(raw, |r, &d| r.u64(d));
        raw.u32(kind).u64(offset)
    }
    /// Pads to the start of the data and appends `n` bytes.
    fn data(mut self, n: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(32) + n, 0);
        self.0
    }
}

#[test]
fn headers_are_checked() {
    assert!(parse(&Raw::header(0, 0).0).is_ok());
    names(
        parse(b""),
        &[FILE, "magic", "4 bytes", "0 before the file ends"],
    );
    names(parse(b"GGML\x03\0\0\0"), &[FILE, "magic", "GGUF", "GGML"]);
    let version = |v: u32| [b"GGUF".as_slice(), &v.to_le_bytes(), &[0; 16]].concat();
    assert!(parse(&version(2)).is_ok());
    names(parse(&version(1)), &[FILE, "GGUF version 1", "2 and 3"]);
    names(parse(&version(4)), &[FILE, "GGUF version 4", "2 and 3"]);
    names(
        parse(&version(3 << 24)),
        &[FILE, "big-endian GGUF version 3"],
    );
    let n = u64::MAX.to_string();
    names(
        parse(&Raw::header(u64::MAX, 0).0),
        &[FILE, "tensor count", "at most 0", &n],
    );
    names(
        parse(&Raw::header(0, u64::MAX).0),
        &[FILE, "metadata count", "at most 0", &n],
    );
}

#[test]
fn metadata_is_checked() {
    let entry = |key: &str, kind: u32| Raw::header(0, 1).str(key).u32(kind);
    let ok = entry("k", 4).u32(7).data(0);
    assert_eq!(parse(&ok).unwrap().u64("k").unwrap(), Some(7));
    names(
        parse(&entry("k", 13).u64(0).0),
        &[FILE, "k: expected a value type", "13"],
    );
    names(
        parse(&entry("k", 8).u64(u64::MAX).0),
        &[FILE, "k: expected", "18446744073709551615"],
    );
    names(
        parse(&entry("k", 7).u32(2).0),
        &[FILE, "k: expected 0 or 1", "found 2"],
    );
    let long = Raw::header(0, 1).u64(1 << 40).u64(0).0;
    names(
        parse(&long),
        &[FILE, "key of metadata entry 0", "65535", "1099511627776"],
    );
    let latin = Raw::header(0, 1).u64(1).u64(0xff).u64(0).0;
    names(parse(&latin), &[FILE, "key of metadata entry 0", "UTF-8"]);
    let twice = Raw::header(0, 2)
        .str("k")
        .u32(4)
        .u32(1)
        .str("k")
        .u32(4)
        .u32(1)
        .0;
    names(parse(&twice), &[FILE, "k: expected each key once"]);
    // Arrays: more elements than bytes, elements past the end, arrays of arrays.
    let array = |element: u32, n: u64| entry("a", 9).u32(element).u64(n);
    names(
        parse(&array(4, u64::MAX).u64(0).0),
        &[FILE, "a: expected 18446744073709551615 bytes"],
    );
    names(
        parse(&array(8, 2).str("one").u64(9).0),
        &[FILE, "a: expected 9 bytes", "0 before"],
    );
    names(
        parse(&array(9, 1).u64(0).0),
        &[FILE, "a: expected array elements", "type 9"],
    );
    let file = parse(&array(8, 2).str("one").str("two").0).unwrap();
    assert_eq!(file.strings("a").unwrap().unwrap(), ["one", "two"]);
    names(
        file.u64("a"),
        &[
            FILE,
            "a: expected a non-negative integer",
            "array of 2 string",
        ],
    );
    names(file.str("a"), &[FILE, "a: expected a UTF-8 string"]);
    names(
        file.required("b", file.u64("b").unwrap()),
        &[FILE, "b: expected the key"],
    );
    let alignment = |n: u32| entry("general.alignment", 4).u32(n).data(0);
    assert!(parse(&alignment(64)).is_ok());
    for n in [0, 24, 1 << 30] {
        names(
            parse(&alignment(n)),
            &[FILE, "general.alignment", "power of two", &n.to_string()],
        );
    }
}

#[test]
fn tensors_are_checked() {
    let f32 = |name, dims: &[u64], offset| Raw::header(1, 0).tensor(name, dims, 0, offset);
    let file = parse(&f32("t", &[4, 2], 0).data(32)).unwrap();
    assert_eq!(file.tensors()["t"].shape, [2, 4]);
    names(
        parse(&f32("t", &[4, 2], 0).data(31)),
        &["as the header says", "an incomplete download"],
    );
    names(
        parse(&f32("t", &[4, 2], 32).data(32)),
        &["tensor t", "32 bytes within", "offset 32"],
    );
    names(
        parse(&f32("t", &[4], 8).data(64)),
        &["tensor t", "multiple of 32", "found 8"],
    );
    names(
        parse(&f32("t", &[4], u64::MAX - 31).data(64)),
        &["tensor t", "16 bytes within"],
    );
    names(
        parse(&f32("t", &[1; 5], 0).data(32)),
        &["tensor t", "1 to 4 dimensions", "5"],
    );
    names(
        parse(&f32("t", &[], 0).data(32)),
        &["tensor t", "1 to 4 dimensions", "0"],
    );
    names(
        parse(&f32("t", &[0], 0).data(32)),
        &["tensor t", "0 in a row"],
    );
    names(
        parse(&f32("t", &[4, 0], 0).data(32)),
        &["tensor t", "2^63", "[0, 4]"],
    );
    let huge = [1 << 40, 1 << 40];
    names(
        parse(&f32("t", &huge, 0).data(32)),
        &["tensor t", "2^63", "1099511627776"],
    );
    let kind = |k| parse(&Raw::header(1, 0).tensor("t", &[64], k, 0).data(64));
    names(kind(4), &["tensor t", "type number 4", "Q4_0"]);
    names(
        kind(12),
        &["tensor t", "multiple of 256 for Q4_K", "64 in a row"],
    );
    let two = |second| {
        let raw = Raw::header(2, 0)
            .tensor("a", &[16], 0, 0)
            .tensor(second, &[8], 0, 32);
        parse(&raw.data(96))
    };
    names(
        two("b"),
        &["tensor b", "at least 64, where a ends", "found 32"],
    );
    // BF16 data labelled Q4_0 would end before the next tensor, or the end of the file.
    let relabelled = |kind, next| {
        let raw = Raw::header(2, 0).tensor("a", &[64], kind, 0);
        parse(&raw.tensor("b", &[8], 0, next).data(160))
    };
    relabelled(30, 128).unwrap();
    names(
        relabelled(2, 128),
        &["tensor b", "an offset of 64, where a ends", "found 128"],
    );
    let last = |kind| parse(&Raw::header(1, 0).tensor("t", &[64], kind, 0).data(128));
    last(30).unwrap();
    names(last(2), &["data", "64 bytes, where t ends", "found 128"]);
    names(
        parse(&f32("t", &[8], 32).data(64)),
        &["tensor t", "an offset of 0, where data starts"],
    );
    let same = Raw::header(2, 0)
        .tensor("a", &[8], 0, 0)
        .tensor("a", &[8], 0, 32)
        .data(64);
    names(parse(&same), &["tensor a", "each name once"]);
}

/// The demo model with one piece of metadata replaced or tensors added.
fn model(change: impl FnOnce(&mut GgufPlan)) -> (tempfile::TempDir, Result<Checkpoint>) {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole.gguf");
    let demo = Checkpoint::open(&nq_testkit::demo()).unwrap();
    export(
        &demo,
        ExportFormat::Gguf,
        &whole,
        &ExportOptions::default(),
        &(),
    )
    .unwrap();
    let file = GgufFile::parse(&whole, fs::read(&whole).unwrap().into()).unwrap();
    let mut plan = GgufPlan::new();
    for (key, value) in file.metadata() {
        plan.set(key.as_str(), value.clone());
    }
    for (name, info) in file.tensors() {
        plan.add(name.clone(), info.kind, info.shape.clone())
            .unwrap();
    }
    change(&mut plan);
    let path = dir.path().join(FILE);
    plan.write(
        &path,
        &(),
        &mut |tensor, sink| match file.tensors().get(&tensor.name) {
            Some(info) => sink.write(&file.data(info)[..tensor.bytes() as usize]),
            None => sink.write(&vec![0; tensor.bytes() as usize]),
        },
    )
    .unwrap();
    let opened = Checkpoint::open(&path);
    (dir, opened)
}

#[test]
fn models_at_odds_with_themselves_are_refused() {
    let refused = |key: &str, value: Value, parts: &[&str]| {
        let (_dir, opened) = model(|plan| plan.set(key, value));
        // A GGUF file has no other file to look into.
        let said = opened.as_ref().err().map(ToString::to_string);
        assert!(!said.unwrap_or_default().contains("config.json"), "{key}");
        names(opened, &[&[FILE], parts].concat());
    };
    assert!(model(|_| ()).1.is_ok());
    refused(
        "general.architecture",
        "gemma".into(),
        &["architecture gemma"],
    );
    refused(
        "general.architecture",
        3.into(),
        &["general.architecture", "string", "found 3"],
    );
    refused(
        "qwen3.block_count",
        "five".into(),
        &["qwen3.block_count", "integer", "five"],
    );
    refused(
        "qwen3.block_count",
        4.into(),
        &["tensor blk.4.", "4 layers"],
    );
    refused(
        "qwen3.attention.value_length",
        64.into(),
        &["value_length", "expected 128"],
    );
    refused(
        "qwen3.attention.head_count_kv",
        3.into(),
        &["num_attention_heads", "(3)"],
    );
    // No value is replaced silently.
    for key in [
        "qwen3.attention.layer_norm_rms_epsilon",
        "qwen3.rope.freq_base",
    ] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            refused(
                key,
                Value::F32(value),
                &[key, "a finite number", &value.to_string()],
            );
        }
    }
    refused(
        "qwen3.attention.layer_norm_rms_epsilon",
        Value::F32(-1.0),
        &["rms_norm_eps", "0 or more"],
    );
    refused(
        "qwen3.rope.scaling.type",
        "linear".into(),
        &["qwen3.rope.scaling.factor"],
    );
    refused(
        "tokenizer.ggml.model",
        "llama".into(),
        &["tokenizer model llama"],
    );
    refused(
        "tokenizer.ggml.pre",
        "gpt-2".into(),
        &["pre-tokenizer gpt-2", "qwen2"],
    );
    refused(
        "tokenizer.ggml.add_bos_token",
        true.into(),
        &["add_bos_token true"],
    );
    refused(
        "tokenizer.ggml.eos_token_id",
        4096.into(),
        &["eos_token_id", "below 4096"],
    );
    let short = Array::of_i32s(&[1; 4095]);
    refused(
        "tokenizer.ggml.token_type",
        short.into(),
        &["4096 types", "4095"],
    );
    let odd = Array::of_i32s(&[9; 4096]);
    refused(
        "tokenizer.ggml.token_type",
        odd.into(),
        &["token_type", "9 for token 0"],
    );
    let few = Array::of_strings(&["a"]);
    refused(
        "tokenizer.ggml.tokens",
        few.into(),
        &["token_type", "1 types"],
    );
    let (_dir, opened) = model(|plan| {
        plan.add("blk.0.attn_q.bias".into(), BlockType::F32, vec![512])
            .unwrap();
    });
    names(
        opened,
        &[FILE, "tensor blk.0.attn_q.bias", "no such parameter"],
    );
}

#[test]
fn broken_tokenizers_are_named_when_asked_for() {
    let tokenizer = |key: &str, value: Value| {
        let (_dir, opened) = model(|plan| plan.set(key, value));
        opened.unwrap().files().get("tokenizer.json")
    };
    let merges = "tokenizer.ggml.merges";
    names(
        tokenizer(merges, Array::of_strings(&["a"]).into()),
        &[FILE, merges, "\"a\""],
    );
    names(
        tokenizer(merges, Array::of_strings(&["a b c"]).into()),
        &[FILE, merges, "merge 0"],
    );
    names(
        tokenizer(merges, Array::of_strings(&["q zq"]).into()),
        &[FILE, merges, "merge 0"],
    );
    names(
        tokenizer(merges, 3.into()),
        &[FILE, merges, "an array", "3"],
    );
    let same = Array::of_strings(&vec!["a"; 4096]);
    let tokens = "tokenizer.ggml.tokens";
    names(
        tokenizer(tokens, same.into()),
        &[FILE, tokens, "each token once", "as 0 and 1"],
    );
}

#[test]
fn cut_files_are_refused_wherever_they_are_cut() {
    let (dir, _) = model(|_| ());
    let bytes = fs::read(dir.path().join(FILE)).unwrap();
    let steps = (0..400).chain((400..bytes.len()).step_by(bytes.len() / 300));
    for n in steps {
        names(parse(&bytes[..n]), &[FILE]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever a file contains, parsing returns a value or an error.
    #[test]
    fn random_bytes_do_not_panic(tail in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = parse(&[b"GGUF\x03\0\0\0".as_slice(), &tail].concat());
    }

    /// The same for files that are almost valid.
    #[test]
    fn flipped_bytes_do_not_panic(at in 0usize..200, value in any::<u8>()) {
        let plan = |plan: &mut GgufPlan| {
            plan.set("general.architecture", "qwen3");
            plan.set("list", Array::of_strings(&["a", "bc"]));
            plan.add("t".into(), BlockType::Q8_0, vec![2, 32]).unwrap();
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let mut file = GgufPlan::new();
        plan(&mut file);
        file.write(&path, &(), &mut |t, sink| sink.write(&vec![1; t.bytes() as usize])).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let n = bytes.len();
        bytes[at % n] = value;
        if let Ok(file) = parse(&bytes) {
            for info in file.tensors().values() {
                let _ = file.data(info);
            }
            let _ = file.strings("list");
        }
    }
}

/// Splits `whole` into `count` files named as a set; `change` may break the keys of one.
fn split(dir: &Path, count: u16, change: impl Fn(u16, &mut GgufPlan)) {
    let whole = dir.join("whole.gguf");
    let demo = Checkpoint::open(&nq_testkit::demo()).unwrap();
    let options = ExportOptions {
        force: true,
        ..ExportOptions::default()
    };
    export(&demo, ExportFormat::Gguf, &whole, &options, &()).unwrap();
    let file = GgufFile::parse(&whole, fs::read(&whole).unwrap().into()).unwrap();
    fs::remove_file(&whole).unwrap();
    for i in 0..count {
        let mut plan = GgufPlan::new();
        plan.set("split.no", Value::U16(i));
        plan.set("split.count", Value::U16(count));
        plan.set(
            "split.tensors.count",
            Value::I32(file.tensors().len() as i32),
        );
        if i == 0 {
            for (key, value) in file.metadata() {
                plan.set(key.as_str(), value.clone());
            }
        }
        for (n, (name, info)) in file.tensors().iter().enumerate() {
            if n % usize::from(count) == usize::from(i) {
                plan.add(name.clone(), info.kind, info.shape.clone())
                    .unwrap();
            }
        }
        change(i, &mut plan);
        let path = dir.join(format!("m-{:05}-of-{count:05}.gguf", i + 1));
        plan.write(&path, &(), &mut |t, sink| {
            sink.write(&file.data(&file.tensors()[&t.name]))
        })
        .unwrap();
    }
}

#[test]
fn split_sets_open_from_any_file_or_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    split(dir.path(), 3, |_, _| ());
    let demo = Checkpoint::open(&nq_testkit::demo()).unwrap();
    for name in ["", "m-00001-of-00003.gguf", "m-00003-of-00003.gguf"] {
        let path = dir.path().join(name);
        let result = Checkpoint::open(&path);
        if name.starts_with("m-00003") {
            let opened = result.unwrap();
            assert_eq!(opened.config().num_hidden_layers, 5);
            continue;
        }
        let opened = result.unwrap();
        assert_eq!(opened.store().entries().len(), 57);
        let differences = nq_formats::export::compare(&demo, &opened, &()).unwrap();
        assert!(differences.iter().all(|d| d.changed == 0));
    }
}

#[test]
fn broken_split_sets_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Checkpoint::open(&dir.path().join("m-00001-of-00002.gguf"));
    split(dir.path(), 2, |i, plan| {
        if i == 1 {
            plan.set("split.no", Value::U16(0));
        }
    });
    names(
        open(),
        &["m-00002-of-00002.gguf", "split.no", "expected 1, found 0"],
    );
    split(dir.path(), 2, |_, plan| {
        plan.set("split.tensors.count", Value::I32(99))
    });
    names(
        open(),
        &[
            "split.tensors.count",
            "expected 99, found 57 in the 2 files",
        ],
    );
    split(dir.path(), 2, |_, _| ());
    assert!(open().is_ok());
    fs::remove_file(dir.path().join("m-00002-of-00002.gguf")).unwrap();
    names(
        open(),
        &["m-00002-of-00002.gguf, of the set of m-00001-of-00002.gguf"],
    );
    let renamed = dir.path().join("other.gguf");
    fs::rename(dir.path().join("m-00001-of-00002.gguf"), &renamed).unwrap();
    names(
        Checkpoint::open(&renamed),
        &["other.gguf", "-00001-of-00002.gguf", "split.count"],
    );
}

#[test]
fn folders_of_several_models_ask_which() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.gguf"), b"GGUF").unwrap();
    fs::write(dir.path().join("b.gguf"), b"GGUF").unwrap();
    fs::write(dir.path().join("c.gguf"), b"no").unwrap();
    names(
        Checkpoint::open(dir.path()),
        &["name its file", "a.gguf, b.gguf"],
    );
    names(
        Checkpoint::open_files(Files::Folder(dir.path().into())),
        &["a.gguf, b.gguf"],
    );
    names(
        Checkpoint::open(&dir.path().join("c.gguf")),
        &["config.json"],
    );
}

/// The `gguf` crate reads the same header (it does not support BF16 or later types).
#[test]
fn agrees_with_the_gguf_crate() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE);
    let demo = Checkpoint::open(&nq_testkit::demo()).unwrap();
    let options = ExportOptions {
        mix: nq_formats::export::Mix::Q4KM,
        ..ExportOptions::default()
    };
    export(&demo, ExportFormat::Gguf, &path, &options, &()).unwrap();
    let bytes = fs::read(&path).unwrap();
    let ours = parse(&bytes).unwrap();
    let theirs = gguf::GGUFFile::read(&bytes).unwrap().unwrap();
    assert_eq!(theirs.header.version, 3);
    assert_eq!(theirs.header.metadata.len(), ours.metadata().len());
    for entry in &theirs.header.metadata {
        let ours = &ours.metadata()[&entry.key];
        match (&entry.value, ours) {
            (gguf::GGUFMetadataValue::String(a), b) => assert_eq!(Some(a.as_str()), b.as_str()),
            (gguf::GGUFMetadataValue::Uint32(a), b) => assert_eq!(Some(u64::from(*a)), b.as_u64()),
            (gguf::GGUFMetadataValue::Int32(a), b) => assert_eq!(*b, Value::I32(*a)),
            (gguf::GGUFMetadataValue::Float32(a), b) => assert_eq!(*b, Value::F32(*a)),
            (gguf::GGUFMetadataValue::Bool(a), b) => assert_eq!(Some(*a), b.as_bool()),
            (gguf::GGUFMetadataValue::Array(a), Value::Array(b)) => {
                assert_eq!(a.value.len() as u64, b.len(), "{}", entry.key);
            }
            (_, b) => panic!("{}: {b}", entry.key),
        }
    }
    assert_eq!(theirs.tensors.len(), ours.tensors().len());
    for tensor in &theirs.tensors {
        let info = &ours.tensors()[&tensor.name];
        let shape: Vec<u64> = info.shape.iter().rev().map(|&d| d as u64).collect();
        assert_eq!(tensor.dimensions, shape);
        assert_eq!(tensor.tensor_type as u32, info.kind.id());
    }
}

/// Opening reads only the head, however large the file is.
#[cfg(target_os = "linux")]
#[test]
fn a_large_file_opens_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE);
    let head = Raw::header(1, 0).tensor("t", &[1 << 20, 1 << 12], 0, 0);
    let head = head.data(0); // before 16 GiB of f32, which the file has as a hole
    fs::write(&path, &head).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(head.len() as u64 + (16 << 30)).unwrap();
    // Of this file's mapping alone, as other tests run in the same process.
    let resident_kb = || {
        let mappings = fs::read_to_string("/proc/self/smaps").unwrap();
        let (_, after) = mappings.split_once(path.to_str().unwrap()).unwrap();
        let line = after.lines().find_map(|l| l.strip_prefix("Rss:")).unwrap();
        line.trim_end_matches("kB").trim().parse::<u64>().unwrap()
    };
    let mapped = nq_formats::files::map_file(&path).unwrap();
    let file = GgufFile::parse(&path, mapped).unwrap();
    assert_eq!(file.data(&file.tensors()["t"]).len(), 16 << 30);
    let resident = resident_kb();
    assert!((1..100 << 10).contains(&resident), "{resident} kB");
}

/// The number of files that a name says is compared with theirs before anything is as long as it.
#[test]
fn numbers_in_names_are_no_lengths() {
    for count in ["99999999999", "18446744073709551615", "1000000000"] {
        let dir = tempfile::tempdir().unwrap();
        for name in [&format!("a-00001-of-{count}.gguf"), "b.gguf"] {
            fs::write(dir.path().join(name), "GGUF").unwrap();
        }
        let error = Checkpoint::open(dir.path()).err().unwrap().to_string();
        assert!(error.contains("one GGUF model; name its file"), "{error}");
    }
}
