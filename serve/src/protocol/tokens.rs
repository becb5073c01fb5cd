//! `POST /tokenize` and `POST /detokenize`, with the fields of vLLM and llama-server.

use super::fields::Fields;
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::names::Names;
use serde_json::{Value, json};
use std::sync::Arc;

const NAMES: Names = Names {
    prompt: "prompt",
    format: "response_format",
};

/// The tokens of a text, which is bounded as prompts are; special tokens written in it are encoded as such.
///
/// # Errors
/// An invalid field.
pub(crate) fn tokenize(model: &Arc<ServedModel>, fields: Fields) -> Result<Value, ApiError> {
    let mut fields = fields.under("tokenize")?;
    let prompt: Option<String> = fields.take("prompt")?;
    let content: Option<String> = fields.take("content")?;
    let with_pieces: bool = fields.take("return_token_strs")?.unwrap_or(false);
    // As vLLM does by `prompt`, and llama-server by `content`.
    let added: Option<bool> = fields.take("add_special_tokens")?;
    let also: Option<bool> = fields.take("add_special")?;
    let added = added.or(also).unwrap_or(prompt.is_some());
    fields.finish()?;
    let Some(text) = prompt.or(content) else {
        return Err(ApiError::field("prompt", "expected a text, found none"));
    };
    let (tokenizer, most) = (model.tokenizer(), model.counted());
    let tokens = match added {
        true => tokenizer.encode_whole_within(&text, most),
        false => tokenizer.encode_within(&text, most),
    };
    let tokens = tokens.map_err(|e| NAMES.read(e, model.context()))?;
    let mut found = json!({"count": tokens.len(), "max_model_len": model.context()});
    if with_pieces {
        let bytes = model.tokenizer().token_bytes();
        let text = |id: &u32| String::from_utf8_lossy(bytes.get(*id)).into_owned();
        found["token_strs"] = tokens.iter().map(text).collect();
    }
    found["tokens"] = tokens.into();
    Ok(found)
}

/// The text of tokens, including special ones.
///
/// # Errors
/// An invalid field.
pub(crate) fn detokenize(model: &Arc<ServedModel>, fields: Fields) -> Result<Value, ApiError> {
    let mut fields = fields.under("detokenize")?;
    let tokens: Vec<u32> = fields.require("tokens")?;
    fields.finish()?;
    let most = model.counted();
    if tokens.len() > most {
        let found = tokens.len();
        let what = format!("expected at most {most} tokens, found {found}");
        return Err(ApiError::field("tokens", what));
    }
    let text = model.tokenizer().decode(&tokens, false);
    Ok(json!({"prompt": text, "content": text}))
}
