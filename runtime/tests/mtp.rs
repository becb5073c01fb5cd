//! Drafts by a model's MTP layer: those of the published computation, and answers unchanged.

mod common;

use common::published::ask;
use common::{Store, feed, hybrid, nq, options, tokens};
use nq_formats::mtp::{self, EMBEDDING_NORM, FC, HIDDEN_NORM, LayerStore};
use nq_formats::names::{EMBEDDING, HEAD, NORM};
use nq_formats::{AffineScheme, Bits, Group, ModelConfig, Tensor, Weight, WeightStore, Zeros};
use nq_runtime::generate::{Limits, Sequence, generate};
use nq_runtime::{
    ActivationChoice, Chunk, Engine, EngineKind, KvType, LoadOptions, LogitsWanted, Mtp, Sampler,
    SamplingParams, Session, SessionSpec, Speculation,
};
use std::ops::ControlFlow;

fn configs() -> [ModelConfig; 3] {
    [("qwen35", true), ("qwen35", false), ("qwen35moe", false)].map(|(gguf, tied)| ModelConfig {
        mtp_layers: 1,
        ..hybrid(gguf, 4, tied)
    })
}

fn session(engine: &dyn Engine) -> Box<dyn Session> {
    let spec = SessionSpec {
        slots: 2,
        ctx: 300,
        pages: None,
        kv: KvType::F32,
        max_rows: 300,
        snapshots: None,
        drafts: true,
    };
    engine.session(spec).unwrap()
}

fn row(w: &Weight, index: usize) -> Vec<f32> {
    let mut values = vec![0.0; w.dims().1];
    w.dequantize_row(index, &mut values).unwrap();
    values
}

/// What the final norm gives for each token of `text`.
fn hidden(engine: &dyn Engine, text: &[u32]) -> Vec<Vec<f32>> {
    let mut out = Vec::new();
    let chunk = Chunk {
        slot: 0,
        tokens: text,
        logits: LogitsWanted::All,
    };
    session(engine).hidden(&[chunk], &mut out).unwrap();
    let rows = out.chunks(engine.config().hidden_size);
    rows.map(<[f32]>::to_vec).collect()
}

/// The layer's inputs, computed in f64, become the embeddings of a model of that layer alone, whose output is
/// then what the layer drafts.
struct Published<'a> {
    config: &'a ModelConfig,
    store: &'a Store,
}

impl Published<'_> {
    /// The input of the layer for `token` behind the hidden state `h`.
    fn input(&self, token: u32, h: &[f32]) -> Vec<f32> {
        let (c, store) = (self.config, self.store);
        let embedding = store
            .matrix(EMBEDDING, (c.vocab_size, c.hidden_size))
            .unwrap();
        let norm = |x: &[f32], name: &str| -> Vec<f64> {
            let gains = store.vector(name, x.len()).unwrap().to_f32().unwrap();
            let squares: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum();
            let scale = (squares / x.len() as f64 + f64::from(c.rms_norm_eps)).sqrt();
            let scaled = x.iter().zip(gains);
            scaled
                .map(|(x, g)| f64::from(*x) / scale * f64::from(g))
                .collect()
        };
        let both = [
            norm(&row(&embedding, token as usize), EMBEDDING_NORM),
            norm(h, HIDDEN_NORM),
        ]
        .concat();
        let fc = store
            .matrix(FC, (c.hidden_size, 2 * c.hidden_size))
            .unwrap();
        let product = |out: usize| {
            let row = row(&fc, out);
            let sum: f64 = row.iter().zip(&both).map(|(w, x)| f64::from(*w) * x).sum();
            sum as f32
        };
        (0..c.hidden_size).map(product).collect()
    }

    /// What the layer makes of the last of its `inputs`, and the logits behind it.
    fn run(&self, inputs: &[Vec<f32>]) -> (Vec<f32>, Vec<f32>) {
        let (c, view) = (self.config, LayerStore::new(self.store));
        let layer = ModelConfig {
            tie_word_embeddings: false,
            ..mtp::config(c).unwrap()
        };
        let mut store = Store::default();
        let mut embedding = inputs.concat();
        embedding.resize(c.vocab_size * c.hidden_size, 0.0);
        let embedding = Tensor::from_f32(vec![c.vocab_size, c.hidden_size], embedding).unwrap();
        store
            .matrices
            .insert(EMBEDDING.into(), Weight::Dense(embedding));
        let head = if c.tie_word_embeddings {
            EMBEDDING
        } else {
            HEAD
        };
        store
            .matrices
            .insert(HEAD.into(), self.store.matrices[head].clone());
        store
            .vectors
            .insert(NORM.into(), self.store.vectors[mtp::NORM].clone());
        for (name, shape) in nq_formats::names::layer_parameters(&layer, 0) {
            match shape {
                nq_formats::names::Shape::Matrix(out, inputs) => {
                    let w = view.matrix(&name, (out, inputs)).unwrap();
                    store.matrices.insert(name, w);
                }
                nq_formats::names::Shape::Vector(n) => {
                    let v = view.vector(&name, n).unwrap();
                    store.vectors.insert(name, v);
                }
            }
        }
        let engine = nq(&layer, &store);
        let rows: Vec<u32> = (0..inputs.len() as u32).collect();
        let logits = feed(&mut *session(&*engine), 0, &rows);
        let made = hidden(&*engine, &rows).pop().unwrap();
        (made, logits[logits.len() - c.vocab_size..].to_vec())
    }

    /// How many of `found` are the drafts behind `text`, of which the model's first token is at `from`; near ties
    /// may go either way.
    fn agrees(&self, engine: &dyn Engine, text: &[u32], from: usize, found: &[u32]) {
        let states = hidden(engine, &text[..text.len() - 1]);
        let rows = text[1..].iter().zip(&states).skip(from);
        let mut inputs: Vec<Vec<f32>> = rows.map(|(&t, h)| self.input(t, h)).collect();
        for (i, &token) in found.iter().enumerate() {
            let (made, logits) = self.run(&inputs);
            let best = logits.iter().copied().fold(f32::MIN, f32::max);
            let gap = best - logits[token as usize];
            assert!(gap < 1e-3, "draft {i} of {} tokens: {gap}", text.len());
            inputs.push(self.input(token, &made));
        }
    }
}

