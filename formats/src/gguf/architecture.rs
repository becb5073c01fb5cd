//! What a GGUF file says that it is: its architecture, and what becomes of the last hidden state.

use super::file::GgufFile;
use crate::error::{Error, Result};
use nq_model::Architecture;

/// The architecture of the file's model.
///
/// # Errors
/// [`Error::Unsupported`], naming one that nq does not support.
pub(super) fn architecture(file: &GgufFile) -> Result<&'static Architecture> {
    let name = "general.architecture";
    let architecture = file.required(name, file.str(name)?)?;
    let unsupported = |why| Error::Unsupported {
        path: file.path().into(),
        what: format!("architecture {architecture}"),
        why,
    };
    match nq_model::find(|a| a.gguf, architecture) {
        None => Err(unsupported(nq_model::supported(|a| a.gguf))),
        Some(a) => Ok(a),
    }
}

/// llama.cpp's number of the embedding that is the last token's.
pub(super) const LAST_TOKEN: u64 = 3;

/// What the last layer's rows become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pooling {
    /// Logits of the next token.
    None,
    /// An embedding, of the last token's row.
    Last,
    /// A score: the logits of `yes` and `no` after a prompt.
    Rank,
}

/// The pooling that the file names.
///
/// # Errors
/// [`Error::Unsupported`] for other ways to make an embedding.
pub(super) fn pooling(file: &GgufFile, architecture: &Architecture) -> Result<Pooling> {
    const NONE: u64 = 0;
    const RANK: u64 = 4;
    let key = format!("{}.pooling_type", architecture.gguf);
    match file.u64(&key)? {
        None | Some(NONE) => Ok(Pooling::None),
        Some(RANK) => Ok(Pooling::Rank),
        Some(LAST_TOKEN) => Ok(Pooling::Last),
        Some(other) => Err(Error::Unsupported {
            path: file.path().into(),
            what: format!("{key} {other}"),
            why: "nq makes embeddings of the last token's hidden state".into(),
        }),
    }
}
