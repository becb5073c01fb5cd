//! The demo model written as GGUF files reads back as the same model.

use crate::common::{self, names, shared};
use nq_formats::Files;
use nq_formats::export::Mix;
use nq_formats::export::{Change, ExportFormat, ExportOptions, ExportReport, export};
use nq_formats::gguf::{BlockType, GgufFile, encode};
use nq_formats::{Checkpoint, Exactness, Weight};
use nq_model::names::{Shape, parameters};
use nq_model::{DType, Dims};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn demo() -> Checkpoint {
    Checkpoint::open(&nq_testkit::demo()).unwrap()
}

fn write(source: &Checkpoint, out: &Path, mix: Mix) -> ExportReport {
    let options = ExportOptions {
        mix,
        ..ExportOptions::default()
    };
    export(source, ExportFormat::Gguf, out, &options, &()).unwrap()
}

/// The demo model in `mix`, in a folder that exists as long as the first element.
fn demo_as(mix: Mix) -> (tempfile::TempDir, PathBuf, ExportReport) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("demo.gguf");
    let report = write(&demo(), &path, mix);
    (dir, path, report)
}

fn json(files: &Files, name: &str) -> Value {
    serde_json::from_slice(&files.require(name).unwrap()).unwrap()
}

/// The largest relative root-mean-square difference of any matrix.
fn worst_difference(a: &Checkpoint, b: &Checkpoint) -> f64 {
    let mut worst = 0f64;
    for (name, shape) in parameters(a.config()) {
        let Shape::Matrix(rows, cols) = shape else {
            continue;
        };
        let x = a.store().stored(&name, Dims::new(rows, cols)).unwrap();
        let y = b.store().stored(&name, Dims::new(rows, cols)).unwrap();
        let (mut p, mut q) = (vec![0f32; cols], vec![0f32; cols]);
        let (mut error, mut power) = (0f64, 0f64);
        for row in 0..rows {
            x.dequantize_row(row, &mut p).unwrap();
            y.dequantize_row(row, &mut q).unwrap();
            error += p
                .iter()
                .zip(&q)
                .map(|(a, b)| f64::from(a - b).powi(2))
                .sum::<f64>();
            power += p.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>();
        }
        worst = worst.max((error / power).sqrt());
    }
    worst
}

#[test]
fn an_unquantized_model_survives_unchanged() {
    for (mix, kind) in [
        (Mix::Keep, BlockType::BF16),
        (Mix::All(BlockType::BF16), BlockType::BF16),
        (Mix::All(BlockType::F32), BlockType::F32),
    ] {
        let (_dir, path, report) = demo_as(mix);
        assert_eq!(report.file_bytes, fs::metadata(&path).unwrap().len());
        let kept = Change::Kept(Exactness::Exact);
        assert!(
            report
                .weights
                .iter()
                .all(|w| w.to == kind.name() && w.change == kept)
        );
        let (source, read) = (demo(), Checkpoint::open(&path).unwrap());
        assert_eq!(read.store().format(), "gguf");
        assert_eq!(read.store().quantization(), None);
        assert_eq!(read.store().file_bytes(), report.file_bytes);
        let mut config = source.config().clone();
        config.dtype = read.config().dtype;
        assert_eq!(read.config(), &config);
        assert_eq!(read.generation(), source.generation());
        assert_eq!(read.eos_token_ids(), source.eos_token_ids());
        assert_eq!(worst_difference(&source, &read), 0.0);
        let norm = |c: &Checkpoint| {
            c.store()
                .vector("model.norm", 512)
                .unwrap()
                .to_f32()
                .unwrap()
        };
        assert_eq!(norm(&source), norm(&read));
        assert!(!read.store().contains("lm_head"));
        // Opening a folder that holds only this file gives the same checkpoint.
        assert_eq!(
            Checkpoint::open(path.parent().unwrap()).unwrap().config(),
            read.config()
        );
    }
}

/// Ignores special marks of tokens that GGUF treats as control tokens because of their form.
fn as_gguf_marks_them(mut tokenizer: Value) -> Value {
    for token in tokenizer["added_tokens"].as_array_mut().unwrap() {
        if token["content"].as_str().unwrap().starts_with("<|") {
            token["special"] = true.into();
        }
    }
    tokenizer
}

