//! Opens real checkpoints, and refuses broken ones by name.

use crate::common::{assets, names, safetensors, shared, tiny_config};
use bytes::Bytes;
use nq_formats::Files;
use nq_formats::safetensors::SafetensorsFile;
use nq_formats::shards::Shards;
use nq_formats::{Checkpoint, Weight};
use nq_model::{DType, Dims};
use std::fs;
use std::path::Path;

fn parse(header: &str, data: &[u8]) -> nq_formats::Result<SafetensorsFile> {
    SafetensorsFile::parse(Path::new("x.safetensors"), safetensors(header, data).into())
}

fn check_demo(checkpoint: &Checkpoint) {
    let config = checkpoint.config();
    assert_eq!(config.parameters(), 13_900_544);
    assert_eq!(checkpoint.eos_token_ids(), [4072, 4070]);
    let store = checkpoint.store();
    assert_eq!(store.format(), "safetensors");
    assert!(!store.contains("lm_head"));
    let bytes: u64 = store.entries().iter().map(|e| e.bytes).sum();
    assert_eq!(bytes, 27_801_088); // metadata.total_size of the published index
    let norm = store.vector("model.norm", 512).unwrap();
    assert_eq!((norm.dtype(), norm.shape()), (DType::BF16, &[512][..]));
    let q = store
        .matrix("model.layers.4.self_attn.q_proj", Dims::new(512, 512))
        .unwrap();
    let Weight::Dense(q) = q else {
        panic!("a dense weight")
    };
    let values = q.to_f32().unwrap();
    assert!(values.iter().all(|v| v.is_finite()));
    assert!(values.iter().any(|v| *v != 0.0));
    names(
        store.matrix("model.layers.4.self_attn.q_proj", Dims::new(512, 256)),
        &[
            "model-00002-of-00002.safetensors",
            "model.layers.4.self_attn.q_proj.weight",
            "[512, 256]",
            "BF16 [512, 512]",
        ],
    );
    names(
        store.vector("model.layers.5.input_layernorm", 512),
        &["model.layers.5.input_layernorm.weight", "no such tensor"],
    );
}

#[test]
fn demo_model_opens() {
    check_demo(&Checkpoint::open(&nq_testkit::demo()).unwrap());
    if let Some(folder) = shared("models/demo") {
        check_demo(&Checkpoint::open(&folder).unwrap());
    }
}

#[test]
fn embedded_demo_opens() {
    const FILES: &[(&str, &[u8])] = &[
        (
            "config.json",
            include_bytes!("../../assets/demo/config.json"),
        ),
        (
            "generation_config.json",
            include_bytes!("../../assets/demo/generation_config.json"),
        ),
        (
            "model.safetensors.index.json",
            include_bytes!("../../assets/demo/model.safetensors.index.json"),
        ),
        (
            "model-00001-of-00002.safetensors",
            include_bytes!("../../assets/demo/model-00001-of-00002.safetensors"),
        ),
        (
            "model-00002-of-00002.safetensors",
            include_bytes!("../../assets/demo/model-00002-of-00002.safetensors"),
        ),
    ];
    let files = Files::Embedded {
        label: "demo",
        files: FILES,
    };
    check_demo(&Checkpoint::open_files(files).unwrap());
}

/// The views are byte for byte those of the `safetensors` crate.
#[test]
fn agrees_with_the_safetensors_crate() {
    for shard in [1, 2] {
        let path = assets().join(format!("demo/model-0000{shard}-of-00002.safetensors"));
        let bytes = fs::read(&path).unwrap();
        let ours = SafetensorsFile::parse(&path, bytes.clone().into()).unwrap();
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(ours.names().count(), theirs.len());
        assert_eq!(ours.metadata()["format"], "pt");
        for (name, view) in theirs.iter() {
            let tensor = ours.get(name).unwrap();
            assert_eq!(tensor.dtype().name(), view.dtype().to_string());
            assert_eq!(tensor.shape(), view.shape());
            assert_eq!(tensor.data(), view.data());
        }
    }
}

#[test]
fn a_single_file_is_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), tiny_config("")).unwrap();
    let name = "model.layers.0.input_layernorm";
    let header =
        format!(r#"{{"{name}.weight":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
    let file = dir.path().join("other name.safetensors");
    fs::write(&file, safetensors(&header, &1.5f32.to_le_bytes())).unwrap();
    for path in [dir.path(), &file] {
        let checkpoint = Checkpoint::open(path).unwrap();
        let norm = checkpoint.store().vector(name, 1).unwrap();
        assert_eq!(norm.to_f32().unwrap(), [1.5]);
    }
}

