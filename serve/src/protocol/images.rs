//! Parts and blocks that are images, in the words of all protocols.

use super::fields::Fields;
use super::reading::Reading;
use super::sent::{ContentPart, ContentPlace, ImageSource, SentImage, joined};
use crate::error::ApiError;
use serde_json::Value;
use std::sync::Arc;

/// Types of parts that are images: OpenAI's in chats and in responses, Anthropic's.
const KINDS: [&str; 3] = ["image_url", "input_image", "image"];

/// True for a part that is an image.
pub(super) fn is_image(part: &Value) -> bool {
    part["type"]
        .as_str()
        .is_some_and(|kind| KINDS.contains(&kind))
}

/// Reads a part that is an image.
///
/// # Errors
/// An image without bytes and address, or where none is read; errors of [`ImageSource::address`].
pub(super) fn part(
    part: Value,
    place: &str,
    at: ContentPlace,
    reading: &Arc<Reading>,
) -> Result<ContentPart, ApiError> {
    let mut part = Fields::of(part, place, "part.image", reading)?;
    let kind: String = part.require("type")?;
    if at == ContentPlace::Text {
        let why =
            format!("nq reads images in messages of users and results of tools, found {kind:?}");
        return Err(ApiError::unsupported(&part.name("type"), &why));
    }
    let mut detail: Option<String> = part.take("detail")?;
    let address = if part.peek("image_url").is_string() {
        let url: String = part.require("image_url")?;
        Some(ImageSource::address(url, &part.name("image_url"))?)
    } else if let Some(mut url) = part.object("image_url", "image_url")? {
        detail = url.take("detail")?.or(detail);
        let (name, address) = (url.name("url"), url.require("url")?);
        url.finish()?;
        Some(ImageSource::address(address, &name)?)
    } else {
        None
    };
    let source = part.object("source", "image.source")?.map(given);
    let source = match (address, source.transpose()?) {
        (Some(source), None) | (None, Some(source)) => source,
        (Some(_), Some(_)) => {
            let why = "expected image_url or source, found both";
            return Err(ApiError::field(&part.name("source"), why));
        }
        (None, None) => {
            let name = match kind.as_str() {
                "image" => "source",
                _ => "image_url",
            };
            let why = "expected a value, found none";
            return Err(ApiError::field(&part.name(name), why));
        }
    };
    part.finish()?;
    Ok(ContentPart::Image(reading.sent_image(SentImage {
        place: place.to_owned(),
        kind,
        source,
        low_detail: detail.as_deref() == Some("low"),
        in_result: at == ContentPlace::Result,
    })))
}

/// Anthropic's sources.
fn given(mut source: Fields) -> Result<ImageSource, ApiError> {
    let kind: String = source.require("type")?;
    let (data, url): (Option<String>, Option<String>) = (source.take("data")?, source.take("url")?);
    let (data_name, url_name, type_name) =
        (source.name("data"), source.name("url"), source.name("type"));
    source.finish()?;
    match (kind.as_str(), data, url) {
        ("base64", Some(data), _) => ImageSource::base64(&data, &data_name),
        ("base64", None, _) => Err(ApiError::field(&data_name, "expected a value, found none")),
        ("url", _, Some(url)) => ImageSource::address(url, &url_name),
        ("url", _, None) => Err(ApiError::field(&url_name, "expected a value, found none")),
        (other, ..) => {
            let why = format!("nq serves base64 and url, found {other:?}");
            Err(ApiError::unsupported(&type_name, &why))
        }
    }
}

/// Content of images in base64, which stand beside a message's text, and of that text.
///
/// # Errors
/// Text that is no base64.
pub(super) fn beside(
    images: Vec<String>,
    name: &str,
    text: String,
    at: ContentPlace,
    reading: &Reading,
) -> Result<Value, ApiError> {
    let mut parts = Vec::with_capacity(images.len() + 1);
    for (i, data) in images.into_iter().enumerate() {
        let place = format!("{name}[{i}]");
        let source = match data.starts_with("data:") {
            true => ImageSource::address(data, &place)?,
            false => ImageSource::base64(&data, &place)?,
        };
        parts.push(ContentPart::Image(reading.sent_image(SentImage {
            place,
            kind: "image".into(),
            source,
            low_detail: false,
            in_result: at == ContentPlace::Result,
        })));
    }
    parts.push(ContentPart::Text(text));
    Ok(joined(parts))
}
