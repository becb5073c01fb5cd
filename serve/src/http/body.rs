//! Bodies: requests within limits, and answers from a channel.

use super::connections::Working;
use super::limits::HttpLimits;
use super::room::{RoomPlace, SMALL};
use crate::error::ApiError;
use crate::protocol::reading::plain;
use axum::body::Body;
use bytes::Bytes;
use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use ruzstd::decoding::StreamingDecoder;
use std::convert::Infallible;
use std::io::{self, Read};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

/// Reads a request's whole body. A large one, and one that is encoded, waits for room in its `place`.
///
/// # Errors
/// A body whose header does not say JSON, or that is too long or too slow; no room for it.
pub(super) async fn read(
    headers: &HeaderMap,
    body: Body,
    limits: &HttpLimits,
    place: &RoomPlace,
) -> Result<Bytes, ApiError> {
    let kind = headers
        .get(CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        // Pages of other sites cannot send this type without a preflight request.
        let what = format!(
            "content-type: expected application/json, found {:?}",
            plain(kind)
        );
        return Err(ApiError::bounds(415, what));
    }
    let encoding = Encoding::of(headers)?;
    let whole = receive(body, encoding != Encoding::Identity, limits, place);
    let slow = |_| ApiError::bounds(408, "the body took too long to come");
    let body = timeout(limits.body_time, whole).await.map_err(slow)??;
    if encoding == Encoding::Identity {
        return Ok(body);
    }
    let most = limits.body;
    place.work(move || encoding.decode(&body, most)).await
}

/// The bytes of a body as they come.
async fn receive(
    mut body: Body,
    encoded: bool,
    limits: &HttpLimits,
    place: &RoomPlace,
) -> Result<Bytes, ApiError> {
    let announced = hyper::body::Body::size_hint(&body).exact();
    if announced.is_some_and(|bytes| bytes > limits.body as u64) {
        return Err(too_long(limits.body));
    }
    // What it may become counts, not what it is.
    let most = announced
        .filter(|_| !encoded)
        .map_or(limits.body, |bytes| bytes as usize);
    let mut room = if encoded { 0 } else { SMALL };
    let mut whole = Vec::new();
    loop {
        let next = timeout(limits.body_pause, body.frame()).await;
        let frame = match next {
            Err(_) => return Err(ApiError::bounds(408, "the body stopped coming")),
            Ok(None) => return Ok(whole.into()),
            Ok(Some(Err(_))) => return Err(ApiError::invalid("the body broke off")),
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(piece) = frame.into_data() else {
            continue; // trailers
        };
        if whole.len() + piece.len() > limits.body {
            return Err(too_long(limits.body));
        }
        if whole.len() + piece.len() > room {
            place.hold(most, limits.body_time).await?;
            room = usize::MAX;
        }
        whole.extend_from_slice(&piece);
    }
}

fn too_long(most: usize) -> ApiError {
    let what = format!("the body: expected at most {most} bytes");
    ApiError::bounds(413, what)
}

/// How a body is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Identity,
    Gzip,
    Deflate,
    Zstd,
}

/// Most bytes that a zstd decoder looks back, as RFC 8878 recommends.
const MOST_WINDOW: u64 = 8 << 20;

impl Encoding {
    fn of(headers: &HeaderMap) -> Result<Self, ApiError> {
        let mut given = headers.get_all(CONTENT_ENCODING).iter();
        let name = match (given.next(), given.next()) {
            (None, _) => return Ok(Encoding::Identity),
            (Some(one), None) => one.to_str().unwrap_or("?"),
            _ => "several",
        };
        match name.trim().to_ascii_lowercase().as_str() {
            "" | "identity" => Ok(Encoding::Identity),
            "gzip" | "x-gzip" => Ok(Encoding::Gzip),
            "deflate" => Ok(Encoding::Deflate),
            "zstd" => Ok(Encoding::Zstd),
            _ => {
                let what = format!(
                    "content-encoding: expected gzip, deflate, zstd or identity, found {name:?}"
                );
                Err(ApiError::bounds(415, what))
            }
        }
    }

