//! Qwen3.8-Flash-Next as GGUF files: as llama.cpp writes them, as others do, and files that lie.

use crate::common::names;
use crate::flash_next::{config, integers};
use crate::hybrids::{tensors, write};
use nq_formats::export::{ExportFormat, ExportOptions, Mix, compare, export};
use nq_formats::gguf::value::{Array, Value as GgufValue};
use nq_formats::gguf::{BlockType, GgufFile, GgufPlan};
use nq_formats::hash::sha256_hex;
use nq_formats::left_over::LeftOver;
use nq_formats::{Checkpoint, Tensor, synth};
use nq_model::{DType, Delta, ModelConfig, NgramTable, OutputGate};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A model in f32 whose table is divided as a GGUF file's is.
fn for_gguf() -> ModelConfig {
    let config = config();
    let ngrams = config.ngrams.map(|n| NgramTable {
        least_rows: 53, // a prime, as files state it
        multiple: 1,
        parts: 16,
        ..n
    });
    // The interval that the converter writes whatever a model has, and the gate that files mean.
    let delta = config.delta.map(|d| Delta {
        interval: 4,
        gate: OutputGate::Sigmoid,
        ..d
    });
    ModelConfig {
        ngrams,
        delta,
        dtype: Some(DType::F32),
        ..config
    }
}

/// A folder of [`for_gguf`] in f32, with the integers of its table.
fn folder_for_gguf(root: &Path) -> Checkpoint {
    let config = for_gguf();
    synth::write(root, &config, 4, &()).unwrap();
    let json = fs::read(root.join("config.json")).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    let mut all = tensors(root);
    for (_, tensor) in &mut all {
        let values = tensor.to_f32().unwrap().to_vec();
        *tensor = Tensor::from_f32(tensor.shape().to_vec(), values).unwrap();
    }
    let hash = config.ngrams.as_ref().unwrap().hash(0, config.vocab_size);
    for (what, values) in [
        ("layer_multipliers", &hash.factors),
        ("ngram_heads_vocab_sizes", &hash.rows),
        ("ngram_heads_offsets", &hash.offsets),
    ] {
        all.push((NgramTable::integers_name(0, what), integers(values)));
    }
    write(root, &json, &all);
    Checkpoint::open(root).unwrap()
}

/// The folder as a GGUF file.
fn gguf(dir: &Path) -> (Checkpoint, PathBuf) {
    let source = folder_for_gguf(&dir.join("m"));
    let out = dir.join("m.gguf");
    let options = ExportOptions::default();
    export(&source, ExportFormat::Gguf, &out, &options, &()).unwrap();
    (source, out)
}

#[derive(Deserialize)]
struct Converted {
    keys: BTreeMap<String, Value>,
    tensors: BTreeMap<String, ConvertedTensor>,
}

#[derive(Deserialize)]
struct ConvertedTensor {
    shape: Vec<usize>,
    /// The start of a digest of its values; `None` where these are given.
    sha256: Option<String>,
    #[serde(default)]
    values: Vec<f32>,
}

