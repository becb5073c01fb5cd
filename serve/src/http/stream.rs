//! Answers over HTTP: as server-sent events while they are generated, or whole.

use super::body::Channel;
use super::limits::HttpLimits;
use crate::error::ApiError;
use crate::generation::AnswerStream;
use crate::protocol::{Framing, Parsed, Shape, SseEvent};
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use nq_runtime::chat_template::integers::unmarked;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::watch;
use tokio::time::timeout;

/// Chunks buffered for a slow reader while the engine continues.
const WAITING: usize = 64;

/// How often something is sent to a client that has closed its sending side, to learn whether it is there.
const PROBE: Duration = Duration::from_millis(250);

/// Becomes true when a client has closed its sending side.
pub(super) type Silence = watch::Receiver<bool>;

/// Waits until a client has closed its sending side.
async fn silent(silence: &mut Silence) {
    if silence.wait_for(|s| *s).await.is_err() {
        // Nobody can say so any more.
        std::future::pending::<()>().await;
    }
}

/// Waits until it is time to learn by signs of life whether a client is there that has closed its sending side: it gets
/// what is known soon without them.
pub(super) async fn perhaps_gone(mut silence: Silence) {
    silent(&mut silence).await;
    tokio::time::sleep(PROBE).await;
}

/// Sends events as they come. A panic while making them ends the stream with an error.
pub(super) fn events(
    stream: AnswerStream,
    shape: Box<dyn Shape>,
    limits: HttpLimits,
    silence: Silence,
) -> Response {
    let (sender, receiver) = channel(WAITING);
    let framing = shape.framing();
    tokio::spawn(async move { tell_all(stream, shape, &sender, &limits, silence).await });
    event_stream(receiver, framing)
}

/// Like [`events`], of an answer that has not begun: signs of life are sent until it does. `wrong` says why it does
/// not.
pub(super) fn events_of(
    begun: impl Future<Output = Result<(AnswerStream, Parsed), ApiError>> + Send + 'static,
    framing: Framing,
    wrong: impl FnOnce(&ApiError) -> SseEvent + Send + 'static,
    limits: HttpLimits,
    mut silence: Silence,
) -> Response {
    let (sender, receiver) = channel(WAITING);
    tokio::spawn(async move {
        match alive(begun, framing.ping(), &sender, &limits, &mut silence).await {
            None => {}
            Some(Ok((stream, parsed))) => {
                tell_all(stream, parsed.shape, &sender, &limits, silence).await;
            }
            Some(Err(e)) => {
                send(&sender, framing, &[wrong(&e)], &limits).await;
            }
        }
    });
    event_stream(receiver, framing)
}

/// Waits for a future, and sends a sign of life at intervals; `None` if its client is gone.
async fn alive<F: Future>(
    future: F,
    sign: &'static [u8],
    sender: &Sender<Bytes>,
    limits: &HttpLimits,
    silence: &mut Silence,
) -> Option<F::Output> {
    let mut future = std::pin::pin!(future);
    let mut beat = limits.keep_alive;
    loop {
        if !send_bytes(sender, Bytes::from_static(sign), limits).await {
            return None;
        }
        tokio::select! {
            () = sender.closed() => return None,
            () = silent(silence), if beat > PROBE => beat = PROBE,
            done = timeout(beat, future.as_mut()) => if let Ok(done) = done {
                return Some(done);
            },
        }
    }
}

/// Sends the events of an answer; a panic while making them ends it with an error.
async fn tell_all(
    stream: AnswerStream,
    mut shape: Box<dyn Shape>,
    sender: &Sender<Bytes>,
    limits: &HttpLimits,
    silence: Silence,
) {
    let framing = shape.framing();
    let told = guarded(tell(stream, shape.as_mut(), sender, limits, silence));
    if told.await.is_err() {
        let failed = catch_unwind(AssertUnwindSafe(|| shape.fail(&panicked())));
        send(sender, framing, &failed.unwrap_or_default(), limits).await;
    }
}

