//! Embedding vectors of texts (Qwen3 Embedding, arXiv 2506.05176): the hidden state of the last token after the final
//! norm, normalized to length 1.

use crate::error::{Error, Result};
use crate::tokenizer::{TOKENIZER_FILE, Tokenizer};
use nq_formats::task::Prompts;
use nq_formats::tokenizer::{Around, around};
use nq_formats::{Checkpoint, Task};

/// The instruction of queries if neither the model nor the user gives one.
pub const DEFAULT_TASK: &str =
    "Given a web search query, retrieve relevant passages that answer the query";

/// Prepares texts for an embedding model: prompts and the tokens that the tokenizer adds.
#[derive(Clone, Debug)]
pub struct EmbeddingTexts {
    prompts: Prompts,
    around: Around,
}

/// The role of a text, which decides on its prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A document to be found: the model's own prompt for documents.
    Document,
    /// A query: the model's own prompt for queries.
    Query,
    /// A query with this instruction.
    Instructed(String),
    /// No prompt.
    Plain,
}

impl EmbeddingTexts {
    /// For the model in `checkpoint`.
    ///
    /// # Errors
    /// [`Error::Request`] if it is not an embedding model; errors of reading its tokenizer.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let Task::Embed(prompts) = checkpoint.task() else {
            return Err(Error::Request {
                what: "model",
                expected:
                    "an embedding model (one with the modules.json of sentence-transformers, or \
                           saved without a head)"
                        .into(),
                found: "a model that generates text".into(),
            });
        };
        let files = checkpoint.files();
        let json = files.require(TOKENIZER_FILE)?;
        Ok(EmbeddingTexts {
            prompts: prompts.clone(),
            around: around(&files.path(TOKENIZER_FILE), &json)?,
        })
    }

    /// True if the tokenizer appends an end token; its hidden state is then the embedding.
    pub fn adds_end(&self) -> bool {
        !self.around.after.is_empty()
    }

    /// The ids of `text` with its prompt and the tokens that the tokenizer adds.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str, purpose: &Purpose) -> Result<Vec<u32>> {
        let prefix = match purpose {
            Purpose::Plain => String::new(),
            Purpose::Document => self.prompts.document.clone().unwrap_or_default(),
            Purpose::Query => match &self.prompts.query {
                Some(prompt) => prompt.clone(),
                None => instruction(DEFAULT_TASK),
            },
            Purpose::Instructed(task) => instruction(task),
        };
        let Around { before, after } = &self.around;
        let tokens = tokenizer.encode(&(prefix + text))?;
        Ok([before, &tokens, after].map(Vec::as_slice).concat())
    }

    /// Cuts `tokens` to at most `most`: keeps the beginning of the text and the tokens that the tokenizer appends
    /// to its end.
    pub fn truncate(&self, tokens: &mut Vec<u32>, most: usize) {
        if tokens.len() > most {
            let end = self.around.after.len().min(most);
            tokens.drain(most - end..tokens.len() - end);
        }
    }
}

fn instruction(task: &str) -> String {
    format!("Instruct: {task}\nQuery:")
}

/// The first `dimensions` of `state`, normalized to length 1; sums are in f64.
///
/// # Errors
/// [`Error::Request`] for more dimensions than `state` has, and for a vector that is all zeros or not finite.
pub fn unit(state: &[f32], dimensions: usize) -> Result<Vec<f32>> {
    let Some(vector) = state.get(..dimensions).filter(|v| !v.is_empty()) else {
        return Err(Error::Request {
            what: "dimensions",
            expected: format!("1 to {}", state.len()),
            found: dimensions.to_string(),
        });
    };
    let squares: f64 = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let length = squares.sqrt();
    if !(length.is_finite() && length > 0.0) {
        return Err(Error::Request {
            what: "an embedding",
            expected: "a length to divide by".into(),
            found: length.to_string(),
        });
    }
    let scaled = vector.iter().map(|&x| (f64::from(x) / length) as f32);
    Ok(scaled.collect())
}
