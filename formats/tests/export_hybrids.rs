//! Hybrids as folders for other engines: what nq wrote is read as the same model, and in the form of published files.

use crate::common::names;
use nq_formats::export::{ExportFormat, ExportOptions, compare, export};
use nq_formats::files::Files;
use nq_formats::shards::Shards;
use nq_formats::{AffineScheme, Bits, Checkpoint, Group, Zeros, nq, synth};
use nq_model::names::is_layer_linear;
use nq_model::{DType, Dims, ModelConfig};
use nq_testkit::models::{delta, hybrid_of};
use serde_json::Value;
use std::path::Path;

fn config(preset: &str, dtype: DType) -> ModelConfig {
    ModelConfig {
        hidden_size: 64,
        intermediate_size: 96,
        delta: Some(delta(6, 16, 2)),
        dtype: Some(dtype),
        ..hybrid_of(preset)
    }
}

const FAMILIES: [&str; 3] = ["qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b"];

/// Rates and what scores experts stay as they are.
fn scheme(name: &str) -> Option<AffineScheme> {
    let fused = name.ends_with("in_proj_qkvz");
    let scheme = AffineScheme::new(Bits::B4, Group::Size(16), Zeros::Integer);
    (is_layer_linear(name) || fused).then_some(scheme)
}

fn written(source: &Checkpoint, format: ExportFormat, out: &Path) -> Checkpoint {
    export(source, format, out, &ExportOptions::default(), &()).unwrap();
    let written = Checkpoint::open(out).unwrap();
    assert!(written.left_over().is_empty(), "{:?}", written.left_over());
    nq::verify_values(&written).unwrap();
    written
}

#[test]
fn hybrids_are_the_same_in_every_folder() {
    for family in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        let config = config(family, DType::F32);
        let source = synth::quantized_checkpoint("m", &config, 3, scheme).unwrap();
        for format in [
            ExportFormat::CompressedTensors,
            ExportFormat::Gptq,
            ExportFormat::Awq,
        ] {
            let out = dir.path().join(format!("{format:?}"));
            let written = written(&source, format, &out);
            assert_eq!(written.config(), &config, "{family} as {format:?}");
            for d in compare(&source, &written, &()).unwrap() {
                // 1 is taken from gains in f32, and added again.
                let most = if d.name.contains("norm") { 1e-7 } else { 0.0 };
                assert!(d.max <= most, "{family} as {format:?}: {d:?}");
            }
        }
    }
}

/// A GGUF file says how much of each head is rotated, also if that is all.
#[test]
fn heads_that_are_rotated_whole_stay_so() {
    let dir = tempfile::tempdir().unwrap();
    for dims in [None, Some(4), Some(8)] {
        let mut config = config(FAMILIES[0], DType::F32);
        config.rope.dims = dims;
        let source = synth::checkpoint("m", &config, 3).unwrap();
        let out = dir.path().join(format!("{dims:?}.gguf"));
        let written = written(&source, ExportFormat::Gguf, &out);
        assert_eq!(written.config().rotary_dims(), dims.unwrap_or(16));
    }
}

/// Value heads in the order of GGUF files are put into that of folders: in rows, in columns, codes or floats.
#[test]
fn value_heads_get_the_order_of_folders() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(FAMILIES[0], DType::F32);
    config.delta.as_mut().unwrap().tiled = true;
    for only in ["mlp.up_proj", "linear_attn"] {
        let some = move |name: &str| scheme(name).filter(|_| name.contains(only));
        let source = synth::quantized_checkpoint("m", &config, 3, some).unwrap();
        let out = dir.path().join(only);
        let written = written(&source, ExportFormat::CompressedTensors, &out);
        assert!(!written.config().delta.unwrap().tiled);
        let mut seen = 0;
        // The comparison knows both orders.
        for d in compare(&source, &written, &()).unwrap() {
            let most = if d.name.contains("norm") { 1e-7 } else { 0.0 };
            assert!(d.max <= most, "{only}: {d:?}");
            seen += usize::from(d.name.contains("linear_attn"));
        }
        assert_eq!(seen, 9);
    }
}

