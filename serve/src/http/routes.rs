//! The routes and their handlers.

use super::body::{self, Ending};
use super::census;
use super::connections::Working;
use super::response::{failure, json_body, json_response};
use super::room::RoomPlace;
use super::stream::{self, Silence, patient};
use super::{App, kept, listed, openapi, page};
use crate::engine::Client;
use crate::error::ApiError;
use crate::generation;
use crate::model::ServedModel;
use crate::protocol::fields::Fields;
use crate::protocol::reading::Reading;
use crate::protocol::{
    Framing, Parsed, SseEvent, chat, compaction, completions, embeddings, messages, ollama, rerank,
    responses, tokens, unique,
};
use crate::reading;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use hyper::header::{CONTENT_TYPE, HeaderValue, VARY};
use hyper::{HeaderMap, Method, StatusCode};
use nq_runtime::{AppliedAdapter, Row};
use serde::Deserialize;
use serde_json::{Value, json};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout;

/// The other end of a connection.
#[derive(Clone)]
pub(super) struct Peer {
    /// Its address.
    pub(super) address: IpAddr,
    /// Becomes true when it sends no more.
    pub(super) silence: Silence,
    /// Whether the connection is at work.
    pub(super) working: Working,
}

/// How a protocol reads a request.
type Parse = fn(&Arc<ServedModel>, Fields) -> Result<Parsed, ApiError>;
/// A handler of requests that do not need the engine.
type Handler = fn(&Arc<ServedModel>, Fields) -> Result<Value, ApiError>;

/// How a protocol reads a request for embeddings.
type EmbeddingParser = fn(&Arc<ServedModel>, Fields) -> Result<embeddings::Embeddings, ApiError>;

/// All routes, behind the guard.
pub(super) fn router(app: Arc<App>) -> Router {
    let generates =
        |p: Parse| post(move |app, client, peer, request| generate(app, client, peer, request, p));
    let answers = |f: Handler| post(move |app, peer, request| answer(app, peer, request, f));
    let embeds = |f: EmbeddingParser| {
        post(move |app, client, peer, request| embed(app, client, peer, request, f))
    };
    let mut router = Router::new();
    for (path, kind, text) in page::FILES {
        router = router.route(path, get(move || async move { page::file(kind, text) }));
    }
    router
        .route("/v1/chat/completions", generates(chat::parse))
        .route("/v1/completions", generates(completions::parse))
        .route("/v1/responses", generates(responses::parse))
        .route("/v1/responses/input_tokens", answers(responses::count))
        .route("/v1/responses/compact", generates(compaction::parse))
        .route("/v1/responses/{id}", get(kept::whole).delete(kept::forget))
        .route("/v1/responses/{id}/input_items", get(kept::input_items))
        .route("/v1/responses/{id}/cancel", post(kept::cancel))
        .route("/v1/messages", generates(messages::parse))
        .route("/v1/messages/count_tokens", answers(messages::count))
        .route("/v1/models", get(listed::models))
        .route("/v1/models/", get(listed::models))
        .route("/v1/models/{*name}", get(listed::model))
        .route("/api/chat", generates(ollama::chat))
        .route("/api/generate", generates(ollama::generate))
        .route("/api/tags", get(listed::tags))
        .route("/api/ps", get(listed::running))
        .route("/api/embed", embeds(embeddings::parse_ollamas))
        .route("/api/show", post(show))
        .route("/api/version", get(version))
        .route("/v1/embeddings", embeds(embeddings::parse))
        .route("/v1/rerank", post(score))
        .route("/tokenize", answers(tokens::tokenize))
        .route("/detokenize", answers(tokens::detokenize))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(description))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(Arc::clone(&app), guard))
        .with_state(app)
}

