//! Qwen3.8-Flash-Next on a GPU, compared with the CPU and with itself. Without a GPU the tests say that they are skipped;
//! `NQ_REQUIRE_CUDA=1` makes that a failure.

use super::engine::INT4;
use crate::common::{Store, distance, feed, gpu_engine, nq, restore, tokens, wide_hybrid};
use nq_formats::{AffineScheme, Tensor, Weight};
use nq_kernels::KernelSet;
use nq_kernels::pages::PAGE;
use nq_kernels::rng::Philox;
use nq_model::{Delta, Experts, HyperShape, IndexerShape, ModelConfig, OutputGate};
use nq_runtime::{Chunk, DeviceChoice, Engine, KvType, LoadOptions, LogitsWanted, SessionSpec};
use nq_testkit::models::ngrams;
use nq_testkit::sessions::{chunk, session_spec};

/// Ends texts, and is in them.
const END: u32 = 300;

/// A model whose rows attend to `budget` positions, with a table of n-grams in each of `tables`. Experts are as those of the
/// published model no multiple of 256 wide, and a key head has twelve query heads.
fn config(budget: usize, tables: Vec<usize>) -> ModelConfig {
    let wide = wide_hybrid("qwen4exp", 4, false);
    ModelConfig {
        hyper: Some(HyperShape {
            streams: 4,
            rank: 40,
        }),
        indexer: Some(IndexerShape {
            heads: 4,
            head_dim: 128,
            budget,
            block: 4,
        }),
        ngrams: (!tables.is_empty()).then(|| ngrams(tables, END)),
        delta: wide.delta.map(|d| Delta {
            gate: OutputGate::Sigmoid,
            ..d
        }),
        experts: wide.experts.map(|e| Experts {
            width: 192,
            shared: 192,
            ..e
        }),
        num_hidden_layers: 8,
        num_attention_heads: 24,
        eos_token_ids: vec![END],
        ..wide
    }
}

/// Random weights, of which routers choose far from ties, so that rounded activations choose the same experts.
fn store(config: &ModelConfig, scheme: Option<AffineScheme>) -> Store {
    let plain = Store::random(config, 7);
    let mut store = match scheme {
        Some(scheme) => plain.quantized(scheme),
        None => plain.clone(),
    };
    let routers = plain.matrices.iter();
    for (name, weight) in routers.filter(|(name, _)| name.ends_with("mlp.gate.weight")) {
        let dims = weight.dims();
        let mut values = vec![0.0; dims.rows * dims.cols];
        for (row, values) in values.chunks_exact_mut(dims.cols).enumerate() {
            weight.dequantize_row(row, values).unwrap();
            values.iter_mut().for_each(|v| *v *= 4.0);
        }
        let tensor = Tensor::from_f32(vec![dims.rows, dims.cols], values).unwrap();
        store.matrices.insert(name.clone(), Weight::Dense(tensor));
    }
    store
}

/// A text with ends of texts in it.
fn text(len: usize, seed: u64) -> Vec<u32> {
    let mut text = tokens(len, seed);
    text.iter_mut().skip(11).step_by(37).for_each(|t| *t = END);
    text
}

fn spec(slots: usize) -> SessionSpec {
    session_spec(slots, 700, KvType::F16, 300)
}

/// The root of the mean of squares of what is between two rows of logits, in that of the second row.
fn error(found: &[f32], expected: &[f32]) -> f32 {
    let square = |all: &mut dyn Iterator<Item = f32>| all.map(|v| v * v).sum::<f32>();
    let differences = &mut found.iter().zip(expected).map(|(a, b)| a - b);
    (square(differences) / square(&mut expected.iter().copied())).sqrt()
}

/// The divergence of the distribution that `found` are logits of from that of `expected`.
fn divergence(found: &[f32], expected: &[f32]) -> f64 {
    let logs = |row: &[f32]| -> Vec<f64> {
        let top = row.iter().fold(f32::MIN, |m, &v| m.max(v));
        let sum: f64 = row.iter().map(|v| f64::from(v - top).exp()).sum();
        row.iter().map(|v| f64::from(v - top) - sum.ln()).collect()
    };
    let (q, p) = (logs(found), logs(expected));
    p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum()
}

