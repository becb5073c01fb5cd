//! Texts that a model reads and does not continue: vectors and scores.

use super::{Error, Model, Result};
use nq_formats::Task;
use nq_kernels::pages::PAGE;
use nq_runtime::embedding::{EmbeddingTexts, Purpose, unit};
use nq_runtime::rerank::{self, shared_beginning};
use nq_runtime::{Encoder, Row, SessionSpec};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tokens of a text, at most, if no one says how many.
pub(crate) const LONGEST_TEXT: usize = 8192;
/// Texts worked on at once.
const SLOTS: usize = 32;

/// A session for texts of up to `ctx` tokens, of which `rows` are computed together.
pub(crate) fn session_for_texts(ctx: usize, rows: usize) -> SessionSpec {
    SessionSpec {
        slots: SLOTS,
        ctx,
        // The longest text, or short ones in all slots.
        pages: Some(2 * ctx.div_ceil(PAGE) + SLOTS),
        max_rows: rows,
        ..SessionSpec::default()
    }
}

/// An encoder for texts of up to 8192 tokens, if the model takes as many.
fn encoder(model: &Model, row: Row) -> Result<Encoder> {
    let ctx = model
        .checkpoint()
        .config()
        .longest_context()
        .min(LONGEST_TEXT);
    let rows = model.engine().description().prompt_rows();
    let session = model.engine().session(session_for_texts(ctx, rows))?;
    Ok(Encoder::new(session, row))
}

/// Makes vectors of texts.
pub struct Embedder {
    model: Model,
    texts: EmbeddingTexts,
    encoder: Encoder,
    /// Elements of a vector, if not all that the model makes.
    pub dimensions: Option<usize>,
    /// Ends the work once another thread sets it: the error is then [`ErrorKind::Interrupted`](super::ErrorKind).
    pub interrupt: Arc<AtomicBool>,
}

impl Embedder {
    pub(super) fn new(model: Model) -> Result<Self> {
        if !matches!(model.checkpoint().task(), Task::Embed(_)) {
            let why = "not an embedding model: it generates text";
            return Err(Error::unsuited(format!("{}: {why}", model.name())));
        }
        Ok(Embedder {
            texts: EmbeddingTexts::of(model.checkpoint())?,
            encoder: encoder(&model, Row::Hidden)?,
            model,
            dimensions: None,
            interrupt: Arc::default(),
        })
    }

    /// A vector of length 1 for each text, `[dimensions]`; zeros for a text without tokens.
    ///
    /// # Errors
    /// More dimensions than the model has; a text longer than the context; errors of the device.
    pub fn embed<T: AsRef<str>>(
        &mut self,
        texts: &[T],
        purpose: &Purpose,
    ) -> Result<Vec<Vec<f32>>> {
        let all = self.model.checkpoint().config().hidden_size;
        let width = self.dimensions.unwrap_or(all);
        let mut vectors = vec![vec![0.0; width.min(all)]; texts.len()];
        let (mut encoded, mut places) = (Vec::new(), Vec::new());
        for (i, text) in texts.iter().enumerate() {
            let tokenizer = self.model.tokenizer();
            let ids = self.texts.encode(tokenizer, text.as_ref(), purpose)?;
            if !ids.is_empty() {
                encoded.push(ids);
                places.push(i);
            }
        }
        self.encoder.encode(0, &encoded, &mut |i, state| {
            vectors[places[i]] = unit(state, width)?;
            go_on(&self.interrupt)
        })?;
        Ok(vectors)
    }
}

/// Scores how well documents answer a query.
pub struct Reranker {
    model: Model,
    reranker: rerank::Reranker,
    encoder: Encoder,
    /// Ends the work once another thread sets it: the error is then [`ErrorKind::Interrupted`](super::ErrorKind).
    pub interrupt: Arc<AtomicBool>,
}

impl Reranker {
    pub(super) fn new(model: Model) -> Result<Self> {
        let reranker = rerank::Reranker::new(model.tokenizer())?;
        Ok(Reranker {
            encoder: encoder(&model, reranker.row())?,
            reranker,
            model,
            interrupt: Arc::default(),
        })
    }

    /// The score of each document, 0 to 1, by an instruction such as [`DEFAULT_TASK`](crate::DEFAULT_TASK).
    ///
    /// # Errors
    /// A document longer than the context; errors of the device.
    pub fn score<T: AsRef<str>>(
        &mut self,
        instruction: &str,
        query: &str,
        documents: &[T],
    ) -> Result<Vec<f32>> {
        let tokenizer = self.model.tokenizer();
        let prompt = |d: &T| {
            self.reranker
                .encode(tokenizer, instruction, query, d.as_ref())
        };
        let prompts = documents.iter().map(prompt);
        let prompts = prompts.collect::<nq_runtime::Result<Vec<_>>>()?;
        let mut scores = Vec::with_capacity(documents.len());
        let shared = shared_beginning(&prompts);
        self.encoder.encode(shared, &prompts, &mut |_, logits| {
            scores.push(self.reranker.score(logits));
            go_on(&self.interrupt)
        })?;
        Ok(scores)
    }
}

fn go_on(interrupt: &AtomicBool) -> nq_runtime::Result<()> {
    match interrupt.load(Ordering::Relaxed) {
        true => Err(nq_runtime::Error::Interrupted),
        false => Ok(()),
    }
}