#[test]
fn broken_headers_are_named() {
    let a = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let ok = format!("{{{a}}}");
    assert!(parse(&ok, &[0; 8]).is_ok());
    let file = "x.safetensors";
    // The file itself.
    for n in 0..8 {
        let short = Bytes::from(vec![0; n]);
        names(
            SafetensorsFile::parse(Path::new(file), short),
            &[file, "header length", "8 bytes", &format!("{n} bytes")],
        );
    }
    let absurd = Bytes::from(u64::MAX.to_le_bytes().to_vec());
    names(
        SafetensorsFile::parse(Path::new(file), absurd),
        &[
            file,
            "header length",
            "at most 100000000",
            "18446744073709551615",
        ],
    );
    let whole = safetensors(&ok, &[0; 8]);
    for n in 8..whole.len() {
        let cut = Bytes::copy_from_slice(&whole[..n]);
        let err = SafetensorsFile::parse(Path::new(file), cut);
        let needed = if n < 8 + ok.len() {
            8 + ok.len()
        } else {
            whole.len()
        };
        let expected = format!("{needed} bytes, as the header says");
        names(
            err,
            &[
                file,
                &expected,
                &format!("found {n}: an incomplete download"),
            ],
        );
    }
    let text = Bytes::from_static(b"Entry not found");
    names(
        SafetensorsFile::parse(Path::new(file), text),
        &[file, "text that begins with \"Entry no"],
    );
    names(parse(&ok, &[0; 9]), &[file, "8 bytes", "9 bytes"]);
    names(parse("[]", &[]), &[file, "header", "object"]);
    names(parse("{}x", &[]), &[file, "header", "trailing"]);
    names(parse("{\"\u{1}", &[]), &[file, "header"]);
    // Its tensors.
    let tensor = |body: &str| parse(&format!(r#"{{{a},"b":{body}}}"#), &[0; 16]);
    let b = |dtype: &str, shape: &str, offsets: &str| {
        tensor(&format!(
            r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#
        ))
    };
    assert!(b("F32", "[1,2]", "[8,16]").is_ok());
    assert!(b("F32", "[]", "[8,12]").is_err_and(|e| e.to_string().contains("16 bytes")));
    names(
        b("F32", "[2]", "[4,12]"),
        &["tensor b", "offset 8", "offset 4, overlapping a"],
    );
    names(
        b("F32", "[1]", "[12,16]"),
        &["tensor b", "offset 8", "offset 12, leaving a gap"],
    );
    names(
        b("F32", "[2]", "[8,17]"),
        &["tensor b", "16 bytes of data", "8 to 17"],
    );
    names(b("F32", "[2]", "[16,8]"), &["tensor b", "16 to 8"]);
    names(
        b("F32", "[3]", "[8,16]"),
        &["tensor b", "12 bytes", "[3]", "8 bytes"],
    );
    names(b("F16", "[2]", "[8,16]"), &["tensor b", "4 bytes", "F16"]);
    names(b("F4", "[16]", "[8,16]"), &["tensor b", "BF16", "F4"]);
    let huge = "[4294967296,4294967296,2]";
    names(
        b("F32", huge, "[8,16]"),
        &["tensor b", "more than 2^64", "8 bytes"],
    );
    names(b("F32", "[-2]", "[8,16]"), &["tensor b", "-2"]);
    names(
        tensor(r#"{"shape":[2],"data_offsets":[8,16]}"#),
        &["tensor b", "dtype"],
    );
    names(tensor("3"), &["tensor b", "dtype, shape and data_offsets"]);
    names(
        parse(&format!("{{{a},{a}}}"), &[0; 8]),
        &["tensor a", "once", "twice"],
    );
}

/// Where git or a browser left something else in place of a file, whichever it is, that is said.
#[test]
fn what_was_not_downloaded_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, contents: &str| fs::write(dir.path().join(name), contents).unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1192135096\n";
    put("config.json", &tiny_config(""));
    put("model.safetensors", pointer);
    names(
        Checkpoint::open(dir.path()),
        &[
            "model.safetensors",
            "a Git LFS pointer",
            "not downloaded",
            "git lfs pull",
        ],
    );
    put("config.json", "\n<!DOCTYPE html><html>");
    names(
        Checkpoint::open(dir.path()),
        &["config.json", "a page of HTML"],
    );
    put("model.gguf", pointer);
    names(
        Checkpoint::open(&dir.path().join("model.gguf")),
        &["model.gguf", "a Git LFS pointer"],
    );
}

#[test]
fn broken_shard_sets_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, contents: &[u8]| fs::write(dir.path().join(name), contents).unwrap();
    let open = || Shards::open(&Files::Folder(dir.path().into()));
    let one = |name: &str| {
        let header = format!(r#"{{"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#);
        safetensors(&header, &[7])
    };
    names(open(), &["model.safetensors"]);
    put("pytorch_model.bin", b"PK");
    names(
        open(),
        &["PyTorch pickle", "pytorch_model.bin", "safetensors"],
    );

    let index = "model.safetensors.index.json";
    put(
        index,
        br#"{"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#,
    );
    put("1.safetensors", &one("a"));
    names(open(), &["2.safetensors", "lists"]);
    put("2.safetensors", &one("c"));
    names(open(), &["2.safetensors", "tensor b", "no such tensor"]);
    put("2.safetensors", &one("a"));
    names(open(), &["2.safetensors", "tensor a", "1.safetensors too"]);
    put("2.safetensors", &one("b"));
    assert_eq!(open().unwrap().get("b").unwrap().data().as_ref(), [7]);
    put("2.safetensors", &[]);
    names(open(), &["2.safetensors", "header length", "0 bytes"]);

    put(index, br#"{"weight_map":{"a":"../x/1.safetensors"}}"#);
    names(open(), &[index, "plain file names", "../x/1.safetensors"]);
    put(index, br#"{"weight_map":["a"]}"#);
    names(open(), &[index, "weight_map"]);
    put(index, b"{");
    names(open(), &[index, "contents"]);

    fs::remove_file(dir.path().join(index)).unwrap();
    names(open(), &["1.safetensors, 2.safetensors"]);
}

/// The demo model's folder with one key of a JSON file changed.
fn demo_with(file: &str, key: &str, value: &str) -> nq_formats::Result<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(nq_testkit::demo()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let path = dir.path().join(file);
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json[key] = serde_json::from_str(value).unwrap();
    fs::write(&path, json.to_string()).unwrap();
    Checkpoint::open(dir.path())
}

/// Configs that would run as another model, or never stop.
#[test]
fn configs_at_odds_with_the_weights_are_refused() {
    const CONFIG: &str = "config.json";
    let cases: [(&str, &str, &str, &[&str]); 5] = [
        (
            CONFIG,
            "num_hidden_layers",
            "3",
            &["model.layers.3.", "found 3"],
        ),
        (
            CONFIG,
            "eos_token_id",
            "4096",
            &["below", "4096, found 4096"],
        ),
        (
            "generation_config.json",
            "eos_token_id",
            "[1, 9999]",
            &["found 9999"],
        ),
        (
            CONFIG,
            "rms_norm_eps",
            "-1e-6",
            &["0 or more", "found -0.000001"],
        ),
        (CONFIG, "rms_norm_eps", "1", &["below 1", "found 1"]),
    ];
    for (file, key, value, parts) in cases {
        let opened = demo_with(file, key, value);
        names(opened, &[&[file, key], parts].concat());
    }
    demo_with(CONFIG, "rms_norm_eps", "0").unwrap();
    demo_with(CONFIG, "eos_token_id", "[4095, 0]").unwrap();
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str, contents: &str| fs::write(dir.path().join(name), contents).unwrap();
    let open = || Checkpoint::open(dir.path());
    names(
        Checkpoint::open(&dir.path().join("none")),
        &["none", "folder or file"],
    );
    names(open(), &["config.json"]);
    put("notes.txt", "no model");
    names(
        Checkpoint::open(&dir.path().join("notes.txt")),
        &[
            "notes.txt",
            "expected a GGUF file",
            "config.json next to it",
        ],
    );
    put("config.json", "[]");
    names(open(), &["config.json", "object"]);
    put(
        "config.json",
        &tiny_config(r#""quantization_config":{"quant_method":"hqq","bits":4},"#),
    );
    names(
        open(),
        &["config.json", "quant_method hqq", "not supported"],
    );
    put(
        "config.json",
        &tiny_config(r#""quantization_config":{"bits":4},"#),
    );
    names(open(), &["config.json", "without quant_method"]);
    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    put("config.json", &tiny_config(""));
    names(open(), &["model.safetensors", "not a regular file"]);
}