/// Prompts in pieces and single steps of two sequences in turn, far beyond what a row may attend to: the logits of the CPU.
/// Where blocks or experts are nearly as good as others, rounding decides; such rows may be a tenth.
#[test]
fn it_is_as_the_cpu_computes_it() {
    // An expert of all rows that is as wide as the others stands behind these, another is one by itself.
    let apart = config(16, vec![]);
    let apart = ModelConfig {
        experts: apart.experts.map(|e| Experts { shared: 160, ..e }),
        ..apart
    };
    let cases = [
        ("all positions", config(1024, vec![1]), None),
        ("all positions", config(1024, vec![1]), Some(INT4)),
        ("some positions", config(64, vec![1]), None),
        (
            "some positions, two tables",
            config(32, vec![0, 5]),
            Some(INT4),
        ),
        ("some positions, no table", apart, None),
    ];
    for (what, config, scheme) in cases {
        let store = store(&config, scheme);
        let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
            return;
        };
        let cpu = nq(&config, &store);
        let blocks = config.indexer.map_or(1, |i| i.blocks());
        let session = |engine: &dyn Engine| engine.session(spec(2)).unwrap();
        let (mut ours, mut theirs) = (session(&*gpu), session(&*cpu));
        let vocab = config.vocab_size;
        let (mut errors, mut divergences) = (Vec::new(), Vec::new());
        for slot in [1, 0] {
            let text = text(460, 3 + slot as u64);
            let mut at = 0;
            for n in [
                17, 1, 1, 1, 1, 2, 3, 5, 21, 1, 140, 1, 1, 1, 1, 250, 7, 1, 1, 1, 1, 1,
            ] {
                let part = &text[at..at + n];
                at += n;
                let (found, expected) =
                    (feed(&mut *ours, slot, part), feed(&mut *theirs, slot, part));
                for (a, b) in found.chunks(vocab).zip(expected.chunks(vocab)) {
                    errors.push(error(a, b));
                    divergences.push(divergence(a, b));
                }
            }
        }
        errors.sort_by(f32::total_cmp);
        let rows = errors.len();
        let mean = divergences.iter().sum::<f64>() / rows as f64;
        let (median, most) = (errors[rows / 2], errors[rows * 9 / 10]);
        let name = scheme.map_or("FP16".into(), |s| s.to_string());
        println!(
            "{what}, {name}: of {rows} rows median {median:.2e}, nine of ten {most:.2e}, {:.2e} at most, KL {mean:.2e}",
            errors[rows - 1]
        );
        // A block that is chosen otherwise is the larger part of what a row reads, the fewer there are.
        let part = 1.0 / blocks as f32;
        let bounds = [(part / 16.0).max(5e-3), part.max(2e-2)];
        assert!(median < bounds[0] && most < bounds[1], "{what}, {name}");
        assert!(mean < 1e-3, "{what}, {name}: KL {mean:e}");
    }
}

/// Sequences beside each other in a pass, of pieces and of single rows, are those of each alone.
#[test]
fn sequences_do_not_see_each_other() {
    let config = config(64, vec![1]);
    let store = store(&config, Some(INT4));
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let vocab = config.vocab_size;
    let alone = |text: &[u32], step: &[u32]| {
        let mut s = gpu.session(spec(1)).unwrap();
        feed(&mut *s, 0, text);
        feed(&mut *s, 0, step)
    };
    let (mut rows, mut far) = (0, 0);
    for (slots, width) in [(2, 1), (7, 1), (3, 5), (16, 1), (66, 1), (2, 40)] {
        let mut s = gpu.session(spec(slots)).unwrap();
        let texts: Vec<Vec<u32>> = (0..slots)
            .map(|i| text(60 + 5 * i % 90, i as u64))
            .collect();
        for (slot, text) in texts.iter().enumerate() {
            feed(&mut *s, slot, &text[..text.len() - width]);
        }
        let chunks: Vec<Chunk<'_>> = (texts.iter().enumerate())
            .map(|(slot, text)| chunk(slot, &text[text.len() - width..], LogitsWanted::All))
            .collect();
        let found = s.forward(&chunks, None).unwrap().data.to_vec();
        for (i, text) in texts.iter().enumerate() {
            let (begin, step) = text.split_at(text.len() - width);
            let found = &found[i * width * vocab..][..width * vocab];
            let alone = alone(begin, step);
            rows += 1;
            far += usize::from(error(found, &alone) > 5e-3);
        }
    }
    println!("{far} of {rows} sequences differ");
    assert!(far <= rows / 20, "{far} of {rows}");
}

