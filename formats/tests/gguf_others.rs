//! GGUF files as other programs write them: Ollama's of hybrids, and divisors of rotary frequencies of any bounds.

use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::gguf::value::{Array, Value};
use nq_formats::gguf::{BlockType, GgufFile, GgufPlan};
use nq_formats::{Checkpoint, synth};
use nq_model::names::{Shape, parameters};
use nq_model::{DType, Dims, ModelConfig, Preset, RopeScaling};
use nq_testkit::models::{delta, rope};
use std::fs;
use std::path::{Path, PathBuf};

fn small(preset: &str) -> ModelConfig {
    let whole = Preset::find(preset).unwrap().config();
    ModelConfig {
        hidden_size: 64,
        intermediate_size: 64,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 32,
        vocab_size: 300,
        mtp_layers: 0,
        eos_token_ids: vec![299],
        dtype: Some(DType::BF16),
        tie_word_embeddings: true,
        ..whole
    }
}

fn written(dir: &Path, config: &ModelConfig) -> PathBuf {
    let folder = dir.join("m");
    let _ = fs::remove_dir_all(&folder);
    synth::write(&folder, config, 3, &()).unwrap();
    let (source, out) = (Checkpoint::open(&folder).unwrap(), dir.join("m.gguf"));
    let _ = fs::remove_file(&out);
    let options = ExportOptions::default();
    export(&source, ExportFormat::Gguf, &out, &options, &()).unwrap();
    out
}

/// (For a Llama with random weights, transformers have 4845.8012 with 4096 positions and 4845.8348 with a high factor of 8.)
#[test]
fn rotary_frequencies_stretched_between_other_bounds_are_read_back() {
    let dir = tempfile::tempdir().unwrap();
    for head_dim in [32, 128] {
        for (low, high, length, read) in [
            (1.0, 4.0, 8192, (1.0, 4.0, 8192)),
            (1.0, 4.0, 4096, (1.0, 4.0, 4096)),
            (1.0, 8.0, 8192, (1.0, 8.0, 8192)),
            // The same frequencies by other names.
            (2.0, 8.0, 8192, (1.0, 4.0, 4096)),
        ] {
            let scaling = |low: f64, high: f64, length: usize| RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: length,
            };
            let mut config = ModelConfig {
                head_dim,
                num_hidden_layers: 1,
                ..small("llama-3.1-8b")
            };
            config.rope.scaling = scaling(low, high, length);
            let found = Checkpoint::open(&written(dir.path(), &config)).unwrap();
            let (low, high, length) = read;
            assert_eq!(found.config().rope.scaling, scaling(low, high, length));
        }
    }
}

/// The file with its metadata and tensors changed.
fn rewritten(
    path: &Path,
    out: &Path,
    keys: &[(&str, Value)],
    rename: impl Fn(&str) -> String,
    more: &[&str],
) {
    let file = GgufFile::parse(path, fs::read(path).unwrap().into()).unwrap();
    let mut plan = GgufPlan::new();
    for (key, value) in file.metadata() {
        let changed = keys.iter().find(|(k, _)| k == key);
        plan.set(key.as_str(), changed.map_or(value, |(_, v)| v).clone());
    }
    for (key, value) in keys {
        plan.set(*key, value.clone());
    }
    let mut contents = Vec::new();
    for (name, info) in file.tensors() {
        plan.add(rename(name), info.kind, info.shape.clone())
            .unwrap();
        contents.push(file.data(info));
    }
    for name in more {
        plan.add((*name).into(), BlockType::F32, vec![2, 2])
            .unwrap();
        contents.push(vec![0; 16].into());
    }
    let mut contents = contents.iter();
    plan.write(out, &(), &mut |_, sink| {
        sink.write(contents.next().unwrap())
    })
    .unwrap();
}

/// What differs in them from llama.cpp's: key heads of each layer, a name, tensors that see images, and keys of their own.
#[test]
fn hybrids_of_ollama_are_those_of_llama_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let config = ModelConfig {
        num_hidden_layers: 4,
        delta: Some(delta(4, 16, 2)),
        rope: rope(1e7, Some(8)),
        ..small("qwen3.5-9b")
    };
    let path = written(dir.path(), &config);
    let plain = Checkpoint::open(&path).unwrap();
    let out = dir.path().join("ollama.gguf");
    let heads = |values: &[i32]| Value::Array(Array::of_i32s(values));
    let key = "qwen35.attention.head_count_kv";
    let short = |name: &str| name.replace("ssm_dt.bias", "ssm_dt");
    let three = plain.config().rope.sections(4).map(|n| n as i32);
    let images = ["v.blk.0.attn_qkv.weight", "v.patch_embed.weight"];
    rewritten(
        &path,
        &out,
        &[
            (key, heads(&[0, 1, 0, 1])),
            ("qwen35.rope.dimension_sections", heads(&three)),
            ("qwen35.rope.mrope_interleaved", Value::Bool(true)),
            ("qwen35.ssm.v_head_reordered", Value::Bool(true)),
        ],
        short,
        &images,
    );
    let found = Checkpoint::open(&out).unwrap();
    assert_eq!(found.config(), plain.config());
    let left = found.left_over().iter().map(|l| l.name.as_str());
    assert!(images.iter().all(|n| left.clone().any(|l| l == *n)));
    for (name, shape) in parameters(plain.config()) {
        match shape {
            Shape::Vector(n) => {
                let vector = |c: &Checkpoint| c.store().vector(&name, n).unwrap().to_f32().unwrap();
                assert_eq!(vector(&plain), vector(&found), "{name}");
            }
            Shape::Matrix(rows, cols) => {
                let matrix =
                    |c: &Checkpoint| c.store().matrix(&name, Dims::new(rows, cols)).unwrap();
                crate::common::assert_same(&matrix(&plain), &matrix(&found));
            }
        }
    }
    for wrong in [&three[..2], &[2, 1, 1, 1], &[2, 1, 1, 0, 0]] {
        let wrong = [("qwen35.rope.dimension_sections", heads(wrong))];
        rewritten(&path, &out, &wrong, short, &[]);
        let error = Checkpoint::open(&out).err().unwrap().to_string();
        assert!(error.contains("time, row, column"), "{error}");
    }
    for wrong in [heads(&[1, 1, 0, 1]), heads(&[0, 1, 0, 2])] {
        rewritten(&path, &out, &[(key, wrong)], short, &[]);
        assert!(Checkpoint::open(&out).is_err());
    }
    rewritten(
        &path,
        &out,
        &[("qwen35.ssm.v_head_reordered", Value::Bool(false))],
        short,
        &[],
    );
    let grouped = Checkpoint::open(&out).unwrap();
    assert!(!grouped.config().delta.unwrap().tiled);
}