    /// Decodes a body that has at most `most` bytes then.
    fn decode(self, body: &[u8], most: usize) -> Result<Bytes, ApiError> {
        let room = most as u64 + 1;
        let mut out = Vec::new();
        let read = match self {
            Encoding::Identity => body.take(room).read_to_end(&mut out),
            Encoding::Gzip => MultiGzDecoder::new(body).take(room).read_to_end(&mut out),
            // Some clients leave out the header around the deflated data.
            Encoding::Deflate => match ZlibDecoder::new(body).take(room).read_to_end(&mut out) {
                Err(_) if out.is_empty() => {
                    DeflateDecoder::new(body).take(room).read_to_end(&mut out)
                }
                read => read,
            },
            Encoding::Zstd => StreamingDecoder::new_with_max_window_size(body, MOST_WINDOW)
                .map_err(|e| io::Error::other(e.to_string()))
                .and_then(|decoder| decoder.take(room).read_to_end(&mut out)),
        };
        match read {
            Ok(_) if out.len() > most => Err(too_long(most)),
            Ok(_) => Ok(out.into()),
            Err(e) => {
                let what = format!("the body cannot be decoded as content-encoding says: {e}");
                Err(ApiError::invalid(what))
            }
        }
    }
}

/// An answer's body, with which its connection's work ends.
pub(super) struct Ending(pub(super) Body, pub(super) Working);

impl Drop for Ending {
    fn drop(&mut self) {
        self.1.set(false);
    }
}

impl hyper::body::Body for Ending {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.0).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

/// A body whose pieces come through a channel until it is closed.
pub(super) struct Channel(pub(super) Receiver<Bytes>);

impl hyper::body::Body for Channel {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0
            .poll_recv(context)
            .map(|next| next.map(|bytes| Ok(Frame::data(bytes))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    use std::io::Write;

    /// A body in every encoding.
    fn encoded(body: &[u8]) -> Vec<(Encoding, Vec<u8>)> {
        let level = Compression::fast();
        let (mut gzip, mut zlib, mut raw) = (
            GzEncoder::new(Vec::new(), level),
            ZlibEncoder::new(Vec::new(), level),
            DeflateEncoder::new(Vec::new(), level),
        );
        for encoder in [&mut gzip as &mut dyn Write, &mut zlib, &mut raw] {
            encoder.write_all(body).unwrap();
        }
        vec![
            (Encoding::Identity, body.to_vec()),
            (Encoding::Gzip, gzip.finish().unwrap()),
            (Encoding::Deflate, zlib.finish().unwrap()),
            (Encoding::Deflate, raw.finish().unwrap()),
            (
                Encoding::Zstd,
                compress_to_vec(body, CompressionLevel::Fastest),
            ),
        ]
    }

    #[test]
    fn a_body_is_bounded_after_it_is_decoded() {
        let body = vec![b' '; 100_000];
        for (encoding, bytes) in encoded(&body) {
            assert_eq!(
                encoding.decode(&bytes, body.len()).unwrap(),
                body,
                "{encoding:?}"
            );
            let short = encoding.decode(&bytes, body.len() - 1).unwrap_err();
            assert_eq!(short.status, 413, "{encoding:?}");
        }
        for (encoding, bytes) in encoded(&body).into_iter().skip(1) {
            let cut = encoding.decode(&bytes[..bytes.len() / 2], body.len());
            assert_eq!(cut.unwrap_err().status, 400, "{encoding:?}");
        }
    }

    /// A frame that says it needs 1 GB to look back is refused before anything is allocated.
    #[test]
    fn windows_are_bounded() {
        let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa0, 0x01, 0x00, 0x00];
        assert_eq!(Encoding::Zstd.decode(&frame, 100).unwrap_err().status, 400);
    }
}
