//! Scores how well documents answer a query, with a model that answers `yes` or `no` (Qwen3 Reranker, arXiv
//! 2506.05176): the prompt, and the score from the logits of these two tokens.

use crate::encoder::Row;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

const BEGIN: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on \
                     the Query and the Instruct provided. Note that the answer can only be \"yes\" or \
                     \"no\".<|im_end|>\n<|im_start|>user\n";
const END: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

/// The prompts of a reranker.
#[derive(Clone, Debug)]
pub struct Reranker {
    begin: Vec<u32>,
    end: Vec<u32>,
    yes: u32,
    no: u32,
}

impl Reranker {
    /// For a model with this tokenizer.
    ///
    /// # Errors
    /// [`Error::Request`] if it lacks a token that the prompt or the answer needs.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let id = |token: &str| {
            tokenizer.token_id(token).ok_or_else(|| Error::Request {
                what: "tokenizer",
                expected: format!("{token:?}, which a reranker's prompt and answer need"),
                found: "no such token".into(),
            })
        };
        id("<|im_start|>")?;
        id("<|im_end|>")?;
        Ok(Reranker {
            begin: tokenizer.encode(BEGIN)?,
            end: tokenizer.encode(END)?,
            yes: id("yes")?,
            no: id("no")?,
        })
    }

    /// The row to request of an [`Encoder`](crate::Encoder): the logits that [`Reranker::score`] takes.
    pub fn row(&self) -> Row {
        Row::Logits(vec![self.yes, self.no])
    }

    /// The prompt for a document. Control tokens in the instruction, query and document are treated as text.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        instruction: &str,
        query: &str,
        document: &str,
    ) -> Result<Vec<u32>> {
        let asked = format!("<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}");
        let asked = tokenizer.encode_quoted(&asked)?;
        Ok([&self.begin, &asked, &self.end].map(Vec::as_slice).concat())
    }

    /// Cuts a prompt to `most` tokens, at the end of its document.
    pub fn truncate(&self, prompt: &mut Vec<u32>, most: usize) {
        if prompt.len() > most {
            let end = self.end.len().min(most);
            prompt.drain(most - end..prompt.len() - end);
        }
    }

    /// The probability of `yes` where the answer is that or `no`, of their logits.
    pub fn score(&self, logits: &[f32]) -> f32 {
        let (yes, no) = (f64::from(logits[0]), f64::from(logits[1]));
        (1.0 / (1.0 + (no - yes).exp())) as f32
    }
}

/// How many tokens all of `texts` begin with, short of the whole of any.
pub fn shared_beginning(texts: &[Vec<u32>]) -> usize {
    let Some((first, others)) = texts.split_first() else {
        return 0;
    };
    let alike = |text: &Vec<u32>| first.iter().zip(text).take_while(|(a, b)| a == b).count();
    let shortest = texts.iter().map(Vec::len).min().unwrap_or(0);
    let alike = others.iter().map(alike).min().unwrap_or(0);
    alike.min(shortest.saturating_sub(1))
}
