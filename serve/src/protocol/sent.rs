//! Content of messages as clients send it: texts, and images whose bytes are there or at an address.

use crate::error::ApiError;
use nq_answers::images::{from_base64, from_data_url};
use nq_runtime::chat_template::image_part;
use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;

/// The key of an image's number among those that were sent, in its part.
pub(crate) const INDEX: &str = "index";

/// Where content stands, which decides what becomes of parts that are no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentPlace {
    /// In what a model was told or has written: they are refused.
    Text,
    /// In a message: images are read; others are refused, because somebody asks about them.
    Message,
    /// In a tool's result: images are read; the model has chosen the tool, and is told that it cannot see others.
    Result,
}

/// An image of a request.
pub(crate) struct SentImage {
    /// Its part of the request.
    pub(crate) place: String,
    /// The type of that part.
    pub(crate) kind: String,
    /// Where its bytes are.
    pub(crate) source: ImageSource,
    /// True if a client asked for few tokens.
    pub(crate) low_detail: bool,
    /// True in a tool's result: the model has chosen the tool, and may be told that it cannot see the image.
    pub(crate) in_result: bool,
}

/// Where the bytes of an image are.
pub(crate) enum ImageSource {
    /// In the request.
    Bytes(Arc<[u8]>),
    /// At an address.
    Url(String),
}

impl fmt::Debug for SentImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SentImage")
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl ImageSource {
    /// The source of a `data:` URL, or of one of http.
    ///
    /// # Errors
    /// Another URL, by `name`: files of the server's machine are nobody's to ask for.
    pub(crate) fn address(url: String, name: &str) -> Result<Self, ApiError> {
        if let Some(bytes) = from_data_url(&url) {
            let bytes = bytes.map_err(|why| ApiError::field(name, why))?;
            return Ok(ImageSource::Bytes(bytes.into()));
        }
        let scheme = url.split_once("://").map(|(scheme, _)| scheme);
        match scheme.map(str::to_ascii_lowercase).as_deref() {
            Some("http" | "https") => Ok(ImageSource::Url(url)),
            _ => {
                let why = "nq reads images from data: URLs, and from http where the server allows their hosts";
                Err(ApiError::unsupported(name, why))
            }
        }
    }

    /// The source of bytes in base64.
    ///
    /// # Errors
    /// Text that is no base64, by `name`.
    pub(crate) fn base64(data: &str, name: &str) -> Result<Self, ApiError> {
        let bytes = from_base64(data).map_err(|why| ApiError::field(name, why))?;
        Ok(ImageSource::Bytes(bytes.into()))
    }
}

/// Content of texts and images: one text if there are no images.
pub(crate) fn joined(parts: Vec<ContentPart>) -> Value {
    if !parts.iter().any(|p| matches!(p, ContentPart::Image(_))) {
        let texts = parts.into_iter().filter_map(|part| match part {
            ContentPart::Text(text) => Some(text),
            ContentPart::Image(_) => None,
        });
        return texts.collect::<Vec<_>>().join("\n").into();
    }
    let mut list: Vec<Value> = Vec::with_capacity(parts.len());
    for part in parts {
        match (part, list.last_mut().and_then(|last| last.get_mut("text"))) {
            (ContentPart::Image(index), _) => {
                let mut part = image_part();
                part[INDEX] = index.into();
                list.push(part);
            }
            (ContentPart::Text(text), Some(Value::String(before))) => {
                before.push('\n');
                before.push_str(&text);
            }
            (ContentPart::Text(text), _) => list.push(json!({"type": "text", "text": text})),
        }
    }
    list.into()
}

/// A part of a message's content.
pub(crate) enum ContentPart {
    /// Text.
    Text(String),
    /// An image, by what `Reading::sent_image` returned.
    Image(usize),
}
