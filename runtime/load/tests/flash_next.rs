//! Qwen3.8-Flash-Next, compared with Hugging Face's transformers: small random models with one table of n-grams, two
//! and none, over a text that is longer than its rows may attend to, but for one model, and has ends of texts in it.
//! `fixtures/flash_next.py` computed the expected logits and rows of tables.
//!
//! A block whose products with all heads of an indexer are negative has a score of exactly 0, and with the two heads of
//! the models that have tables, many have. Of equal scores nq takes the first, torch any; so the script checks that its
//! choices are nq's, and the models without tables have eight heads.

use crate::common::{distance, hybrid, options};
use nq_formats::export::{ExportFormat, ExportOptions, export};
use nq_formats::files::Files;
use nq_formats::serialize::write_tensors;
use nq_formats::shards::Shards;
use nq_formats::{Checkpoint, Tensor, synth};
use nq_model::{HyperShape, IndexerShape, ModelConfig, OutputGate};
use nq_runtime::{EngineKind, KvType, LogitsWanted, Session};
use nq_testkit::models::ngrams;
use nq_testkit::sessions::{chunk, feed, session_spec};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Ends texts, and is in the text.
const END: u32 = 300;

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<u32>,
    /// The rows of the text whose logits are given.
    rows: Vec<usize>,
    models: BTreeMap<String, ExpectedModel>,
}

#[derive(Deserialize)]
struct ExpectedModel {
    /// By row, every 29th logit.
    logits: Vec<Vec<f32>>,
    /// By table, the rows of all tokens.
    tables: Vec<Vec<usize>>,
}

const STEP: usize = 29;

/// The models by name.
fn models() -> Vec<(&'static str, ModelConfig)> {
    let model = |streams: usize, gate: OutputGate, tables: Option<Vec<usize>>| {
        let small = hybrid("qwen4exp", 4, false);
        ModelConfig {
            hyper: Some(HyperShape { streams, rank: 20 }),
            delta: small.delta.map(|d| nq_model::Delta { gate, ..d }),
            ngrams: tables.map(|tables| ngrams(tables, END)),
            eos_token_ids: vec![END],
            ..small
        }
    };
    let without = |budget: usize| {
        let model = model(2, OutputGate::Sigmoid, None);
        let indexer = model.indexer.map(|i| IndexerShape {
            heads: 8,
            budget,
            ..i
        });
        ModelConfig { indexer, ..model }
    };
    vec![
        ("one-table", model(4, OutputGate::Sigmoid, Some(vec![1]))),
        ("two-tables", model(3, OutputGate::Silu, Some(vec![0, 2]))),
        ("no-table", without(8)),
        ("all-blocks", without(128)),
    ]
}

/// Writes a random folder whose matrices are eight times as large as usual, so that no gate is near its middle.
fn write(folder: &Path, config: &ModelConfig) {
    let drawn = folder.with_extension("drawn");
    synth::write(&drawn, config, 17, &()).unwrap();
    std::fs::rename(&drawn, folder).unwrap();
    let shards = Shards::open(&Files::Folder(folder.into())).unwrap();
    let larger = |name: &str| {
        let tensor = shards.get(name).unwrap();
        let by = if tensor.shape().len() == 2 { 8.0 } else { 1.0 };
        let values = tensor.to_f32().unwrap().iter().map(|v| v * by).collect();
        let values = Tensor::from_f32(tensor.shape().to_vec(), values).unwrap();
        (name.to_owned(), values)
    };
    let all: Vec<(String, Tensor)> = shards.names().map(larger).collect();
    let file = folder.join("model.safetensors");
    write_tensors(&folder.join("larger"), &all, &BTreeMap::default()).unwrap();
    std::fs::rename(folder.join("larger"), file).unwrap();
}

fn session(checkpoint: &Checkpoint, slots: usize) -> Box<dyn Session> {
    let (config, store) = (checkpoint.config(), checkpoint.store());
    let engine = nq_load::load(config, store, &options(EngineKind::Nq), &()).unwrap();
    engine
        .session(session_spec(slots, 128, KvType::F32, 128))
        .unwrap()
}