#[test]
fn tokenizer_and_template_are_rebuilt() {
    let (_dir, path, _) = demo_as(Mix::Keep);
    let (source, read) = (demo(), Checkpoint::open(&path).unwrap());
    let want = as_gguf_marks_them(json(source.files(), "tokenizer.json"));
    assert_eq!(json(read.files(), "tokenizer.json"), want);
    let want = json(source.files(), "tokenizer_config.json");
    let config = json(read.files(), "tokenizer_config.json");
    for key in [
        "chat_template",
        "eos_token",
        "pad_token",
        "add_bos_token",
        "errors",
    ] {
        assert_eq!(config[key], want[key], "{key}");
    }
}

/// The pattern of Qwen3.5 and later, which takes marks for letters, has a name of its own.
#[test]
fn a_pattern_with_marks_keeps_its_name() {
    const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("source");
    fs::create_dir(&folder).unwrap();
    for entry in fs::read_dir(nq_testkit::demo()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let path = folder.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERN.into();
    fs::write(&path, tokenizer.to_string()).unwrap();
    let out = dir.path().join("x.gguf");
    write(&Checkpoint::open(&folder).unwrap(), &out, Mix::Keep);
    let file = GgufFile::parse(&out, fs::read(&out).unwrap().into()).unwrap();
    assert_eq!(file.str("tokenizer.ggml.pre").unwrap(), Some("qwen35"));
    let read = Checkpoint::open(&out).unwrap();
    let want = as_gguf_marks_them(tokenizer);
    assert_eq!(json(read.files(), "tokenizer.json"), want);
}

/// The published tokenizer, whose vocabulary is smaller than the embedding.
#[test]
fn the_published_tokenizer_is_rebuilt() {
    let Some(published) = shared("data/qwen3") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ] {
        fs::copy(published.join(name), source.join(name)).unwrap();
    }
    // One narrow layer: only the number of the embedding's rows matters.
    let config = common::tiny_config("")
        .replace("\"vocab_size\":16", "\"vocab_size\":151936")
        .replace("\"eos_token_id\":3", "\"eos_token_id\":151645");
    fs::write(source.join("config.json"), &config).unwrap();
    let model = nq_formats::config::parse(Path::new("config.json"), config.as_bytes()).unwrap();
    let tensors: Vec<_> = parameters(&model)
        .into_iter()
        .map(|(name, shape)| {
            let zeros = vec![0f32; shape.elements()];
            let tensor = nq_formats::Tensor::from_f32(shape.dims(), zeros).unwrap();
            (format!("{name}.weight"), tensor)
        })
        .collect();
    let weights = source.join("model.safetensors");
    nq_formats::serialize::write_tensors(&weights, &tensors, &Default::default()).unwrap();
    let out = dir.path().join("x.gguf");
    let source = Checkpoint::open(&source).unwrap();
    write(&source, &out, Mix::Keep);
    let read = Checkpoint::open(&out).unwrap();
    assert_eq!(read.config().vocab_size, 151_936);
    assert_eq!(read.eos_token_ids(), [151_645, 151_643]);
    assert_eq!(read.generation(), source.generation());
    let want = as_gguf_marks_them(json(source.files(), "tokenizer.json"));
    assert_eq!(json(read.files(), "tokenizer.json"), want);
    let template = json(read.files(), "tokenizer_config.json")["chat_template"].clone();
    let want = fs::read_to_string(published.join("chat_template.jinja")).unwrap();
    assert_eq!(template, want.as_str());
    let file = GgufFile::parse(&out, fs::read(&out).unwrap().into()).unwrap();
    let tokens = file.strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!(
        (tokens[151_668], tokens[151_669]),
        ("</think>", "[PAD151669]")
    );
}