/// As the text grows, is cut, and is another, in both slots.
#[test]
fn drafts_are_those_of_the_published_computation() {
    for config in configs() {
        let store = Store::random(&config, 9);
        let engine = nq(&config, &store);
        let published = Published {
            config: &config,
            store: &store,
        };
        let layer = Mtp::load((&config, &store), &options(EngineKind::Nq)).unwrap();
        let mut session = session(&*engine);
        let mut drafter = layer.drafter(&mut *session).unwrap();
        // Of `text`, the session holds `fed` tokens at most, and the layer sees those from `from` on.
        let mut check = |slot: usize, text: &[u32], fed: usize, from: usize| {
            let held = session.len(slot);
            let held = session.truncate(slot, held.min(fed));
            feed(&mut *session, slot, &text[held..text.len() - 1]);
            let found = ask(&mut *drafter, &mut *session, slot, text);
            assert_eq!(found.len(), 5, "{} tokens", text.len());
            published.agrees(&*engine, text, from, &found);
        };
        let text = tokens(270, 3);
        for length in [2, 3, 7, 8, 140, 270] {
            check(0, &text[..length], length, 0);
        }
        check(1, &tokens(20, 12), 0, 0);
        check(0, &tokens(50, 13), 0, 0);
    }
}

/// Whatever is drafted, answers stay as they are, bit for bit.
#[test]
fn drafts_change_no_answer() {
    for config in configs() {
        let int4 = AffineScheme::new(Bits::B4, Group::Size(32), Zeros::Integer);
        let store = Store::random(&config, 9).quantized(int4);
        let auto = LoadOptions {
            activations: ActivationChoice::Auto,
            ..options(EngineKind::Nq)
        };
        let engine = nq_runtime::load(&config, &store, &auto, &()).unwrap();
        let layer = Mtp::load((&config, &store), &auto).unwrap();
        let prompt = tokens(40, 8);
        for temperature in [0.0, 0.7] {
            let params = SamplingParams {
                temperature,
                ..SamplingParams::greedy()
            };
            let answer = |drafts: bool| {
                let mut session = session(&*engine);
                let speculation = drafts.then(|| {
                    let drafter = layer.drafter(&mut *session).unwrap();
                    Speculation::new(drafter).always()
                });
                let mut sequence = Sequence::new(&mut *session, 0).with_drafts(speculation);
                let mut all = Vec::new();
                // Two answers in a row: the second continues what the cache holds.
                for n in [60, 50] {
                    let text = [&prompt[..], &all].concat();
                    let mut sampler = Sampler::new(params, 3).unwrap();
                    let limits = Limits {
                        stop: &[],
                        max_tokens: n,
                        interrupt: None,
                    };
                    let each = &mut |_| ControlFlow::Continue(());
                    let made = generate(
                        &mut *session,
                        &mut sequence,
                        &text,
                        &mut sampler,
                        &limits,
                        each,
                    );
                    let made = made.unwrap();
                    assert_eq!(made.stats.drafted > 0, drafts, "{:?}", made.stats);
                    all.extend(made.tokens);
                }
                all
            };
            assert_eq!(answer(true), answer(false));
        }
    }
}

#[test]
fn models_without_such_a_layer_are_refused() {
    let config = hybrid("qwen35", 4, false);
    let store = Store::random(&config, 9);
    let refused = Mtp::load((&config, &store), &options(EngineKind::Nq)).err();
    let refused = refused.expect("an error").to_string();
    assert!(refused.contains("mtp_num_hidden_layers"), "{refused}");
}