/// Sequences of random steps, forks and cuts give what each text gives alone: pages, keys of blocks, states, rows of
/// convolutions, keys of the last positions and tokens are those of the text.
#[test]
fn random_cuts_and_forks_reach_true_states() {
    for (what, config) in [
        ("all positions", config(1024, vec![1])),
        ("some positions", config(64, vec![1])),
    ] {
        let store = store(&config, None);
        let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
            return;
        };
        let slots = 3;
        let mut s = gpu.session(spec(slots)).unwrap();
        assert_eq!(s.draft_rows(), 1);
        assert!(s.ahead().is_none());
        let mut held: Vec<Vec<u32>> = vec![Vec::new(); slots];
        let mut rng = Philox::new(3, 1);
        let mut below = |n: usize| (rng.uniform() * n as f32) as usize % n;
        let (mut cuts, mut kept, mut rows, mut far) = (0, 0, 0, 0);
        for round in 0..140u64 {
            let slot = below(slots);
            let len = below(held[slot].len() + 1);
            match below(5) {
                0 if !held[slot].is_empty() => {
                    let reached = s.truncate(slot, len);
                    assert!(reached <= len);
                    (cuts, kept) = (cuts + 1, kept + usize::from(reached > 0));
                    held[slot].truncate(reached);
                }
                1 if !held[slot].is_empty() => {
                    let to = (slot + 1) % slots;
                    let reached = s.fork(slot, to, len).unwrap();
                    held[to] = held[slot][..reached].to_vec();
                }
                _ => {
                    let n = [1, 1, 2, 3, 5, 30, 80][below(7)];
                    if held[slot].len() + n > 690 {
                        continue;
                    }
                    if n > 5 {
                        s.keep_at(slot, held[slot].len() + n - below(5));
                    }
                    let more = text(n, 100 + round);
                    let found = feed(&mut *s, slot, &more);
                    held[slot].extend(&more);
                    let mut fresh = gpu.session(spec(1)).unwrap();
                    let mut all = Vec::new();
                    for part in held[slot].chunks(300) {
                        all = feed(&mut *fresh, 0, part);
                    }
                    let vocab = config.vocab_size;
                    let d = error(&found[found.len() - vocab..], &all[all.len() - vocab..]);
                    rows += 1;
                    far += usize::from(d > 5e-3);
                }
            }
            assert_eq!(s.len(slot), held[slot].len());
        }
        println!("{what}: {far} of {rows} rows differ; {cuts} cuts, {kept} to a state");
        assert!(cuts > 10 && kept > 3, "{cuts} cuts, {kept} to a state");
        // What was wrong with a sequence would stay wrong behind it; where experts or blocks are nearly as good as others, pieces
        // of other lengths decide otherwise for a row.
        assert!(far <= rows / 10, "{what}: {far} of {rows} rows");
    }
}

/// Pages with keys of blocks, and states with tokens, continue a sequence in another session.
#[test]
fn pages_and_states_move_to_another_session() {
    let config = config(1024, vec![1]);
    let store = store(&config, None);
    let Some(gpu) = gpu_engine(&config, &store, KernelSet::Fused) else {
        return;
    };
    let (first, more) = (text(PAGE + 21, 4), text(6, 5));
    let mut s = gpu.session(spec(1)).unwrap();
    s.keep_at(0, PAGE);
    feed(&mut *s, 0, &first);
    let behind = feed(&mut *s, 0, &more);
    let (mut page, mut state) = (Vec::new(), Vec::new());
    let pages = s.pages().unwrap();
    pages.read(0, 0, &mut page).unwrap();
    pages.read_state(0, PAGE, &mut state).unwrap();
    assert_eq!(Some(state.len()), pages.state_bytes());
    let mut s = gpu.session(spec(2)).unwrap();
    restore(&mut *s, &page, &state, &first);
    let d = error(&feed(&mut *s, 1, &more), &behind);
    assert!(d < 2e-3, "{d:e}");
    assert!(distance(&behind, &vec![0.0; behind.len()]) > 0.1);
}

/// What has no kernels is refused by name, before weights are read.
#[test]
fn what_has_no_kernels_is_refused_by_name() {
    if nq_testkit::on_gpu(nq_cuda::device_count()).is_none() {
        return;
    }
    let good = config(64, vec![1]);
    let load = |config: &ModelConfig, cpu_experts| {
        let options = LoadOptions {
            device: DeviceChoice::Cuda(0),
            cpu_experts,
            ..LoadOptions::default()
        };
        nq_load::load(config, &Store::random(config, 7), &options, &())
    };
    let refused = |config: &ModelConfig| load(config, None).err().expect("refused").to_string();
    let narrow = ModelConfig {
        indexer: good.indexer.map(|i| IndexerShape { head_dim: 64, ..i }),
        ..good.clone()
    };
    assert!(refused(&narrow).contains("indexer_head_dim"));
    let block = ModelConfig {
        indexer: good.indexer.map(|i| IndexerShape { block: 6, ..i }),
        ..good.clone()
    };
    assert!(refused(&block).contains("indexer_compress_ratio"));
    let width = ModelConfig {
        experts: good.experts.map(|e| Experts { width: 100, ..e }),
        ..good.clone()
    };
    assert!(refused(&width).contains("moe_intermediate_size"));
    let on_host = load(&good, Some(1)).err().expect("refused").to_string();
    assert!(on_host.contains("--cpu-experts"), "{on_host}");
    let engine = load(&good, None).unwrap();
    let int8 = engine.session(session_spec(1, 64, KvType::Int8, 32));
    let int8 = int8.err().expect("refused").to_string();
    assert!(int8.contains("indexer"), "{int8}");
}
