//! Random models: the published shapes, the same bytes from the same seed, and folders that open.

use crate::common::{names, shared};
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::synth;
use nq_formats::{Checkpoint, Weight, nq};
use nq_model::names::{Shape, parameters};
use nq_model::{ARCHITECTURES, Dims, ModelConfig, Preset};
use serde_json::Value;
use std::fs;

/// The presets match the published config.json files, key by key.
#[test]
fn presets_are_the_published_models() {
    let parameters = [
        596_049_920,
        1_720_574_976,
        4_022_468_096,
        8_190_735_360,
        14_768_307_200,
        32_762_123_264,
    ];
    for (preset, parameters) in Preset::all().zip(parameters) {
        let config = preset.config();
        assert_eq!(config.parameters(), parameters, "{}", preset.name);
        assert_eq!(Preset::find(&preset.name.to_uppercase()), Some(preset));
        let size = preset.hub_id.trim_start_matches("Qwen/");
        let Some(path) = shared(&format!("data/qwen3/config-{size}.json")) else {
            continue;
        };
        let text = fs::read(&path).unwrap();
        assert_eq!(nq_formats::config::parse(&path, &text).unwrap(), config);
        let published: Value = serde_json::from_slice(&text).unwrap();
        for (key, value) in nq_formats::config::to_json(&config) {
            assert_eq!(published[&key], value, "{}: {key}", preset.name);
        }
    }
}

fn small() -> ModelConfig {
    ModelConfig {
        hidden_size: 48,
        intermediate_size: 80,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        vocab_size: 300,
        eos_token_ids: vec![299],
        tie_word_embeddings: false,
        ..Preset::find("qwen3-0.6b").unwrap().config()
    }
}

#[test]
fn folders_open_and_equal_the_weights_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let dest = dir.path().join("deep/model");
    synth::write(&dest, &small(), 7, &()).unwrap();
    let folder = Checkpoint::open(&dest).unwrap();
    nq::verify(&folder).unwrap();
    assert_eq!(folder.config(), &small());
    assert_eq!(folder.eos_token_ids(), [299, 297]);
    let memory = synth::checkpoint("m", &small(), 7).unwrap();
    nq::verify(&memory).unwrap();
    assert_eq!(memory.eos_token_ids(), folder.eos_token_ids());
    assert_eq!(memory.tensor_bytes(), folder.tensor_bytes());
    for (name, shape) in parameters(&small()) {
        match shape {
            Shape::Vector(n) => {
                let a = folder.store().vector(&name, n).unwrap();
                let b = memory.store().vector(&name, n).unwrap();
                assert_eq!(a.data(), b.data(), "{name}");
                assert!(a.to_f32().unwrap().iter().all(|v| (0.7..1.3).contains(v)));
            }
            Shape::Matrix(r, c) => {
                let [a, b] =
                    [&folder, &memory].map(|m| m.store().matrix(&name, Dims::new(r, c)).unwrap());
                let (Weight::Dense(a), Weight::Dense(b)) = (a, b) else {
                    panic!("dense weights")
                };
                assert_eq!(a.data(), b.data(), "{name}");
            }
        }
    }
    for name in memory.files().names().unwrap() {
        let written = fs::read(dest.join(&name)).unwrap();
        assert_eq!(memory.files().require(&name).unwrap(), written, "{name}");
    }
    names(
        memory.store().matrix("lm_head", Dims::new(300, 47)),
        &["m", "lm_head", "[300, 47]", "[300, 48]"],
    );
    names(memory.store().vector("x", 3), &["m", "x", "no such tensor"]);
    names(
        synth::write(&dest, &small(), 7, &()),
        &["model", "already there"],
    );
    let gguf = dir.path().join("deep/model.gguf");
    export(
        &folder,
        ExportFormat::Gguf,
        &gguf,
        &ExportOptions::default(),
        &(),
    )
    .unwrap();
    assert_eq!(Checkpoint::open(&gguf).unwrap().config(), folder.config());
    fs::remove_file(gguf).unwrap();
    // No temporary files are left.
    assert_eq!(fs::read_dir(dest.parent().unwrap()).unwrap().count(), 1);

    let mut tiny = small();
    tiny.eos_token_ids = vec![300];
    names(synth::checkpoint("m", &tiny, 7), &["eos_token_id", "300"]);
}

#[test]
fn values_depend_on_seed_and_name_alone() {
    let shape = vec![256, 1111];
    let values = |seed, name| {
        synth::random_tensor(ARCHITECTURES[0], seed, name, shape.clone())
            .to_f32()
            .unwrap()
    };
    let a = values(0, "a");
    assert_eq!(a, values(0, "a"));
    let n = a.len() as f64;
    let correlation = |b: &[f32]| {
        let dot: f64 = a.iter().zip(b).map(|(x, y)| f64::from(x * y)).sum();
        dot / n / 0.02f64.powi(2)
    };
    // A correlation has a standard deviation of 1 / sqrt(n) = 0.0019.
    assert!((correlation(&a) - 1.0).abs() < 0.02);
    for other in [values(1, "a"), values(0, "b"), values(0, "aa")] {
        assert!(correlation(&other).abs() < 0.01);
    }
    for lag in [1, 2, 3, 4, 1111, 4444] {
        assert!(correlation(&a[lag..]).abs() < 0.01, "lag {lag}");
    }
}