/// What nq writes is what llama.cpp's converter makes of the same folder, tensor by tensor and key by key, and is read as
/// the same model. `fixtures/qwen4exp.py` ran the converter.
#[test]
fn gguf_files_are_as_llama_cpp_writes_them() {
    let temporary = tempfile::tempdir().unwrap();
    let kept = std::env::var_os("NQ_QWEN4EXP");
    if let Some(folder) = &kept {
        folder_for_gguf(Path::new(folder));
    }
    let (source, path) = gguf(temporary.path());
    let read = Checkpoint::open(&path).unwrap();
    assert!(read.left_over().is_empty(), "{:?}", read.left_over());
    let mut wanted = source.config().clone();
    wanted.delta = wanted.delta.map(|d| Delta { tiled: true, ..d });
    assert_eq!(read.config(), &wanted);
    let differences = compare(&source, &read, &()).unwrap();
    let most = differences.iter().map(|d| d.max).fold(0.0, f64::max);
    // Rates of decay are there as their exponentials.
    assert!(most < 1e-6, "{differences:?}");

    let converted: Converted =
        serde_json::from_str(include_str!("fixtures/qwen4exp.json")).unwrap();
    let file = GgufFile::parse(&path, fs::read(&path).unwrap().into()).unwrap();
    let names: Vec<&String> = file.tensors().keys().collect();
    assert_eq!(names, converted.tensors.keys().collect::<Vec<_>>());
    for (name, wanted) in &converted.tensors {
        let info = &file.tensors()[name];
        let rows = usize::from(wanted.shape[0] == 1); // a vector
        assert_eq!(info.shape, wanted.shape[rows..], "{name}");
        let data = file.data(info);
        match &wanted.sha256 {
            Some(digest) => assert_eq!(&sha256_hex(&data)[..16], digest, "{name}"),
            None => {
                let found = data
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|b| f32::from_le_bytes(*b));
                for (found, wanted) in found.zip(&wanted.values) {
                    assert!(
                        (found - wanted).abs() <= 1e-6 * wanted.abs(),
                        "{name}: {found}"
                    );
                }
            }
        }
    }
    for (key, wanted) in &converted.keys {
        let Some(found) = file.metadata().get(key) else {
            // A list of layers beside the interval that says the same.
            assert_eq!(key, "qwen4exp.attention.recurrent_layers");
            continue;
        };
        match wanted {
            Value::Array(all) => {
                let found = found.as_array().unwrap();
                assert_eq!(found.len(), all.len() as u64, "{key}");
            }
            Value::Number(n) if n.is_f64() => {
                let error = (found.as_f64().unwrap() - n.as_f64().unwrap()).abs();
                assert!(error <= 1e-6 * n.as_f64().unwrap(), "{key}: {found}");
            }
            other => assert_eq!(found.as_u64(), other.as_u64(), "{key}"),
        }
    }
}

/// The file with keys changed (`None`: left out) and tensors renamed or joined.
fn changed(path: &Path, keys: &[(&str, Option<GgufValue>)]) -> nq_formats::Result<Checkpoint> {
    let file = GgufFile::parse(path, fs::read(path).unwrap().into()).unwrap();
    let mut plan = GgufPlan::new();
    for (key, value) in file.metadata() {
        if !keys.iter().any(|(k, _)| *k == key) {
            plan.set(key.as_str(), value.clone());
        }
    }
    for (key, value) in keys {
        if let Some(value) = value {
            plan.set(*key, value.clone());
        }
    }
    let tensors = stored(&file);
    for t in &tensors {
        plan.add(t.name.clone(), t.kind, t.shape.clone()).unwrap();
    }
    write_plan(path, &plan, &tensors)
}

/// A tensor of a file.
struct StoredTensor {
    name: String,
    kind: BlockType,
    shape: Vec<usize>,
    data: Vec<u8>,
}

fn stored(file: &GgufFile) -> Vec<StoredTensor> {
    let all = file.tensors().iter();
    all.map(|(name, info)| StoredTensor {
        name: name.clone(),
        kind: info.kind,
        shape: info.shape.clone(),
        data: file.data(info).to_vec(),
    })
    .collect()
}

fn write_plan(
    path: &Path,
    plan: &GgufPlan,
    tensors: &[StoredTensor],
) -> nq_formats::Result<Checkpoint> {
    let out = path.with_extension("changed.gguf");
    let mut contents = tensors.iter();
    plan.write(&out, &(), &mut |_, sink| {
        sink.write(&contents.next().unwrap().data)
    })
    .unwrap();
    Checkpoint::open(&out)
}

