//! Qwen3.8-Flash-Next as it is published, and configurations and files of it that say what cannot be.

use crate::common::names;
use crate::hybrids::{tensors, write};
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::{AffineScheme, Bits, Checkpoint, Group, StoredWeight, Tensor, Zeros, synth};
use nq_model::names::is_layer_linear;
use nq_model::{DType, Dims, ModelConfig, NgramTable};
use nq_testkit::models::tiny;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

pub(crate) fn config() -> ModelConfig {
    ModelConfig {
        num_hidden_layers: 4,
        dtype: Some(DType::BF16),
        ..tiny("qwen4exp")
    }
}

/// A folder of a random model and its config.json.
fn folder() -> (tempfile::TempDir, Value) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("m");
    synth::write(&root, &config(), 4, &()).unwrap();
    let json = fs::read(root.join("config.json")).unwrap();
    (dir, serde_json::from_slice(&json).unwrap())
}

/// A tensor of 64-bit integers.
pub(crate) fn integers(values: &[u64]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor::new(DType::I64, vec![values.len()], bytes.into()).unwrap()
}

/// Opens the folder's tensors, and others, under a config.json.
fn open(
    root: &Path,
    json: &Value,
    others: Vec<(String, Tensor)>,
) -> nq_formats::Result<Checkpoint> {
    let mut all = tensors(root);
    all.extend(others);
    let copy = root.with_extension("copy");
    write(&copy, json, &all);
    Checkpoint::open(&copy)
}

/// Within a model that sees images, with the tower and the layer that drafts, and with layers called as transformers saves
/// them.
#[test]
fn published_folders_are_read() {
    let (dir, plain) = folder();
    let root = dir.path().join("m");
    let mut text = plain.clone();
    text.as_object_mut().unwrap().remove("architectures");
    text["mtp_num_hidden_layers"] = 1.into();
    text["layer_types"] = json!([
        "linear_attention",
        "indexed_attention",
        "linear_attention",
        "full_attention"
    ]);
    let published = json!({
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": text,
        "vision_config": {"depth": 2, "hidden_size": 8},
    });
    let table = config().ngrams.unwrap();
    let hash = table.hash(0, config().vocab_size);
    let unit = || Tensor::from_f32(vec![2], vec![1.0; 2]).unwrap();
    let others = vec![
        ("mtp.pre_fc_norm_hidden.weight".into(), unit()),
        ("model.visual.blocks.0.norm1.weight".into(), unit()),
        (
            NgramTable::integers_name(0, "layer_multipliers"),
            integers(&hash.factors),
        ),
        (
            NgramTable::integers_name(0, "ngram_heads_vocab_sizes"),
            integers(&hash.rows),
        ),
        (
            NgramTable::integers_name(0, "ngram_heads_offsets"),
            integers(&hash.offsets),
        ),
    ];
    let checkpoint = open(&root, &published, others).unwrap();
    assert_eq!(checkpoint.config(), &config());
    let said: Vec<&str> = checkpoint
        .left_over()
        .iter()
        .map(|l| l.name.as_str())
        .collect();
    for name in [
        "config.json: mtp_num_hidden_layers 1",
        "model.visual.blocks.0.norm1.weight",
        "mtp.pre_fc_norm_hidden.weight",
    ] {
        assert!(said.contains(&name), "{said:?}");
    }
    assert_eq!(said.len(), 3, "{said:?}");
}

#[test]
fn what_cannot_be_is_named() {
    let (dir, good) = folder();
    let root = dir.path().join("m");
    for (key, value, parts) in [
        (
            "output_gate_type",
            json!("relu"),
            ["output_gate_type relu", "silu or sigmoid"],
        ),
        ("hc_count", json!(1), ["hc_count", "2 to 64"]),
        ("hc_count", json!(null), ["hc_count", "no such key"]),
        ("hc_lowrank", json!(0), ["hc_lowrank", "found 0"]),
        (
            "hc_lowrank",
            json!(13),
            ["input_mix_weight_down", "[13, 96]"],
        ),
        (
            "indexer_kv_heads",
            json!(2),
            ["indexer_kv_heads 2", "one head"],
        ),
        (
            "indexer_n_heads",
            json!(null),
            ["indexer_n_heads", "no such key"],
        ),
        ("indexer_n_heads", json!(3), ["index_qk_proj", "[32, 32]"]),
        (
            "indexer_head_dim",
            json!(2),
            ["indexer_head_dim", "at least 4"],
        ),
        ("indexer_budget", json!(9), ["indexer_budget", "a multiple"]),
        (
            "indexer_compress_ratio",
            json!(3),
            ["indexer_compress_ratio 3", "pages of 128"],
        ),
        ("ple_layer_ids", json!([0]), ["ple_layer_ids", "1 to 4"]),
        ("ple_layer_ids", json!([5]), ["ple_layer_ids", "1 to 4"]),
        (
            "ple_layer_ids",
            json!([2]),
            ["ple_layer_ids with 2", "recurrence"],
        ),
        (
            "ple_layer_ids",
            json!([3]),
            ["model.layers.0.ple", "no such parameter"],
        ),
        (
            "ple_layer_ids",
            json!([]),
            ["model.layers.0.ple", "no such parameter"],
        ),
        (
            "ple_embed_dim",
            json!(23),
            ["ple_embed_dim", "a multiple of 4"],
        ),
        (
            "ple_conv_kernel_size",
            json!(3),
            ["ple.conv1d", "[96, 1, 3]"],
        ),
        (
            "ple_embedding_dtype",
            json!("float8_e5m2"),
            ["ple_embedding_dtype float8_e5m2", "floats and FP8"],
        ),
        ("ngram_size", json!(1), ["ngram_size", "2 to 16"]),
        (
            "heads_per_ngram",
            json!(1 << 20),
            ["heads_per_ngram", "1 to 1024"],
        ),
        (
            "ngram_vocab_size_base",
            json!(1u64 << 40),
            ["ngram_vocab_size_base", "found"],
        ),
        (
            "ngram_vocab_size_base",
            json!(70),
            ["ngram_embedding.shard_", "expected"],
        ),
        (
            "split_ngram_parts",
            json!(7),
            ["split_ngram_parts", "a divisor of 240"],
        ),
        ("seed", json!(-1), ["seed", "non-negative"]),
        (
            "eos_token_id",
            json!(null),
            ["eos_token_id", "n-grams do not reach across"],
        ),
        ("eos_token_id", json!(300), ["eos_token_id", "300"]),
        (
            "vocab_size",
            json!(1 << 25),
            ["vocab_size", "tables of n-grams"],
        ),
        (
            "layer_types",
            json!(["full_attention"]),
            ["layer_types", "4 layers"],
        ),
    ] {
        let mut json = good.clone();
        json[key] = value;
        let read = open(&root, &json, Vec::new());
        names(read.and_then(|c| nq_formats::nq::verify(&c)), &parts);
    }
    let table = config().ngrams.unwrap();
    let mut factors = table.hash(0, config().vocab_size).factors;
    factors[1] += 2;
    let name = NgramTable::integers_name(0, "layer_multipliers");
    let others = vec![(name.clone(), integers(&factors))];
    names(
        open(&root, &good, others),
        &[&name, "follow from the configuration"],
    );
    let short = vec![(name.clone(), integers(&factors[..2]))];
    names(open(&root, &good, short), &[&name, "I64 [3]", "I64 [2]"]);
}