#[test]
fn quantized_mixes_keep_their_distance() {
    let source = demo();
    for (mix, bound) in [
        (Mix::All(BlockType::F16), 1e-6),
        (Mix::All(BlockType::Q8_0), 0.0057),
        (Mix::All(BlockType::Q6_K), 0.019),
        (Mix::All(BlockType::Q5_0), 0.044),
        (Mix::All(BlockType::Q4_0), 0.088),
        (Mix::All(BlockType::Q4_1), 0.075),
        (Mix::Q4KM, 0.075),
    ] {
        let (_dir, path, report) = demo_as(mix);
        let read = Checkpoint::open(&path).unwrap();
        let difference = worst_difference(&source, &read);
        assert!(difference < bound, "{mix:?}: {difference}");
        let change = match mix {
            Mix::All(BlockType::F16) => Change::Kept(Exactness::ValuesRounded(DType::F16)),
            _ => Change::Quantized,
        };
        assert!(report.weights.iter().all(|w| w.change == change));
    }
}

#[test]
fn the_mix_gives_more_bits_where_they_count() {
    let (_dir, path, report) = demo_as(Mix::Q4KM);
    let kind = |name: &str| {
        let found = report.weights.iter().find(|w| w.name == name);
        found.map(|w| w.to.as_str())
    };
    assert_eq!(kind("model.embed_tokens"), Some("Q6_K"));
    for (layer, want) in ["Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q6_K"].iter().enumerate() {
        for part in ["self_attn.v_proj", "mlp.down_proj"] {
            assert_eq!(kind(&format!("model.layers.{layer}.{part}")), Some(*want));
        }
        assert_eq!(
            kind(&format!("model.layers.{layer}.mlp.up_proj")),
            Some("Q4_K")
        );
    }
    let read = Checkpoint::open(&path).unwrap();
    let quantization = read.store().quantization().unwrap();
    assert_eq!(quantization["file_type"], 15);
    assert_eq!(quantization["tensors"]["Q6_K"], 5);
    let rounded = Exactness::ScalesRounded(DType::F16);
    assert_eq!(read.store().exactness("model.embed_tokens"), rounded);
    let Weight::Quantized(_) = read
        .store()
        .matrix("model.embed_tokens", Dims::new(4096, 512))
        .unwrap()
    else {
        panic!("a quantized weight");
    };
    // A GGUF file's blocks are copied, whatever their type.
    let again = path.with_file_name("again.gguf");
    let copied = write(&read, &again, Mix::Keep);
    let kept = Change::Kept(Exactness::Exact);
    assert!(
        copied
            .weights
            .iter()
            .all(|w| w.from == w.to && w.change == kept)
    );
    assert_eq!(
        worst_difference(&read, &Checkpoint::open(&again).unwrap()),
        0.0
    );
    let options = ExportOptions {
        mix: Mix::All(BlockType::Q8_0),
        ..ExportOptions::default()
    };
    let other = path.with_file_name("other.gguf");
    names(
        export(&read, ExportFormat::Gguf, &other, &options, &()),
        &[
            "other.gguf",
            "model.embed_tokens (Q6_K) and 35 more",
            "--requantize",
        ],
    );
    names(
        export(&read, ExportFormat::Gguf, &again, &options, &()),
        &["again.gguf", "already there; --force"],
    );
}

#[test]
fn what_cannot_be_rounded_is_named() {
    let error = |kind, row: &[f32]| encode::encode_row(kind, row, &mut Vec::new()).map(|_| ());
    names(
        error(BlockType::Q2_K, &[0.0; 256]),
        &["block type", "Q4_K", "Q2_K"],
    );
    let mut row = [0.5f32; 32];
    row[7] = f32::NAN;
    names(error(BlockType::Q8_0, &row), &["finite", "NaN in column 7"]);
    row[7] = 3e7;
    for kind in [
        BlockType::F16,
        BlockType::Q8_0,
        BlockType::Q4_0,
        BlockType::Q4_1,
    ] {
        names(
            error(kind, &row),
            &["can hold", kind.name(), "3e7 in column 7"],
        );
    }
    // Scales of two levels reach further, and as far as they reach, so do values.
    for kind in [BlockType::BF16, BlockType::F32] {
        error(kind, &row).unwrap();
    }
    row[7] = 65504.0 * 100.0;
    error(BlockType::Q8_0, &row).unwrap();
    let mut row = [0.5f32; 256];
    row[7] = 3e7;
    error(BlockType::Q6_K, &row).unwrap();
    row[7] = 1e30;
    names(error(BlockType::Q6_K, &row), &["Q6_K", "1e30"]);
}