fn event_stream(receiver: Receiver<Bytes>, framing: Framing) -> Response {
    let mut response = Response::new(Body::new(Channel(receiver)));
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static(framing.content_type());
    headers.insert(CONTENT_TYPE, kind);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Tells proxies not to buffer the answer.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Sends all events of a stream, until it ends or its reader is gone.
async fn tell(
    mut stream: AnswerStream,
    shape: &mut dyn Shape,
    sender: &Sender<Bytes>,
    limits: &HttpLimits,
    mut silence: Silence,
) {
    let (mut beat, framing) = (limits.keep_alive, shape.framing());
    let mut events = shape.begin(stream.usage());
    while send(sender, framing, &events, limits).await {
        // A reader that is gone is noticed at once, not at the next token.
        let next = tokio::select! {
            () = sender.closed() => return,
            () = silent(&mut silence), if beat > PROBE => {
                (beat, events) = (PROBE, Vec::new());
                continue;
            }
            next = timeout(beat, stream.next()) => next,
        };
        let (more, over) = match next {
            Err(_) => {
                if send_bytes(sender, Bytes::from_static(framing.ping()), limits).await {
                    (Vec::new(), false)
                } else {
                    return;
                }
            }
            Ok(None) => (shape.end(stream.usage()), true),
            Ok(Some(output)) => match output.end.clone() {
                Some(Err(e)) => (shape.fail(&e), true),
                _ => (shape.stream(output, stream.usage()), false),
            },
        };
        events = more;
        if over {
            send(sender, framing, &events, limits).await;
            return;
        }
    }
}

fn panicked() -> ApiError {
    ApiError::internal("the answer could not be told: a panic")
}

/// The output of a future, or an error if one of its steps panics.
async fn guarded<F: Future>(future: F) -> std::thread::Result<F::Output> {
    let mut future = std::pin::pin!(future);
    let step = |context: &mut Context<'_>| {
        let step = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context)));
        match step {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    };
    std::future::poll_fn(step).await
}

/// False if the reader is gone or too slow.
async fn send(
    sender: &Sender<Bytes>,
    framing: Framing,
    events: &[SseEvent],
    limits: &HttpLimits,
) -> bool {
    if events.is_empty() {
        return true;
    }
    let mut text = String::new();
    for event in events {
        framing.write(event, &mut text);
    }
    send_bytes(sender, text.into(), limits).await
}

async fn send_bytes(sender: &Sender<Bytes>, bytes: Bytes, limits: &HttpLimits) -> bool {
    matches!(timeout(limits.stall, sender.send(bytes)).await, Ok(Ok(())))
}

/// All answers at once, as JSON text.
///
/// # Errors
/// The first answer's error, or a panic.
pub(super) async fn whole(
    mut stream: AnswerStream,
    mut shape: Box<dyn Shape>,
) -> Result<String, ApiError> {
    let told = guarded(async {
        while let Some(output) = stream.next().await {
            if let Some(Err(e)) = output.end {
                return Err(e);
            }
            shape.collect(output);
        }
        Ok(unmarked(shape.whole(stream.usage()).to_string()))
    });
    told.await.unwrap_or_else(|_| Err(panicked()))
}

/// Waits for an answer, and drops it if its client goes. One that has closed its sending side is sent white
/// space, which JSON may begin with, until the answer comes or the client turns out to be gone; an error then
/// comes with the status of an answer.
///
/// # Errors
/// Those of the answer.
pub(super) async fn patient(
    answer: impl Future<Output = Result<String, ApiError>> + Send + 'static,
    mut silence: Silence,
    limits: HttpLimits,
) -> Result<Body, ApiError> {
    let mut answer = Box::pin(answer);
    tokio::select! {
        biased;
        done = answer.as_mut() => return done.map(Body::from),
        () = silent(&mut silence) => {}
    }
    let wrong = |e: &ApiError| e.body().to_string();
    Ok(slow(answer, wrong, silence, limits))
}

