//! The demo model compared with Hugging Face transformers in f32.

use nq_formats::Checkpoint;
use nq_runtime::{
    ActivationChoice, DeviceChoice, Encoder, Engine, KvType, LoadOptions, LogitsWanted, Row,
    SessionSpec,
};
use nq_testkit::sessions::{chunk, session_spec};
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
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets"))
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
    nq_load::load(checkpoint.config(), checkpoint.store(), &options, &()).expect("demo loads")
}

fn spec(ctx: usize) -> SessionSpec {
    session_spec(1, ctx, KvType::F32, ctx)
}

#[test]
fn logits_match() {
    let engine = demo();
    for prompt in golden().logits {
        let mut session = engine.session(spec(prompt.ids.len())).unwrap();
        let logits = session
            .forward(&[chunk(0, &prompt.ids, LogitsWanted::All)], None)
            .unwrap();
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
            let logits = session
                .forward(&[chunk(0, &next, LogitsWanted::Last)], None)
                .unwrap();
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

/// The hidden state of a text's last token, times the embedding matrix, which is this model's head, is
/// what transformers has for logits.
#[test]
fn hidden_states_match() {
    let checkpoint = Checkpoint::open(&assets().join("demo")).expect("demo model");
    let c = checkpoint.config();
    let head = nq_runtime::models::embedding(checkpoint.store(), c).unwrap();
    let golden = golden().logits;
    let texts: Vec<Vec<u32>> = golden.iter().map(|p| p.ids.clone()).collect();
    let longest = texts.iter().map(Vec::len).max().unwrap();
    // Fewer rows than the texts have: they go through in several steps.
    let spec = SessionSpec {
        slots: 3,
        max_rows: longest / 2 + 1,
        ..spec(longest)
    };
    let mut encoder = Encoder::new(demo().session(spec).unwrap(), Row::Hidden);
    let mut compared = 0;
    let mut each = |i: usize, state: &[f32]| {
        assert_eq!((i, state.len()), (compared, c.hidden_size));
        let mut row = vec![0.0; c.hidden_size];
        let mut logit = |id: usize| {
            head.dequantize_row(id, &mut row).unwrap();
            let products = row.iter().zip(state);
            products
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum::<f64>()
        };
        let all: Vec<f64> = (0..c.vocab_size).map(&mut logit).collect();
        let max = all.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = all.iter().map(|l| (l - max).exp()).sum();
        let last = golden[i].ids.len() - 1;
        let pairs = golden[i].top8_ids[last]
            .iter()
            .zip(&golden[i].top8_logits[last]);
        let listed = pairs.map(|(&id, &want)| (all[id], want));
        for (found, want) in listed.chain([(max + sum.ln(), golden[i].logsumexp[last])]) {
            assert!((found - want).abs() < 2e-3, "text {i}: {found}, not {want}");
        }
        compared += 1;
        Ok(())
    };
    encoder.encode(0, &texts, &mut each).unwrap();
    assert_eq!(compared, golden.len());
}
