//! Families of models other than Qwen3, compared with Hugging Face's transformers: small random models, read from
//! safetensors and from GGUF, whole and in pieces. `fixtures/families.py` computed the expected logits.

use crate::common::{distance, hybrid, options};
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::{Checkpoint, synth};
use nq_model::{Architecture, DType, ModelConfig, Rope, RopeScaling, find};
use nq_runtime::{EngineKind, KvType, LogitsWanted, Session};
use nq_testkit::sessions::{chunk, session_spec};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    /// By model: of its last three rows, every 29th logit.
    logits: BTreeMap<String, Vec<Vec<f32>>>,
}

const STEP: usize = 29;

fn family(gguf: &str) -> &'static Architecture {
    find(|a| a.gguf, gguf).unwrap()
}

/// The models by name: a family each, with a head of its own and without.
fn models() -> Vec<(String, ModelConfig)> {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let mut models = Vec::new();
    for (name, gguf, scaling, eps) in [
        ("qwen2", "qwen2", RopeScaling::None, 1e-6),
        ("llama", "llama", RopeScaling::None, 1e-5),
        ("llama-stretched", "llama", llama3, 1e-5),
    ] {
        for tied in [false, true] {
            let config = ModelConfig {
                architecture: family(gguf),
                hidden_size: 96,
                intermediate_size: 160,
                experts: None,
                delta: None,
                hyper: None,
                indexer: None,
                ngrams: None,
                num_hidden_layers: 3,
                num_attention_heads: 6,
                num_key_value_heads: 2,
                head_dim: 16,
                vocab_size: 320,
                max_position_embeddings: 131_072,
                rms_norm_eps: eps,
                // Several frequencies lie where Llama 3's stretch blends.
                rope: Rope {
                    theta: 5e5,
                    dims: None,
                    scaling,
                    sections: None,
                },
                tie_word_embeddings: tied,
                mtp_layers: 0,
                eos_token_ids: vec![300],
                dtype: Some(DType::BF16),
            };
            let tie = if tied { "-tied" } else { "" };
            models.push((format!("{name}{tie}"), config));
        }
    }
    for (name, gguf, value_heads, tied) in [
        ("qwen3.5", "qwen35", 2, false),
        ("qwen3.5-tied", "qwen35", 4, true),
        ("qwen3.5-thrice", "qwen35", 6, false),
        ("qwen3.5-moe", "qwen35moe", 4, false),
        ("qwen3-next", "qwen3next", 4, false),
    ] {
        models.push((name.into(), hybrid(gguf, value_heads, tied)));
    }
    models
}

/// The logits of the expected rows, the text fed in pieces of `piece` tokens.
fn logits(checkpoint: &Checkpoint, tokens: &[u32], piece: usize) -> Vec<f32> {
    let (config, store) = (checkpoint.config(), checkpoint.store());
    let engine = nq_load::load(config, store, &options(EngineKind::Nq), &()).unwrap();
    let spec = session_spec(1, 64, KvType::F32, 64);
    let mut session: Box<dyn Session> = engine.session(spec).unwrap();
    let mut all = Vec::new();
    for tokens in tokens.chunks(piece) {
        let found = session
            .forward(&[chunk(0, tokens, LogitsWanted::All)], None)
            .unwrap();
        all.extend((0..found.rows()).map(|i| found.row(i).to_vec()));
    }
    let rows = &all[all.len() - 3..];
    let picked = |row: &Vec<f32>| row.iter().step_by(STEP).copied().collect::<Vec<f32>>();
    rows.iter().flat_map(picked).collect()
}

#[test]
fn families_are_as_transformers_computes_them() {
    let file = include_str!("fixtures/families.json");
    let expected: Expected = serde_json::from_str(file).unwrap();
    let temporary = tempfile::tempdir().unwrap();
    let kept = std::env::var_os("NQ_FAMILIES");
    let root = kept.as_ref().map_or(temporary.path(), Path::new);
    for (name, config) in models() {
        let folder = root.join(&name);
        synth::write(&folder, &config, 11, &()).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        assert_eq!(checkpoint.config(), &config, "{name}");
        let gguf = root.join(format!("{name}.gguf"));
        let options = ExportOptions::default();
        export(&checkpoint, ExportFormat::Gguf, &gguf, &options, &()).unwrap();
        let Some(wanted) = expected.logits.get(&name) else {
            assert!(kept.is_some(), "{name}: no expected logits");
            continue;
        };
        let wanted = wanted.concat();
        let again = Checkpoint::open(&gguf).unwrap();
        assert_eq!(again.config().rope, config.rope, "{name}");
        for (format, checkpoint) in [("safetensors", &checkpoint), ("gguf", &again)] {
            for piece in [1, 7, 40] {
                let found = logits(checkpoint, &expected.tokens, piece);
                let most = wanted.iter().fold(0.0, |m, v| f32::max(m, v.abs()));
                let error = distance(&found, &wanted) / most;
                assert!(error < 1e-5, "{name}, {format}, {piece} at once: {error:e}");
            }
        }
    }
}
