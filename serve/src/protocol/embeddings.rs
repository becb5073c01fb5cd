//! Vectors of texts: `POST /v1/embeddings` in OpenAI's shape, `/api/embed` in Ollama's.

use super::fields::Fields;
use super::ollama::nanoseconds;
use super::too_long;
use crate::error::ApiError;
use crate::model::ServedModel;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nq_runtime::embedding::{EmbeddingTexts, Purpose, unit};
use serde::Deserialize;
use serde_json::{json, to_string};
use std::sync::Arc;
use std::time::Instant;

/// Texts of one request, at most, as OpenAI has it.
const MOST_TEXTS: usize = 2048;

/// Texts or tokens, alone or in a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum EmbeddingInput {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

/// A request that has been read.
pub(crate) struct Embeddings {
    /// Token ids of each text.
    pub texts: Vec<Vec<u32>>,
    dimensions: usize,
    written: AnswerForm,
    begun: Instant,
}

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnswerForm {
    /// OpenAI's.
    Numbers,
    /// OpenAI's, with the numbers' bytes as text.
    Base64,
    Ollama,
}

/// Reads a request of OpenAI's protocol. Texts get the tokens that the model's tokenizer adds around them; token ids are used as
/// they are.
///
/// # Errors
/// If the model makes no embeddings, or a field is invalid or not supported.
pub(crate) fn parse(model: &Arc<ServedModel>, fields: Fields) -> Result<Embeddings, ApiError> {
    let mut fields = fields.under("embeddings")?;
    let format: Option<String> = fields.take("encoding_format")?;
    let written = match format.as_deref() {
        None | Some("float") => AnswerForm::Numbers,
        Some("base64") => AnswerForm::Base64,
        Some(other) => {
            let what = format!("expected float or base64, found {other:?}");
            return Err(ApiError::field("encoding_format", what));
        }
    };
    read(model, fields, written)
}

/// Reads a request of Ollama's protocol, as [`parse`] does.
///
/// # Errors
/// Those of [`parse`].
pub(crate) fn parse_ollamas(
    model: &Arc<ServedModel>,
    fields: Fields,
) -> Result<Embeddings, ApiError> {
    read(model, fields.under("ollama.embed")?, AnswerForm::Ollama)
}

/// Checks that the model makes embeddings.
fn check(model: &ServedModel) -> Result<&EmbeddingTexts, ApiError> {
    model.embedding().ok_or_else(|| ApiError {
        code: Some("no_embeddings"),
        ..ApiError::invalid(format!(
            "{} makes no embeddings: what does is an embedding model",
            model.name()
        ))
    })
}

/// Reads what both protocols have.
fn read(
    model: &ServedModel,
    mut fields: Fields,
    written: AnswerForm,
) -> Result<Embeddings, ApiError> {
    let texts = check(model)?;
    let width = model.width();
    let dimensions = fields.count("dimensions", 1, width)?.unwrap_or(width);
    let encode = |text: &String| {
        model.tokenizer().check_bytes(text.len(), model.counted())?;
        texts.encode(model.tokenizer(), text, &Purpose::Plain)
    };
    let input = fields.require("input")?;
    fields.finish()?;
    let count = match &input {
        EmbeddingInput::Text(_) | EmbeddingInput::Tokens(_) => 1,
        EmbeddingInput::Texts(texts) => texts.len(),
        EmbeddingInput::TokenLists(lists) => lists.len(),
    };
    if !(1..=MOST_TEXTS).contains(&count) {
        let what = format!("expected 1 to {MOST_TEXTS} texts, found {count}");
        return Err(ApiError::field("input", what));
    }
    let encoded = match input {
        EmbeddingInput::Text(text) => vec![encode(&text)?],
        EmbeddingInput::Texts(texts) => {
            let texts = texts.iter().map(encode);
            texts.collect::<nq_runtime::Result<_>>()?
        }
        EmbeddingInput::Tokens(tokens) => vec![tokens],
        EmbeddingInput::TokenLists(lists) => lists,
    };
    for (i, tokens) in encoded.iter().enumerate() {
        too_long(model, "input", i, tokens)?;
    }
    Ok(Embeddings {
        texts: encoded,
        dimensions,
        written,
        begun: Instant::now(),
    })
}

/// The answer, as text: numbers by the million are not put into a tree first.
///
/// # Errors
/// A row that is no vector.
pub(crate) fn answer(
    model: &ServedModel,
    asked: &Embeddings,
    rows: &[Vec<f32>],
    tokens: usize,
) -> Result<String, ApiError> {
    let vector = |row: &Vec<f32>| -> Result<String, ApiError> {
        let wrong = |e: String| ApiError::internal(e);
        let vector = unit(row, asked.dimensions).map_err(|e| wrong(e.to_string()))?;
        let written = match asked.written {
            AnswerForm::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                to_string(&STANDARD.encode(bytes))
            }
            AnswerForm::Numbers | AnswerForm::Ollama => to_string(&vector),
        };
        written.map_err(|e| wrong(e.to_string()))
    };
    let vectors: Vec<String> = rows.iter().map(vector).collect::<Result<_, _>>()?;
    let name = json!(model.name());
    if asked.written == AnswerForm::Ollama {
        let (vectors, took) = (vectors.join(","), nanoseconds(asked.begun.elapsed()));
        return Ok(format!(
            r#"{{"model":{name},"embeddings":[{vectors}],"total_duration":{took},"load_duration":0,"prompt_eval_count":{tokens}}}"#
        ));
    }
    let entry = |(index, vector): (usize, String)| {
        format!(r#"{{"object":"embedding","index":{index},"embedding":{vector}}}"#)
    };
    let data: Vec<String> = vectors.into_iter().enumerate().map(entry).collect();
    let (data, usage) = (
        data.join(","),
        json!({"prompt_tokens": tokens, "total_tokens": tokens}),
    );
    Ok(format!(
        r#"{{"object":"list","data":[{data}],"model":{name},"usage":{usage}}}"#
    ))
}
