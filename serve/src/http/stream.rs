//! Answers over HTTP: as server-sent events while they are made, or whole.

use super::Limits;
use super::body::Channel;
use crate::error::ApiError;
use crate::generation::Stream;
use crate::protocol::{Shape, SseEvent};
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use serde_json::Value;
use tokio::sync::mpsc::{Sender, channel};
use tokio::time::timeout;

/// Chunks that wait for a slow reader; the engine goes on meanwhile.
const WAITING: usize = 64;

/// A comment, which clients pass over.
const PING: &[u8] = b": keep-alive\n\n";

/// Events as they come.
pub(super) fn events(mut stream: Stream, mut shape: Box<dyn Shape>, limits: Limits) -> Response {
    let (sender, receiver) = channel(WAITING);
    tokio::spawn(async move {
        let mut events = shape.begin();
        loop {
            if !send(&sender, &events, &limits).await {
                return;
            }
            // Whoever has gone is seen at once, not at the next token.
            let next = tokio::select! {
                () = sender.closed() => return,
                next = timeout(limits.keep_alive, stream.next()) => next,
            };
            events = match next {
                Err(_) => {
                    if !send_bytes(&sender, Bytes::from_static(PING), &limits).await {
                        return;
                    }
                    Vec::new()
                }
                Ok(Some(output)) => match &output.end {
                    Some(Err(e)) => {
                        let events = shape.fail(&e.clone());
                        send(&sender, &events, &limits).await;
                        return;
                    }
                    _ => shape.stream(output, stream.usage()),
                },
                Ok(None) => {
                    let events = shape.end(stream.usage());
                    send(&sender, &events, &limits).await;
                    return;
                }
            };
        }
    });
    let mut response = Response::new(Body::new(Channel(receiver)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that collect answers before they pass them on leave this one alone.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// False if the reader has gone, or is too slow.
async fn send(sender: &Sender<Bytes>, events: &[SseEvent], limits: &Limits) -> bool {
    if events.is_empty() {
        return true;
    }
    let mut text = String::new();
    for event in events {
        if let Some(name) = event.name {
            text += &format!("event: {name}\n");
        }
        text += &format!("data: {}\n\n", event.data);
    }
    send_bytes(sender, text.into(), limits).await
}

async fn send_bytes(sender: &Sender<Bytes>, bytes: Bytes, limits: &Limits) -> bool {
    matches!(timeout(limits.stall, sender.send(bytes)).await, Ok(Ok(())))
}

/// All answers at once.
///
/// # Errors
/// The first answer that failed.
pub(super) async fn whole(
    mut stream: Stream,
    mut shape: Box<dyn Shape>,
) -> Result<Value, ApiError> {
    while let Some(output) = stream.next().await {
        if let Some(Err(e)) = output.end {
            return Err(e);
        }
        shape.collect(output);
    }
    Ok(shape.whole(stream.usage()))
}