/// Names and shapes are those of published files, which other programs look for.
#[test]
fn folders_have_the_form_of_published_ones() {
    for family in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        let config = config(family, DType::BF16);
        let source = synth::quantized_checkpoint("m", &config, 3, scheme).unwrap();
        let out = dir.path().join("out");
        let checkpoint = written(&source, ExportFormat::CompressedTensors, &out);
        let shards = Shards::open(&Files::Folder(out.clone())).unwrap();
        let recurrence = "model.layers.0.linear_attn.";
        let conv = shards.get(&format!("{recurrence}conv1d.weight")).unwrap();
        assert_eq!(conv.shape(), [160, 1, 4]);
        for whole in ["A_log", "dt_bias"] {
            assert_eq!(
                shards.get(&format!("{recurrence}{whole}")).unwrap().shape(),
                [6]
            );
        }
        let norm = shards.get("model.norm.weight").unwrap().to_f32().unwrap();
        let mean = norm.iter().sum::<f32>() / norm.len() as f32;
        assert!(mean.abs() < 0.1, "{family}: {mean}");
        let next = family.contains("next");
        let linears = match next {
            true => vec![("in_proj_qkvz", 256)],
            false => vec![("in_proj_qkv", 160), ("in_proj_z", 96)],
        };
        for (name, rows) in linears {
            let packed = shards
                .get(&format!("{recurrence}{name}.weight_packed"))
                .unwrap();
            assert_eq!(packed.shape(), [rows, 8], "{family}: {name}");
        }
        assert!(shards.contains("mtp.fc.weight_packed"));
        let json: Value =
            serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(
            json["architectures"][0],
            checkpoint.config().architecture.class
        );
        let ignored = json["quantization_config"]["ignore"].to_string();
        let rates = if next { "in_proj_ba" } else { "in_proj_a" };
        assert!(
            ignored.contains(&format!("{recurrence}{rates}")),
            "{ignored}"
        );
    }
}

/// What these formats cannot hold is refused by name.
#[test]
fn other_orders_and_unlike_halves_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let to = |source: &Checkpoint| {
        let out = dir.path().join("out");
        let options = ExportOptions::default();
        export(source, ExportFormat::Gptq, &out, &options, &()).map(drop)
    };
    // Groups of inputs that end within a head cannot be put into another order.
    let mut tiled = config(FAMILIES[0], DType::F32);
    tiled.delta.as_mut().unwrap().tiled = true;
    let long = |name: &str| {
        scheme(name).map(|s| AffineScheme {
            group: Group::Size(32),
            ..s
        })
    };
    let source = synth::quantized_checkpoint("m", &tiled, 3, long).unwrap();
    names(
        to(&source),
        &[
            "linear_attn.out_proj",
            "whole ones in a head of 16",
            "int4 g32",
        ],
    );
    // A file of nq may hold the two parts of one of Next's matrices otherwise.
    let config = config(FAMILIES[2], DType::F32);
    let source = synth::quantized_checkpoint("m", &config, 3, scheme).unwrap();
    let nq_folder = dir.path().join("nq");
    unlike(&source, &nq_folder);
    let source = Checkpoint::open(&nq_folder).unwrap();
    names(
        to(&source),
        &["in_proj_qkvz", "in_proj_z)", "int4 g16 asymmetric"],
    );
}

/// Writes a folder of nq in which one Linear of a recurrence has another scheme than its neighbour.
fn unlike(source: &Checkpoint, out: &Path) {
    use nq_formats::nq::{Opened, Param, QuantizationRecord, Writer, WriterOptions};
    use nq_model::Shape;
    let plan = Value::Null;
    let opened = Writer::open(out, source.files(), &plan, WriterOptions::default()).unwrap();
    let Opened::Writer(writer) = opened else {
        unreachable!()
    };
    let eight = AffineScheme::new(Bits::B8, Group::Size(16), Zeros::None);
    let (mut vectors, mut matrices) = (Vec::new(), Vec::new());
    for (name, shape) in nq_model::names::parameters(source.config()) {
        match shape {
            Shape::Vector(n) => {
                vectors.push((name.clone(), source.store().vector(&name, n).unwrap()))
            }
            Shape::Matrix(rows, cols) if name == "model.layers.0.linear_attn.in_proj_z" => {
                let other =
                    synth::random_quantized(1, &name, Dims::new(rows, cols), eight).unwrap();
                let other =
                    nq_formats::Weight::Quantized(nq_formats::QuantizedWeight::Affine(other));
                matrices.push((name, other));
            }
            Shape::Matrix(rows, cols) => {
                let weight = source.store().matrix(&name, Dims::new(rows, cols)).unwrap();
                matrices.push((name, weight));
            }
        }
    }
    let vectors = vectors.iter().map(|(n, t)| (n.clone(), Param::Vector(t)));
    let matrices = matrices.iter().map(|(n, w)| (n.clone(), Param::Matrix(w)));
    writer
        .put("all", &vectors.chain(matrices).collect::<Vec<_>>())
        .unwrap();
    writer.finish(QuantizationRecord::default(), &()).unwrap();
}
