//! The MTP layer of a model as published, computed by an engine of its own.

use super::published::ask;
use super::{Store, feed, nq};
use nq_formats::mtp::LayerStore;
use nq_formats::{Tensor, Weight, WeightStore};
use nq_load::StreamDrafts;
use nq_model::mtp::{self, EMBEDDING_NORM, FC, HIDDEN_NORM};
use nq_model::names::{EMBEDDING, HEAD, NORM, Shape, layer_parameters};
use nq_model::{Dims, ModelConfig};
use nq_runtime::{DraftLayer, DraftedBy, Engine, KvType, LogitsWanted, Session, SessionSpec};
use nq_testkit::sessions::{chunk, session_spec};

pub(crate) fn session(engine: &dyn Engine) -> Box<dyn Session> {
    let spec = SessionSpec {
        drafts: DraftLayer::mtp(engine.config()).map_or(DraftedBy::Nothing, DraftedBy::Layer),
        ..session_spec(2, 300, KvType::F32, 300)
    };
    engine.session(spec).unwrap()
}

fn row(w: &Weight, index: usize) -> Vec<f32> {
    let mut values = vec![0.0; w.dims().cols];
    w.dequantize_row(index, &mut values).unwrap();
    values
}

/// What the final norm gives for each token of `text`.
fn hidden(engine: &dyn Engine, text: &[u32]) -> Vec<Vec<f32>> {
    let mut out = Vec::new();
    session(engine)
        .hidden(&[chunk(0, text, LogitsWanted::All)], &mut out)
        .unwrap();
    let rows = out.chunks(engine.config().hidden_size);
    rows.map(<[f32]>::to_vec).collect()
}

/// The layer's inputs, computed in f64, become the embeddings of a model of that layer alone, whose output is
/// then what the layer drafts.
pub(crate) struct PublishedLayer<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) store: &'a Store,
    /// Of a text and the number of all tokens: how many of these, the first ones, are drafted from behind the text.
    pub(crate) drafted: fn(&[u32], usize) -> usize,
}

impl PublishedLayer<'_> {
    /// The input of the layer for `token` behind the hidden state `h`.
    fn input(&self, token: u32, h: &[f32]) -> Vec<f32> {
        let (c, store) = (self.config, self.store);
        let embedding = store
            .matrix(EMBEDDING, Dims::new(c.vocab_size, c.hidden_size))
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
            .matrix(FC, Dims::new(c.hidden_size, 2 * c.hidden_size))
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
        for (name, shape) in layer_parameters(&layer, 0) {
            match shape {
                Shape::Matrix(out, inputs) => {
                    let w = view.matrix(&name, Dims::new(out, inputs)).unwrap();
                    store.matrices.insert(name, w);
                }
                Shape::Vector(n) => {
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

    /// Checks that `found` are the drafts behind `text`, of which the layer sees the tokens from `from` on; logits
    /// that differ by less than `tie` may go either way. `engine` gives the model's hidden states.
    pub(crate) fn check(
        &self,
        engine: &dyn Engine,
        (text, from): (&[u32], usize),
        found: &[u32],
        tie: f32,
    ) {
        let states = hidden(engine, &text[..text.len() - 1]);
        let rows = text[1..].iter().zip(&states).skip(from);
        let mut inputs: Vec<Vec<f32>> = rows.map(|(&t, h)| self.input(t, h)).collect();
        let drafted = (self.drafted)(text, self.config.vocab_size);
        for (i, &token) in found.iter().enumerate() {
            let (made, logits) = self.run(&inputs);
            assert!(
                (token as usize) < drafted,
                "draft {i} of {} tokens",
                text.len()
            );
            let best = logits[..drafted].iter().copied().fold(f32::MIN, f32::max);
            let gap = best - logits[token as usize];
            assert!(gap < tie, "draft {i} of {} tokens: {gap}", text.len());
            inputs.push(self.input(token, &made));
        }
    }
}

/// Forks of sequences: what was fed to `layer` of them and what waits is known behind the fork, with another text,
/// too, and the sequence itself goes on. `cpu` gives the model's hidden states.
pub(crate) fn check_forks(
    published: &PublishedLayer<'_>,
    (cpu, layer): (&dyn Engine, &StreamDrafts),
    open: impl Fn() -> Box<dyn Session>,
    tie: f32,
) {
    let text = super::tokens(270, 3);
    for (drafted, at) in [(true, 200), (false, 200), (true, 150), (false, 150)] {
        let mut session = open();
        let mut drafter = layer.drafter(&mut *session).unwrap();
        let mut check = |session: &mut dyn Session, slot: usize, text: &[u32]| {
            let found = ask(&mut *drafter, session, slot, text);
            assert_eq!(found.len(), 5, "fork at {at}");
            published.check(cpu, (text, 0), &found, tie);
        };
        session.keep_at(0, 150);
        feed(&mut *session, 0, &text[..200]);
        if drafted {
            check(&mut *session, 0, &text[..201]);
        }
        assert_eq!(session.fork(0, 1, at).unwrap(), at);
        let other = [&text[..at + 1], &super::tokens(40, 12)].concat();
        feed(&mut *session, 1, &other[at..other.len() - 1]);
        check(&mut *session, 1, &other);
        feed(&mut *session, 0, &text[200..230]);
        check(&mut *session, 0, &text[..231]);
        // Where the text parts in front of the token that the fork's last row was made with.
        assert_eq!(session.fork(0, 1, at).unwrap(), at);
        let parted = [&text[..at], &super::tokens(41, 13)].concat();
        feed(&mut *session, 1, &parted[at..parted.len() - 1]);
        let found = ask(&mut *drafter, &mut *session, 1, &parted);
        assert_eq!(found.len(), 5, "parted at {at}");
    }
}
