//! `POST /v1/embeddings`: vectors of texts, in OpenAI's shape.

use super::fields::Fields;
use super::too_long;
use crate::error::ApiError;
use crate::model::ServedModel;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nq_runtime::embedding::{Purpose, unit};
use serde::Deserialize;
use serde_json::{json, to_string};

/// Texts of one request, at most, as OpenAI has it.
const MOST_TEXTS: usize = 2048;

/// Texts or tokens, alone or in a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

/// A request that has been read.
pub struct Embeddings {
    /// Token ids of each text.
    pub texts: Vec<Vec<u32>>,
    dimensions: usize,
    base64: bool,
}

/// Reads a request. Texts get the tokens that the model's tokenizer adds around them; token ids are used as
/// they are.
///
/// # Errors
/// If the model makes no embeddings, or a field is invalid or not supported.
pub fn parse(model: &ServedModel, fields: Fields) -> Result<Embeddings, ApiError> {
    let Some(texts) = model.embedding() else {
        return Err(ApiError {
            code: Some("no_embeddings"),
            ..ApiError::invalid(format!(
                "{} makes no embeddings: what does is an embedding model",
                model.name()
            ))
        });
    };
    let mut fields = fields.under("embeddings")?;
    let format: Option<String> = fields.take("encoding_format")?;
    let base64 = match format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let what = format!("expected float or base64, found {other:?}");
            return Err(ApiError::field("encoding_format", what));
        }
    };
    let width = model.width();
    let dimensions = fields.count("dimensions", 1, width)?.unwrap_or(width);
    let encode = |text: &String| {
        model.tokenizer().check_bytes(text.len(), model.counted())?;
        texts.encode(model.tokenizer(), text, &Purpose::Plain)
    };
    let input = fields.require("input")?;
    fields.finish()?;
    let count = match &input {
        Input::Text(_) | Input::Tokens(_) => 1,
        Input::Texts(texts) => texts.len(),
        Input::TokenLists(lists) => lists.len(),
    };
    if !(1..=MOST_TEXTS).contains(&count) {
        let what = format!("expected 1 to {MOST_TEXTS} texts, found {count}");
        return Err(ApiError::field("input", what));
    }
    let encoded = match input {
        Input::Text(text) => vec![encode(&text)?],
        Input::Texts(texts) => {
            let texts = texts.iter().map(encode);
            texts.collect::<nq_runtime::Result<_>>()?
        }
        Input::Tokens(tokens) => vec![tokens],
        Input::TokenLists(lists) => lists,
    };
    for (i, tokens) in encoded.iter().enumerate() {
        too_long(model, "input", i, tokens)?;
    }
    Ok(Embeddings {
        texts: encoded,
        dimensions,
        base64,
    })
}

/// The answer, as text: numbers by the million are not put into a tree first.
///
/// # Errors
/// A row that is no vector.
pub fn answer(
    model: &ServedModel,
    asked: &Embeddings,
    rows: &[Vec<f32>],
    tokens: usize,
) -> Result<String, ApiError> {
    let mut data = String::new();
    for (index, row) in rows.iter().enumerate() {
        let vector = unit(row, asked.dimensions).map_err(|e| ApiError::internal(e.to_string()))?;
        let embedding = if asked.base64 {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            to_string(&STANDARD.encode(bytes))
        } else {
            to_string(&vector)
        };
        let embedding = embedding.map_err(|e| ApiError::internal(e.to_string()))?;
        let comma = if index > 0 { "," } else { "" };
        data +=
            &format!(r#"{comma}{{"object":"embedding","index":{index},"embedding":{embedding}}}"#);
    }
    let (name, usage) = (
        json!(model.name()),
        json!({"prompt_tokens": tokens, "total_tokens": tokens}),
    );
    Ok(format!(
        r#"{{"object":"list","data":[{data}],"model":{name},"usage":{usage}}}"#
    ))
}