#[test]
fn it_is_as_transformers_computes_it() {
    let file = include_str!("fixtures/flash_next.json");
    let expected: Expected = serde_json::from_str(file).unwrap();
    let temporary = tempfile::tempdir().unwrap();
    let kept = std::env::var_os("NQ_FLASH_NEXT");
    let root = kept.as_ref().map_or(temporary.path(), Path::new);
    let tokens = &expected.tokens;
    for (name, config) in models() {
        let folder = root.join(name);
        write(&folder, &config);
        let checkpoint = Checkpoint::open(&folder).unwrap();
        assert_eq!(
            checkpoint.config(),
            &ModelConfig {
                dtype: config.dtype,
                ..config.clone()
            }
        );
        let Some(wanted) = expected.models.get(name) else {
            assert!(kept.is_some(), "{name}: no expected logits");
            continue;
        };
        let tables = config.ngrams.iter();
        let tables = tables
            .flat_map(|n| (0..n.layers.len()).map(move |place| n.hash(place, config.vocab_size)));
        let rows = tables.map(|hash| {
            let mut rows = Vec::new();
            hash.rows(&[], tokens, &mut rows);
            rows
        });
        assert_eq!(rows.collect::<Vec<_>>(), wanted.tables, "{name}");
        let wanted = wanted.logits.concat();
        let most = wanted.iter().fold(0.0, |m, v| f32::max(m, v.abs()));
        let gguf = root.join(format!("{name}.gguf"));
        let done = export(
            &checkpoint,
            ExportFormat::Gguf,
            &gguf,
            &ExportOptions::default(),
            &(),
        );
        let mut sources = vec![("folder", checkpoint)];
        match config.ngrams.as_ref().map_or(0, |n| n.layers.len()) {
            0 | 1 => {
                done.unwrap();
                sources.push(("gguf", Checkpoint::open(&gguf).unwrap()));
            }
            _ => assert!(
                done.unwrap_err()
                    .to_string()
                    .contains("2 tables of n-grams")
            ),
        }
        let pieces = [1, 3, 7, tokens.len()];
        for ((format, checkpoint), piece) in sources
            .iter()
            .flat_map(|source| pieces.map(|piece| (source, piece)))
        {
            let mut session = session(checkpoint, 1);
            let mut all = Vec::new();
            for tokens in tokens.chunks(piece) {
                let logits = session.forward(&[chunk(0, tokens, LogitsWanted::All)], None);
                let logits = logits.unwrap();
                all.extend((0..logits.rows()).map(|i| logits.row(i).to_vec()));
            }
            let picked = |&row: &usize| all[row].iter().step_by(STEP).copied();
            let found: Vec<f32> = expected.rows.iter().flat_map(picked).collect();
            let error = distance(&found, &wanted) / most;
            assert!(error < 1e-4, "{name}, {format}, {piece} at once: {error:e}");
        }
    }
}

/// Cut by one to five tokens and continued otherwise, or forked there, a sequence is as one that was never longer.
#[test]
fn cut_and_forked_sequences_go_on_as_others_do() {
    let temporary = tempfile::tempdir().unwrap();
    let (_, config) = models().swap_remove(0);
    let folder = temporary.path().join("m");
    write(&folder, &config);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let text: Vec<u32> = (0..61).map(|i| (i * i * 5 + 11 * i) % 256).collect();
    let other: Vec<u32> = (0..9).map(|i| (i * 31 + 3) % 256).collect();
    for end in 24..32 {
        for cut in 1..=5 {
            let mut one = session(&checkpoint, 3);
            // The rows of a step whose drafts are checked can be cut anywhere.
            feed(&mut *one, 0, &text[..end - 6]);
            feed(&mut *one, 0, &text[end - 6..end]);
            assert_eq!(one.fork(0, 1, end - cut).unwrap(), end - cut);
            assert_eq!(one.truncate(0, end - cut), end - cut);
            let mut fresh = session(&checkpoint, 1);
            feed(&mut *fresh, 0, &text[..end - cut]);
            let wanted = feed(&mut *fresh, 0, &other);
            for slot in [0, 1] {
                let found = feed(&mut *one, slot, &other);
                let error = distance(&found, &wanted);
                assert!(error < 1e-4, "{end} less {cut}, slot {slot}: {error:e}");
            }
        }
    }
}