/// Lets requests with access through, and attaches the client.
async fn guard(
    State(app): State<Arc<App>>,
    Extension(peer): Extension<Peer>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path().to_owned();
    let id = unique("req_");
    let (headers, uri) = (request.headers(), request.uri());
    let lines = headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len());
    if lines.sum::<usize>() + uri.path().len() > app.limits.head {
        let what = format!("the headers: expected at most {} bytes", app.limits.head);
        return worded(failure(&ApiError::bounds(431, what)), &path, &id);
    }
    let checked = app.security.check_host(headers, uri);
    let checked = checked.and_then(|()| app.security.check_origin(headers, request.method()));
    let origin = match checked {
        Ok(origin) => origin,
        Err(e) => return worded(failure(&e), &path, &id),
    };
    // One that has a body is at work once that has come.
    peer.working
        .set(hyper::body::Body::is_end_stream(request.body()));
    let response = if *request.method() == Method::OPTIONS && origin.is_some() {
        preflight(request.headers())
    } else {
        // Monitoring has no key, and a browser has none yet when it fetches the page that asks for
        // one.
        let open = path == "/health" || page::FILES.iter().any(|f| f.0 == path);
        match app.security.client(request.headers(), peer.address) {
            Err(e) if !open => failure(&e),
            client => {
                let client = client.unwrap_or_default();
                let reading = Reading::new(app.rules.clone(), client, Arc::clone(&app.kept));
                let reading = Arc::new(reading);
                request.extensions_mut().insert(client);
                request.extensions_mut().insert(Arc::clone(&reading));
                told(&app, &reading, next.run(request).await)
            }
        }
    };
    let mut response = worded(response, &path, &id);
    response = response.map(|body| Body::new(Ending(body, peer.working)));
    let headers = response.headers_mut();
    headers.insert(
        "x-content-type-options",
        HeaderValue::from_static("nosniff"),
    );
    if let Some(origin) = origin.and_then(|o| HeaderValue::from_str(&o).ok()) {
        headers.insert("access-control-allow-origin", origin);
        headers.append(VARY, HeaderValue::from_static("origin"));
        let shown =
            HeaderValue::from_static("retry-after, request-id, x-nq-left-out, x-request-id");
        headers.insert("access-control-expose-headers", shown);
    }
    response
}

/// Counts what reading a request found, and says in a header what was left out of it.
fn told(app: &App, reading: &Reading, mut response: Response) -> Response {
    if response.extensions().get::<CountedLater>().is_some() {
        return response;
    }
    let found = reading.found();
    app.ledger.count(&found);
    let mut line = found.left_out.join(", ");
    line.truncate(1000); // They are of ASCII.
    if let (false, Ok(line)) = (line.is_empty(), HeaderValue::from_str(&line)) {
        response.headers_mut().insert("x-nq-left-out", line);
    }
    response
}

/// Writes the request's id into its response, in the header that the route's protocol has for it, and the body of an
/// error in the protocol's form.
fn worded(mut response: Response, path: &str, id: &str) -> Response {
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let mut body = error_body(path, &error);
        if is_anthropics(path) {
            body["request_id"] = id.into();
        }
        *response.body_mut() = Body::from(body.to_string());
    }
    if let Ok(id) = HeaderValue::from_str(id) {
        let name = match is_anthropics(path) {
            true => "request-id",
            false => "x-request-id",
        };
        response.headers_mut().insert(name, id);
    }
    response
}