/// An answer that is waited for, with white space before it as a sign of life; `wrong` says why there is none.
pub(super) fn slow(
    answer: impl Future<Output = Result<String, ApiError>> + Send + 'static,
    wrong: impl FnOnce(&ApiError) -> String + Send + 'static,
    mut silence: Silence,
    limits: HttpLimits,
) -> Body {
    let (sender, receiver) = channel(WAITING);
    tokio::spawn(async move {
        if let Some(done) = alive(answer, b" ", &sender, &limits, &mut silence).await {
            let text = done.unwrap_or_else(|e| wrong(&e));
            send_bytes(&sender, text.into(), &limits).await;
        }
    });
    Body::new(Channel(receiver))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Client, EngineOptions};
    use crate::generation::{Output, Usage, start};
    use crate::model::ServedModel;
    use crate::protocol::chat;
    use crate::protocol::fields::Fields;
    use http_body_util::BodyExt;
    use nq_formats::Checkpoint;
    use nq_runtime::{DeviceChoice, LoadOptions, SessionSpec};
    use serde_json::Value;
    use std::sync::Arc;

    /// A client that has not closed its sending side.
    fn hearing() -> Silence {
        watch::channel(false).1
    }

    /// A protocol with a fault: it panics at the second piece.
    struct Faulty(Box<dyn Shape>, usize);

    impl Faulty {
        fn step(&mut self) {
            self.1 += 1;
            assert!(self.1 < 2, "a panic as asked");
        }
    }

    impl Shape for Faulty {
        fn begin(&mut self, usage: Usage) -> Vec<SseEvent> {
            self.0.begin(usage)
        }
        fn stream(&mut self, output: Output, usage: Usage) -> Vec<SseEvent> {
            self.step();
            self.0.stream(output, usage)
        }
        fn end(&mut self, usage: Usage) -> Vec<SseEvent> {
            self.0.end(usage)
        }
        fn fail(&mut self, error: &ApiError) -> Vec<SseEvent> {
            self.0.fail(error)
        }
        fn collect(&mut self, output: Output) {
            self.step();
            self.0.collect(output);
        }
        fn whole(&mut self, usage: Usage) -> Value {
            self.0.whole(usage)
        }
    }

    fn model() -> Arc<ServedModel> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/demo");
        let checkpoint = Checkpoint::open(folder.as_ref()).unwrap();
        let options = LoadOptions {
            device: DeviceChoice::Cpu,
            ..LoadOptions::default()
        };
        let engine = nq_load::load(checkpoint.config(), checkpoint.store(), &options, &());
        let spec = SessionSpec {
            slots: 4,
            ctx: 256,
            max_rows: 64,
            ..SessionSpec::default()
        };
        let options = EngineOptions {
            parallel: 2,
            ..EngineOptions::default()
        };
        Arc::new(ServedModel::new("demo", &checkpoint, engine.unwrap(), spec, options).unwrap())
    }

    #[test]
    fn a_panic_in_a_protocol_ends_its_request_alone() {
        let model = model();
        let body = br#"{"messages":[{"role":"user","content":"Hello!"}],"max_tokens":20,
                        "temperature":0,"ignore_eos":true}"#;
        let begin = || {
            let parsed = chat::parse(&model, Fields::parse(body, Arc::default()).unwrap()).unwrap();
            let stream = start(&model, &parsed.generation, Client::default(), None).unwrap();
            (stream, parsed.shape)
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (well, its_shape) = begin();
            let (stream, shape) = begin();
            let failed = whole(stream, Box::new(Faulty(shape, 0))).await;
            assert_eq!(failed.unwrap_err().status, 500);
            let (stream, shape) = begin();
            let told = events(
                stream,
                Box::new(Faulty(shape, 0)),
                HttpLimits::default(),
                hearing(),
            );
            let text = told.into_body().collect().await.unwrap().to_bytes();
            let text = String::from_utf8(text.to_vec()).unwrap();
            let last = text.lines().rfind(|l| l.starts_with("data: ")).unwrap();
            assert!(
                last.contains("server_error") && last.contains("a panic"),
                "{text}"
            );
            let answer: Value =
                serde_json::from_str(&whole(well, its_shape).await.unwrap()).unwrap();
            assert_eq!(answer["usage"]["completion_tokens"], 20);
        });
        assert!(model.engine().is_healthy());
    }
}
