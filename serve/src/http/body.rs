//! Bodies: requests within limits, and answers from a channel.

use super::Limits;
use crate::error::ApiError;
use axum::body::Body;
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Frame;
use hyper::header::{CONTENT_TYPE, HeaderMap};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc::Receiver;

/// Reads a request's whole body.
///
/// # Errors
/// A body whose header does not say JSON, or that is too long or too slow.
pub(super) async fn read(
    headers: &HeaderMap,
    body: Body,
    limits: &Limits,
) -> Result<Bytes, ApiError> {
    let kind = headers
        .get(CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        // Pages of other sites cannot send this type without a preflight request.
        let what = format!("content-type: expected application/json, found {kind:?}");
        return Err(ApiError::bounds(415, what));
    }
    let whole = Limited::new(body, limits.body).collect();
    match tokio::time::timeout(limits.body_time, whole).await {
        Err(_) => Err(ApiError::bounds(408, "the body took too long to come")),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(e)) if e.is::<LengthLimitError>() => Err(ApiError::bounds(
            413,
            format!("the body: expected at most {} bytes", limits.body),
        )),
        Ok(Err(_)) => Err(ApiError::invalid("the body broke off")),
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
