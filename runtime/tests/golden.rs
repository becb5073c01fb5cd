//! The demo model compared with Hugging Face transformers in f32.

use nq_formats::Checkpoint;
use nq_runtime::{
    ActivationChoice, Chunk, DeviceChoice, Engine, KvType, LoadOptions, LogitsWanted, SessionSpec,
};
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;

#[derive(Deserialize)]
struct Golden {
    logits: Vec<Prompt>,
    greedy: Vec<Greedy>,
}

/// Expected logits after each token of a text.
#[derive(Deserialize)]
struct Prompt {
    text: String,
    ids: Vec<u32>,
    logsumexp: Vec<f64>,
    top8_ids: Vec<Vec<usize>>,
    top8_logits: Vec<Vec<f64>>,
}

/// Expected greedy continuation of the prompt of the same index.
#[derive(Deserialize)]
struct Greedy {
    ids: Vec<u32>,
}

fn assets() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../assets"))
}

fn golden() -> Golden {
    let file = std::fs::File::open(assets().join("demo-golden.json")).expect("golden file");
    serde_json::from_reader(std::io::BufReader::new(file)).expect("golden file parses")
}

fn demo() -> Arc<dyn Engine> {
    let checkpoint = Checkpoint::open(&assets().join("demo")).expect("demo model");
    let options = LoadOptions {
        device: DeviceChoice::Cpu,
        activations: ActivationChoice::F32,
        ..LoadOptions::default()
    };
    nq_runtime::load(checkpoint.config(), checkpoint.store(), &options, &()).expect("demo loads")
}

fn spec(ctx: usize) -> SessionSpec {
    SessionSpec {
        slots: 1,
        ctx,
        pages: None,
        kv: KvType::F32,
        max_rows: ctx,
    }
}

#[test]
fn logits_match() {
    let engine = demo();
    for prompt in golden().logits {
        let mut session = engine.session(spec(prompt.ids.len())).unwrap();
        let chunk = Chunk {
            slot: 0,
            tokens: &prompt.ids,
            logits: LogitsWanted::All,
        };
        let logits = session.forward(&[chunk], None).unwrap();
        assert_eq!(logits.rows(), prompt.ids.len());
        for (i, want) in prompt.logsumexp.iter().enumerate() {
            let row = logits.row(i);
            let max = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
            let sum: f64 = row.iter().map(|&l| (f64::from(l) - max).exp()).sum();
            let pairs = prompt.top8_ids[i].iter().zip(&prompt.top8_logits[i]);
            let listed = pairs.map(|(&id, &want)| (f64::from(row[id]), want));
            for (found, want) in listed.chain([(max + sum.ln(), *want)]) {
                assert!(
                    (found - want).abs() <= 2e-3,
                    "{:?}, position {i}: expected {want}, found {found}",
                    prompt.text
                );
            }
        }
    }
}

#[test]
fn greedy_continuations_match() {
    let engine = demo();
    let golden = golden();
    assert_eq!(golden.logits.len(), golden.greedy.len());
    for (prompt, want) in golden.logits.iter().zip(&golden.greedy) {
        let mut session = engine.session(spec(1024)).unwrap();
        let mut next = prompt.ids.clone();
        for (step, &token) in want.ids.iter().enumerate() {
            let chunk = Chunk {
                slot: 0,
                tokens: &next,
                logits: LogitsWanted::Last,
            };
            let logits = session.forward(&[chunk], None).unwrap();
            let row = logits.row(0);
            let best = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
            let best = best.unwrap();
            let lead = row[best] - row[token as usize];
            // Where the two best are this close, either implementation may round either way;
            // continuing with the listed token keeps the rest comparable.
            assert!(
                best == token as usize || lead <= 1e-3,
                "{:?}, step {step}: expected {token}, found {best}, ahead by {lead}",
                prompt.text
            );
            next = vec![token];
        }
    }
}