/// Gate and up projections of experts in one tensor, queries and key of an indexer in types of their own, a table in codes:
/// the same model, but for what codes round.
#[test]
fn gguf_files_of_other_makers_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let (source, path) = gguf(dir.path());
    let file = GgufFile::parse(&path, fs::read(&path).unwrap().into()).unwrap();
    let mut tensors = stored(&file);
    let take = |tensors: &mut Vec<StoredTensor>, name: &str| {
        let at = tensors.iter().position(|t| t.name == name).unwrap();
        tensors.remove(at)
    };
    for layer in 0..4 {
        let name = |part: &str| format!("blk.{layer}.ffn_{part}_exps.weight");
        let [gate, up] = ["gate", "up"].map(|part| take(&mut tensors, &name(part)));
        let each = gate.data.len() / gate.shape[0];
        let experts = gate.data.chunks(each).zip(up.data.chunks(each));
        tensors.push(StoredTensor {
            name: name("gate_up"),
            kind: gate.kind,
            shape: vec![gate.shape[0], 2 * gate.shape[1], gate.shape[2]],
            data: experts.flat_map(|(g, u)| [g, u].concat()).collect(),
        });
    }
    // Their values are of bf16, which is a type of files, too.
    for tensor in tensors
        .iter_mut()
        .filter(|t| t.name.ends_with("indexer.k_proj.weight"))
    {
        tensor.kind = BlockType::BF16;
        tensor.data = tensor.data.chunks(4).flat_map(|v| [v[2], v[3]]).collect();
    }
    // A layer that drafts, by whatever names.
    for part in ["nextn.eh_proj", "hc_head_norm"] {
        tensors.push(StoredTensor {
            name: format!("blk.4.{part}.weight"),
            kind: BlockType::F32,
            shape: vec![2, 2],
            data: vec![0; 16],
        });
    }
    let mut plan = GgufPlan::new();
    for (key, value) in file.metadata() {
        // Where files do not say how many positions a block has, there are four.
        if key != "qwen4exp.attention.compress_ratios" {
            plan.set(key.as_str(), value.clone());
        }
    }
    plan.set("qwen4exp.block_count", GgufValue::U32(5));
    plan.set("qwen4exp.nextn_predict_layers", GgufValue::U32(1));
    for t in &tensors {
        plan.add(t.name.clone(), t.kind, t.shape.clone()).unwrap();
    }
    let read = write_plan(&path, &plan, &tensors).unwrap();
    let left = read.left_over();
    let of_drafts = |l: &LeftOver| l.name.starts_with("blk.4.") || l.name.contains("mtp_");
    assert!(left.len() == 3 && left.iter().all(of_drafts), "{left:?}");
    for d in compare(&source, &read, &()).unwrap() {
        assert!(d.max < 1e-6, "{d:?}");
    }
}

/// Files do not say by what recurrences gate their output.
#[test]
fn gates_that_files_do_not_mean_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = synth::checkpoint("m", &config(), 3).unwrap();
    let out = dir.path().join("m.gguf");
    let done = export(
        &source,
        ExportFormat::Gguf,
        &out,
        &ExportOptions::default(),
        &(),
    );
    names(done, &["output_gate_type silu", "sigmoid"]);
}

/// In nq's own format, the table and what weighs streams are there as in the file.
#[test]
fn gguf_files_become_folders_of_nq() {
    let dir = tempfile::tempdir().unwrap();
    let source = folder_for_gguf(&dir.path().join("m"));
    let eight = ExportOptions {
        mix: Mix::All(BlockType::Q8_0),
        ..ExportOptions::default()
    };
    let [file, out] = ["m.gguf", "nq"].map(|name| dir.path().join(name));
    export(&source, ExportFormat::Gguf, &file, &eight, &()).unwrap();
    let read = Checkpoint::open(&file).unwrap();
    export(
        &read,
        ExportFormat::Nq,
        &out,
        &ExportOptions::default(),
        &(),
    )
    .unwrap();
    let folder = Checkpoint::open(&out).unwrap();
    assert!(folder.left_over().is_empty(), "{:?}", folder.left_over());
    for d in compare(&read, &folder, &()).unwrap() {
        assert!(d.max == 0.0, "{d:?}");
    }
}

