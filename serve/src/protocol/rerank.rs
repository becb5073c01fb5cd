//! `POST /v1/rerank`: how well documents answer a query, in the shape of Jina's and Cohere's.

use super::fields::Fields;
use super::{too_long, unique};
use crate::error::ApiError;
use crate::model::ServedModel;
use nq_runtime::embedding::DEFAULT_TASK;
use nq_runtime::rerank::Reranker;
use serde::Deserialize;
use serde_json::{Value, json};

/// Documents of one request, at most.
const MOST_DOCUMENTS: usize = 1000;

/// A document as text, or as an object that has it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Document {
    Text(String),
    Object {
        /// The text.
        text: String,
    },
}

/// A request that has been read.
pub(crate) struct Rerank {
    /// Token ids of each prompt.
    pub prompts: Vec<Vec<u32>>,
    documents: Option<Vec<String>>,
    top: usize,
}

/// The prompts of a model that reranks.
///
/// # Errors
/// For one that does not.
pub(crate) fn reranker(model: &ServedModel) -> Result<&Reranker, ApiError> {
    model.reranker().ok_or_else(|| ApiError {
        code: Some("no_reranker"),
        ..ApiError::invalid(format!(
            "{} scores no documents: what does is a reranker",
            model.name()
        ))
    })
}

/// Reads a request.
///
/// # Errors
/// A model that is no reranker; a field that is wrong or not served, by name.
pub(crate) fn parse(model: &ServedModel, fields: Fields) -> Result<Rerank, ApiError> {
    let reranker = reranker(model)?;
    let mut fields = fields.under("rerank")?;
    let query: String = fields.require("query")?;
    let instruction: Option<String> = fields.take("instruction")?;
    let instruction = instruction.as_deref().unwrap_or(DEFAULT_TASK);
    let documents: Vec<Document> = fields.require("documents")?;
    let top = fields.count("top_n", 1, usize::MAX)?.unwrap_or(usize::MAX);
    let shows: bool = fields.take("return_documents")?.unwrap_or(false);
    fields.finish()?;
    if !(1..=MOST_DOCUMENTS).contains(&documents.len()) {
        let what = format!("expected 1 to {MOST_DOCUMENTS}, found {}", documents.len());
        return Err(ApiError::field("documents", what));
    }
    let text = |d| match d {
        Document::Text(text) | Document::Object { text } => text,
    };
    let documents: Vec<String> = documents.into_iter().map(text).collect();
    let mut prompts = Vec::with_capacity(documents.len());
    for (i, document) in documents.iter().enumerate() {
        let bytes = query.len() + instruction.len() + document.len();
        (model.tokenizer()).check_bytes(bytes, model.counted())?;
        let prompt = reranker.encode(model.tokenizer(), instruction, &query, document)?;
        too_long(model, "documents", i, &prompt)?;
        prompts.push(prompt);
    }
    Ok(Rerank {
        prompts,
        documents: shows.then_some(documents),
        top,
    })
}

/// The answer, the best document first.
pub(crate) fn answer(
    model: &ServedModel,
    asked: &Rerank,
    rows: &[Vec<f32>],
    tokens: usize,
) -> Result<String, ApiError> {
    let reranker = reranker(model)?;
    let scores = rows.iter().map(|row| reranker.score(row)).enumerate();
    let mut scores: Vec<(usize, f32)> = scores.collect();
    scores.sort_by(|a, b| b.1.total_cmp(&a.1)); // of equals, the earlier first
    scores.truncate(asked.top);
    let result = |(index, score): (usize, f32)| {
        let mut result = json!({"index": index, "relevance_score": score});
        if let Some(documents) = &asked.documents {
            result["document"] = json!({"text": documents[index]});
        }
        result
    };
    let results: Vec<Value> = scores.into_iter().map(result).collect();
    let answer = json!({
        "id": unique("rerank-"),
        "object": "list",
        "model": model.name(),
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    Ok(answer.to_string())
}