/// Tables of FP8 have one scale; their rows are read without the others.
#[test]
fn tables_of_fp8_are_read() {
    let (dir, good) = folder();
    let root = dir.path().join("m");
    let scale_name = NgramTable::scale_name(0);
    let is_part = |name: &str| {
        nq_model::parameter_of(name)
            .and_then(NgramTable::part_of)
            .is_some()
    };
    let with = |scale: Option<f32>, fp8: bool| {
        let mut json = good.clone();
        json["ple_embedding_dtype"] = "float8_e4m3fn".into();
        let mut all = tensors(&root);
        for (_, t) in all.iter_mut().filter(|(name, _)| fp8 && is_part(name)) {
            // All codes but NaN.
            let codes = (0..t.shape().iter().product::<usize>()).map(|i| (i % 0x7f) as u8);
            *t = Tensor::new(DType::F8E4M3, t.shape().to_vec(), codes.collect()).unwrap();
        }
        let scale = scale.map(|v| Tensor::from_f32(vec![1], vec![v]).unwrap());
        all.extend(scale.map(|t| (scale_name.clone(), t)));
        let copy = root.with_extension("copy");
        let _ = fs::remove_dir_all(&copy);
        write(&copy, &json, &all);
        Checkpoint::open(&copy)
    };
    let checkpoint = with(Some(0.25), true).unwrap();
    assert!(
        checkpoint.left_over().is_empty(),
        "{:?}",
        checkpoint.left_over()
    );
    let table = config().ngrams.unwrap();
    let (rows, cols) = (table.table_rows(0) / table.parts, table.row_width());
    let (name, dims) = (NgramTable::part_name(0, 1), Dims::new(rows, cols));
    let found = checkpoint.store().rows(&name, dims).unwrap();
    assert!(
        matches!(found, StoredWeight::Fp8(_)),
        "{}",
        found.scheme_name()
    );
    let held = checkpoint.store().matrix(&name, dims).unwrap();
    let (mut row, mut of_held) = (vec![0.0; cols], vec![0.0; cols]);
    found.dequantize_row(5, &mut row).unwrap();
    let codes =
        (5 * cols..6 * cols).map(|i| 0.25 * nq_formats::import::fp8::e4m3((i % 0x7f) as u8));
    assert_eq!(row, codes.collect::<Vec<_>>());
    held.dequantize_row(5, &mut of_held).unwrap();
    assert_eq!(row, of_held); // whose three bits of mantissa bf16 has
    names(
        with(None, true).and_then(|c| nq_formats::nq::verify(&c)),
        &[&scale_name, "no such tensor"],
    );
    names(
        with(Some(f32::INFINITY), true).and_then(|c| nq_formats::nq::verify(&c)),
        &[&scale_name, "inf"],
    );
    names(with(Some(1.0), false), &[&scale_name, "no such parameter"]);
}

#[test]
fn folders_for_other_programs_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let scheme = |name: &str| {
        let scheme = AffineScheme::new(Bits::B4, Group::Size(8), Zeros::Integer);
        is_layer_linear(name).then_some(scheme)
    };
    let source = synth::quantized_checkpoint("m", &config(), 3, scheme).unwrap();
    for format in [ExportFormat::Gptq, ExportFormat::CompressedTensors] {
        let out = dir.path().join("out");
        let done = export(&source, format, &out, &ExportOptions::default(), &());
        names(done, &["Qwen3.8-Flash-Next as a folder", "GGUF"]);
    }
}