#[test]
fn lying_gguf_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (_, path) = gguf(dir.path());
    let file = GgufFile::parse(&path, fs::read(&path).unwrap().into()).unwrap();
    let key = |name: &str| format!("qwen4exp.{name}");
    let words = |values: &[i32]| Some(GgufValue::Array(Array::of_i32s(values)));
    let number = |n: u32| Some(GgufValue::U32(n));
    for (name, value, parts) in [
        (
            "hyper_connection.count",
            None,
            ["hyper_connection.count", "no such key"],
        ),
        ("hyper_connection.count", number(1), ["hc_count", "2 to 64"]),
        (
            "hyper_connection.low_rank",
            number(13),
            ["hc_attn_down", "[13, 96]"],
        ),
        (
            "attention.indexer.head_count",
            number(3),
            ["indexer.q_proj", "[24, 32]"],
        ),
        (
            "attention.indexer.key_length",
            number(4),
            ["indexer.q_proj", "[8, 32]"],
        ),
        (
            "attention.indexer.top_k",
            number(9),
            ["indexer_budget", "a multiple"],
        ),
        (
            "attention.compress_ratios",
            words(&[0, 4, 0, 8]),
            ["compress_ratios", "one number"],
        ),
        (
            "attention.compress_ratios",
            words(&[0, 4]),
            ["compress_ratios", "for 4 layers"],
        ),
        (
            "attention.compress_ratios",
            words(&[0, -4, 0, -4]),
            ["compress_ratios", "0 or more"],
        ),
        ("ple.layers", words(&[0, 2]), ["ple.layers", "one table"]),
        (
            "ple.layers",
            words(&[3]),
            ["ple_layer_ids with 4", "recurrence"],
        ),
        ("ple.layers", words(&[7]), ["ple_layer_ids", "1 to 4"]),
        ("ple.layers", None, ["blk.0.ple_", "no such parameter"]),
        ("ple.ngram_size", number(1), ["ple_embed_dim", "found 0"]),
        (
            "ple.ngram_size",
            number(4),
            ["layer_multipliers", "4 numbers"],
        ),
        (
            "ple.heads_per_ngram",
            number(u32::MAX),
            ["ple_embed_dim", "268435456"],
        ),
        ("ple.conv_kernel", number(3), ["ple_conv1d", "[96, 3]"]),
        (
            "ple.eos_token_id",
            None,
            ["ple.eos_token_id", "no such key"],
        ),
        ("ple.eos_token_id", number(300), ["eos_token_id", "300"]),
        (
            "embedding_length_per_layer_input",
            number(5),
            ["ple_key", "[96, 20]"],
        ),
        (
            "ple.layer_multipliers",
            words(&[1, 3, 5]),
            ["layer_multipliers", "follow from"],
        ),
        (
            "ple.layer_multipliers",
            words(&[1]),
            ["layer_multipliers", "3 numbers"],
        ),
        (
            "ple.head_offsets",
            words(&[0, 53, 112, 172]),
            ["ngram_heads_offsets", "follow from"],
        ),
        (
            "ple.head_vocab_sizes",
            words(&[]),
            ["head_vocab_sizes", "none"],
        ),
        (
            "ple.head_vocab_sizes",
            words(&[53, 59, 61, 71]),
            ["ngram_heads_vocab_sizes", "67"],
        ),
        (
            "ple.head_vocab_sizes",
            words(&[59, 61, 67, 71]),
            ["ngram_heads_offsets", "follow from"],
        ),
    ] {
        let read = changed(&path, &[(&key(name), value)]);
        names(read.and_then(|c| nq_formats::nq::verify(&c)), &parts);
    }
    // Written by a converter that does not know the layers with an indexer.
    let zeros = [(&key("attention.compress_ratios")[..], words(&[0; 4]))];
    let read = changed(&path, &zeros).unwrap();
    assert_eq!(read.config().indexer.unwrap().block, 4);
    let left = read.left_over();
    assert!(
        left[0].name.contains("compress_ratios") && left.len() == 1,
        "{left:?}"
    );
    // Rows of the table that are not there.
    let mut tensors = stored(&file);
    let table = tensors
        .iter_mut()
        .find(|t| t.name == "per_layer_token_embd.weight")
        .unwrap();
    table.shape[0] -= 8;
    table
        .data
        .truncate(4 * table.shape.iter().product::<usize>());
    let mut plan = GgufPlan::new();
    for (key, value) in file.metadata() {
        plan.set(key.as_str(), value.clone());
    }
    for t in &tensors {
        plan.add(t.name.clone(), t.kind, t.shape.clone()).unwrap();
    }
    let read = write_plan(&path, &plan, &tensors);
    names(
        read.and_then(|c| nq_formats::nq::verify(&c)),
        &["per_layer_token_embd", "[464, 6]", "[232, 6]"],
    );
}