fn is_anthropics(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

fn is_ollamas(path: &str) -> bool {
    path.starts_with("/api/")
}

/// An error in the form of the route's protocol.
fn error_body(path: &str, error: &ApiError) -> Value {
    match path {
        path if is_anthropics(path) => messages::error(error),
        path if is_ollamas(path) => ollama::error(error),
        _ => error.body(),
    }
}

/// An error as the only event of a stream.
fn error_event(path: &str, error: &ApiError) -> SseEvent {
    match path {
        "/v1/messages" => SseEvent::typed("error", messages::error(error)),
        "/v1/responses" => responses::error_event(error),
        path => SseEvent::data(&error_body(path, error)),
    }
}

/// Answers a preflight request of a page whose origin is in the list: it may send any header, because what
/// it may do is decided by its origin and its key.
fn preflight(asked: &HeaderMap) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    for (name, value) in [
        ("access-control-allow-methods", "GET, POST, DELETE"),
        ("access-control-max-age", "600"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let allowed = asked.get("access-control-request-headers").cloned();
    let common = HeaderValue::from_static("authorization, content-type, x-api-key");
    headers.insert("access-control-allow-headers", allowed.unwrap_or(common));
    headers.append(
        VARY,
        HeaderValue::from_static("access-control-request-headers"),
    );
    if asked.contains_key("access-control-request-private-network") {
        let yes = HeaderValue::from_static("true");
        headers.insert("access-control-allow-private-network", yes);
    }
    response
}

/// Handles a request that the engine answers. While its model is being loaded, its client hears that it lives.
async fn generate(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Extension(peer): Extension<Peer>,
    request: Request,
    parse: Parse,
) -> Response {
    let deadline = app.limits.request_time.map(|t| Instant::now() + t);
    let path = request.uri().path().to_owned();
    let (named, fields, place) = match asked(&app, request).await {
        Ok(asked) => asked,
        Err(e) => return failure(&e),
    };
    let (streams, framing) = match is_ollamas(&path) {
        true => (fields.peek("stream") != false, Framing::Lines),
        false => (fields.peek("stream") == true, Framing::Events),
    };
    let reading = Arc::clone(fields.reading());
    let state = Arc::clone(&app);
    let mut begun = Box::pin(async move {
        let model = named.model(&state).await?;
        begin(model, client, fields, parse, place, deadline).await
    });
    let soon = tokio::select! {
        biased;
        begun = timeout(app.limits.keep_alive, &mut begun) => begun.ok(),
        () = stream::perhaps_gone(peer.silence.clone()) => None,
    };
    let (stream, parsed) = match soon {
        Some(Ok(begun)) => begun,
        Some(Err(e)) => return failure(&e),
        None => {
            let limits = app.limits;
            let counted = async move {
                let begun = begun.await;
                app.ledger.count(&reading.found());
                begun
            };
            let mut response = match streams {
                true => stream::events_of(
                    counted,
                    framing,
                    move |e| error_event(&path, e),
                    limits,
                    peer.silence,
                ),
                false => {
                    let answer = async move {
                        let (stream, parsed) = counted.await?;
                        stream::whole(stream, parsed.shape).await
                    };
                    let wrong = move |e: &ApiError| error_body(&path, e).to_string();
                    json_body(
                        StatusCode::OK,
                        stream::slow(answer, wrong, peer.silence, limits),
                    )
                }
            };
            response.extensions_mut().insert(CountedLater);
            return response;
        }
    };
    if parsed.stream {
        return stream::events(stream, parsed.shape, app.limits, peer.silence);
    }
    let answer = stream::whole(stream, parsed.shape);
    whole(patient(answer, peer.silence, app.limits).await)
}

/// Marks a response whose request had not been read when it began.
#[derive(Clone)]
struct CountedLater;

async fn begin(
    model: Arc<ServedModel>,
    client: Client,
    fields: Fields,
    parse: Parse,
    place: RoomPlace,
    deadline: Option<Instant>,
) -> Result<(generation::AnswerStream, Parsed), ApiError> {
    if model.embedding().is_some() {
        return Err(ApiError {
            code: Some("no_generation"),
            ..ApiError::invalid(format!(
                "{} is an embedding model: it serves /v1/embeddings",
                model.name()
            ))
        });
    }
    // Templates, tokenizers and grammars take their time, and may panic: not here.
    let reader = Arc::clone(&model);
    let read = move || {
        let parsed = parse(&reader, fields)?;
        match parsed.generation.images.is_empty() {
            true => started(&reader, parsed, client, deadline).map(Ok),
            false => Ok(Err(parsed)),
        }
    };
    let mut parsed = match place.work(read).await? {
        Ok(begun) => return Ok(begun),
        Err(parsed) => parsed,
    };
    // Images take longer than others should wait for their turn to be read.
    let sees = Arc::clone(&model);
    let encode = move |gone: &dyn Fn() -> bool| {
        let stop = || gone() || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        parsed.generation.encode(&sees, &stop).map(|()| parsed)
    };
    let parsed = place.see(encode).await?;
    place
        .work(move || started(&model, parsed, client, deadline))
        .await
}

/// Sends what was read to the engine.
fn started(
    model: &Arc<ServedModel>,
    parsed: Parsed,
    client: Client,
    deadline: Option<Instant>,
) -> Result<(generation::AnswerStream, Parsed), ApiError> {
    let stream = generation::start(model, &parsed.generation, client, deadline)?;
    Ok((stream, parsed))
}

/// The model that a request is for.
struct NamedModel {
    name: Option<String>,
    /// Its adapters, if they are not those that go with the name.
    lora: Option<Vec<Lora>>,
}

/// One of the model's adapters, by llama.cpp's names.
#[derive(Deserialize)]
struct Lora {
    id: usize,
    scale: f32,
}

impl NamedModel {
    /// The model, loaded.
    ///
    /// # Errors
    /// If no model has that name, or it has no such adapter; if it cannot be loaded.
    async fn model(self, app: &App) -> Result<Arc<ServedModel>, ApiError> {
        let model = app.models.get(self.name.as_deref()).await?;
        let Some(lora) = self.lora else {
            return Ok(model);
        };
        let applied = lora.iter().map(|lora| AppliedAdapter {
            adapter: lora.id,
            scale: lora.scale,
        });
        let applied = model.applied(applied.collect())?;
        Ok(Arc::new(model.with(model.name().to_owned(), applied)))
    }
}

/// The model that a request is for, the body's other fields, and the request's place for further work on
/// them.
async fn asked(app: &App, request: Request) -> Result<(NamedModel, Fields, RoomPlace), ApiError> {
    let (mut parts, body) = request.into_parts();
    let client = parts.extensions.get().copied().unwrap_or_default();
    let place = app.room.place(client);
    let body = body::read(&parts.headers, body, &app.limits, &place).await?;
    if let Some(peer) = parts.extensions.get::<Peer>() {
        peer.working.set(true);
    }
    let reading = parts.extensions.remove().unwrap_or_default();
    let read = place.work(move || {
        census::check(&body)?;
        let mut fields = Fields::parse(&body, reading)?;
        let name: Option<String> = fields.take("model")?;
        let named = NamedModel {
            // Clients with an empty setting for it send that.
            name: name.filter(|name| !name.is_empty()),
            lora: fields.take("lora")?,
        };
        Ok((named, fields))
    });
    let (named, fields) = read.await?;
    Ok((named, fields, place))
}

/// Handles a request that is answered at once, or whose answer the engine has a part in. `read` reads it, `made`
/// makes the answer. While its model is being loaded, its client is sent white space.
async fn answered<T, A>(
    app: Arc<App>,
    silence: Silence,
    request: Request,
    read: fn(&Arc<ServedModel>, Fields) -> Result<T, ApiError>,
    made: impl FnOnce(Arc<ServedModel>, T, RoomPlace) -> A + Send + 'static,
) -> Response
where
    T: Send + 'static,
    A: Future<Output = Result<String, ApiError>> + Send + 'static,
{
    let path = request.uri().path().to_owned();
    let (named, fields, place) = match asked(&app, request).await {
        Ok(asked) => asked,
        Err(e) => return failure(&e),
    };
    let state = Arc::clone(&app);
    let mut woken = Box::pin(async move {
        let model = named.model(&state).await?;
        let reader = Arc::clone(&model);
        let read = place.work(move || read(&reader, fields)).await?;
        Ok((model, read, place))
    });
    match timeout(app.limits.keep_alive, &mut woken).await {
        Ok(Ok((model, read, place))) => {
            whole(patient(made(model, read, place), silence, app.limits).await)
        }
        Ok(Err(e)) => failure(&e),
        Err(_) => {
            let answer = async move {
                let (model, read, place) = woken.await?;
                made(model, read, place).await
            };
            let wrong = move |e: &ApiError| error_body(&path, e).to_string();
            json_body(
                StatusCode::OK,
                stream::slow(answer, wrong, silence, app.limits),
            )
        }
    }
}

/// Handles a request that does not need the engine.
async fn answer(
    State(app): State<Arc<App>>,
    Extension(peer): Extension<Peer>,
    request: Request,
    f: Handler,
) -> Response {
    let made = |_, value: Value, _| async move { Ok(value.to_string()) };
    answered(app, peer.silence, request, f, made).await
}

/// A request for embeddings.
async fn embed(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Extension(peer): Extension<Peer>,
    request: Request,
    parse: EmbeddingParser,
) -> Response {
    let deadline = app.limits.request_time.map(|t| Instant::now() + t);
    let made = move |model: Arc<ServedModel>,
                     mut asked: embeddings::Embeddings,
                     place: RoomPlace| async move {
        let texts = std::mem::take(&mut asked.texts);
        let tokens = texts.iter().map(Vec::len).sum();
        let rows = reading::read(&model, &Row::Hidden, texts, client, deadline).await?;
        let answer = move || embeddings::answer(&model, &asked, &rows, tokens);
        place.work(answer).await
    };
    answered(app, peer.silence, request, parse, made).await
}

/// A request for the scores of documents.
async fn score(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Response {
    let deadline = app.limits.request_time.map(|t| Instant::now() + t);
    let made = move |model: Arc<ServedModel>, mut asked: rerank::Rerank, place: RoomPlace| async move {
        let row = rerank::reranker(&model)?.row();
        let prompts = std::mem::take(&mut asked.prompts);
        let tokens = prompts.iter().map(Vec::len).sum();
        let rows = reading::read(&model, &row, prompts, client, deadline).await?;
        let answer = move || rerank::answer(&model, &asked, &rows, tokens);
        place.work(answer).await
    };
    answered(app, peer.silence, request, |m, f| rerank::parse(m, f), made).await
}

/// What is known of a model, in Ollama's form; it is not loaded for that.
async fn show(State(app): State<Arc<App>>, request: Request) -> Response {
    let read = async {
        let (named, fields, _) = asked(&app, request).await?;
        let mut fields = fields.under("ollama.show")?;
        let older: Option<String> = fields.take("name")?;
        fields.finish()?;
        listed::card(&app, named.name.or(older).as_deref())
    };
    match read.await {
        Ok(card) => json_response(StatusCode::OK, &ollama::shown(&card)),
        Err(e) => failure(&e),
    }
}

async fn version() -> Response {
    json_response(StatusCode::OK, &json!({"version": ollama::VERSION}))
}

/// An answer in JSON, or an error.
fn whole(answer: Result<Body, ApiError>) -> Response {
    match answer {
        Ok(json) => json_body(StatusCode::OK, json),
        Err(e) => failure(&e),
    }
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, word) = if app.models.is_healthy() {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "unavailable")
    };
    json_response(status, &json!({"status": word}))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = format!(
        "{}{}# EOF\n",
        app.models.metrics().replace("# EOF\n", ""),
        app.ledger.text()
    );
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8"),
    );
    response
}

/// The description of all routes (OpenAPI 3.1).
async fn description() -> Response {
    json_response(StatusCode::OK, openapi::description())
}

async fn no_route(request: Request) -> Response {
    let path = request.uri().path();
    let mut what = format!("there is no {} {path}", request.method());
    // Base addresses with a slash too many, or without /v1.
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
    let plain = format!("/{}", parts.join("/"));
    let meant = [plain.clone(), format!("/v1{plain}")];
    let known = &openapi::description()["paths"];
    if let Some(meant) = meant
        .iter()
        .find(|m| **m != path && known.get(m.as_str()).is_some())
    {
        what += &format!(": {meant} is meant, perhaps");
    }
    failure(&ApiError::not_found(what, "not_found"))
}

async fn no_method(request: Request) -> Response {
    let what = format!("{} is not for {}", request.uri().path(), request.method());
    failure(&ApiError::bounds(405, what))
}
