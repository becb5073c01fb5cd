//! The routes and their handlers.

use super::body::{self, Ending};
use super::census;
use super::connections::Working;
use super::room::RoomPlace;
use super::stream::{self, Silence, patient};
use super::{App, openapi, page};
use crate::about::About;
use crate::engine::Client;
use crate::error::ApiError;
use crate::generation;
use crate::model::ServedModel;
use crate::models::Listed;
use crate::protocol::fields::Fields;
use crate::protocol::reading::{Reading, plain};
use crate::protocol::responses::number;
use crate::protocol::{
    Parsed, SseEvent, chat, completions, embeddings, messages, rerank, responses, tokens,
};
use crate::reading;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, VARY};
use hyper::{HeaderMap, Method, StatusCode};
use nq_runtime::Row;
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

/// All routes, behind the guard.
pub(super) fn router(app: Arc<App>) -> Router {
    let generates =
        |p: Parse| post(move |app, client, peer, request| generate(app, client, peer, request, p));
    let answers = |f: Handler| post(move |app, peer, request| answer(app, peer, request, f));
    let mut router = Router::new();
    for (path, kind, text) in page::FILES {
        router = router.route(path, get(move || async move { page::file(kind, text) }));
    }
    router
        .route("/v1/chat/completions", generates(chat::parse))
        .route("/v1/completions", generates(completions::parse))
        .route("/v1/responses", generates(responses::parse))
        .route("/v1/responses/{id}", get(response).delete(forget))
        .route("/v1/messages", generates(messages::parse))
        .route("/v1/messages/count_tokens", answers(messages::count))
        .route("/v1/models", get(models))
        .route("/v1/models/", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/embeddings", post(embed))
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
    let (headers, uri) = (request.headers(), request.uri());
    let lines = headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len());
    if lines.sum::<usize>() + uri.path().len() > app.limits.head {
        let what = format!("the headers: expected at most {} bytes", app.limits.head);
        return worded(failure(&ApiError::bounds(431, what)), &path);
    }
    let checked = app.security.check_host(headers, uri);
    let checked = checked.and_then(|()| app.security.check_origin(headers, request.method()));
    let origin = match checked {
        Ok(origin) => origin,
        Err(e) => return worded(failure(&e), &path),
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
    let mut response = worded(response, &path);
    response = response.map(|body| Body::new(Ending(body, peer.working)));
    let headers = response.headers_mut();
    headers.insert(
        "x-content-type-options",
        HeaderValue::from_static("nosniff"),
    );
    if let Some(origin) = origin.and_then(|o| HeaderValue::from_str(&o).ok()) {
        headers.insert("access-control-allow-origin", origin);
        headers.append(VARY, HeaderValue::from_static("origin"));
        let shown = HeaderValue::from_static("retry-after, x-nq-left-out");
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

/// Writes the body of an error in the form of the route's protocol.
fn worded(mut response: Response, path: &str) -> Response {
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        *response.body_mut() = Body::from(error_body(path, &error).to_string());
    }
    response
}

/// An error in the form of the route's protocol.
fn error_body(path: &str, error: &ApiError) -> Value {
    let anthropic = path == "/v1/messages" || path.starts_with("/v1/messages/");
    match anthropic {
        true => messages::error(error),
        false => error.body(),
    }
}

/// An error as the only event of a stream.
fn error_event(path: &str, error: &ApiError) -> SseEvent {
    match path {
        "/v1/messages" => SseEvent::typed("error", messages::error(error)),
        "/v1/responses" => responses::error_event(error),
        _ => SseEvent::data(&error.body()),
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
    let (name, fields, place) = match asked(&app, request).await {
        Ok(asked) => asked,
        Err(e) => return failure(&e),
    };
    let (streams, reading) = (fields.peek("stream") == true, Arc::clone(fields.reading()));
    let of = Arc::clone(&app);
    let mut begun = Box::pin(async move {
        let model = of.models.get(name.as_deref()).await?;
        begin(model, client, fields, (parse, place), deadline).await
    });
    let (stream, parsed) = match timeout(app.limits.keep_alive, &mut begun).await {
        Ok(Ok(begun)) => begun,
        Ok(Err(e)) => return failure(&e),
        Err(_) => {
            let limits = app.limits;
            let counted = async move {
                let begun = begun.await;
                app.ledger.count(&reading.found());
                begun
            };
            let mut response = match streams {
                true => stream::events_of(
                    counted,
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
    (parse, place): (Parse, RoomPlace),
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
    place
        .work(move || {
            let parsed = parse(&model, fields)?;
            let stream = generation::start(&model, &parsed.generation, client, deadline)?;
            Ok((stream, parsed))
        })
        .await
}

/// The name of the model that a request is for, the body's other fields, and the request's place for further work on
/// them.
async fn asked(
    app: &App,
    request: Request,
) -> Result<(Option<String>, Fields, RoomPlace), ApiError> {
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
        Ok((name, fields))
    });
    let (name, fields) = read.await?;
    Ok((name, fields, place))
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
    let (name, fields, place) = match asked(&app, request).await {
        Ok(asked) => asked,
        Err(e) => return failure(&e),
    };
    let of = Arc::clone(&app);
    let mut woken = Box::pin(async move {
        let model = of.models.get(name.as_deref()).await?;
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

/// A model's entries in the list, one for each of its names: what is known of it, and how it is being used.
fn cards(listed: Listed<'_>) -> Vec<Value> {
    let mut card = json!({
        "id": listed.name, "object": "model", "created": listed.created, "owned_by": "nq",
        "root": listed.name, "loaded": listed.model.is_some(), "pinned": listed.pinned,
        "idle_seconds": listed.idle.as_secs(),
    });
    let about = listed.about.map(About::json).unwrap_or_default();
    for (key, value) in about.as_object().into_iter().flatten() {
        card[key] = value.clone();
    }
    if let Some(model) = listed.model {
        let (p, metrics) = (model.sampling(), model.engine().metrics());
        card["running"] = metrics.running.get().into();
        card["waiting"] = metrics.waiting.get().into();
        card["default_sampling"] = json!({
            "temperature": number(p.temperature), "top_k": p.top_k, "top_p": number(p.top_p),
            "min_p": number(p.min_p), "repetition_penalty": number(p.repetition_penalty),
            "frequency_penalty": number(p.frequency_penalty),
            "presence_penalty": number(p.presence_penalty),
        });
    }
    let other = |alias: &&str| {
        let mut card = card.clone();
        card["id"] = (*alias).into();
        card
    };
    let others: Vec<Value> = listed.aliases.iter().map(other).collect();
    [vec![card], others].concat()
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let cards = app.models.each(cards).concat();
    json_response(StatusCode::OK, &json!({"object": "list", "data": cards}))
}

async fn model(
    State(app): State<Arc<App>>,
    axum::extract::Path(name): axum::extract::Path<String>,
) -> Response {
    let cards = app.models.each(cards).concat();
    match (
        cards.iter().find(|c| c["id"] == name.as_str()),
        app.models.find(Some(&name)),
    ) {
        (Some(card), _) => json_response(StatusCode::OK, card),
        (None, Err(e)) => failure(&e),
        (None, Ok(_)) => failure(&ApiError::internal("a model without an entry")),
    }
}

/// A response that is kept.
async fn response(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    axum::extract::Path(id): axum::extract::Path<String>,
) -> Response {
    match app.kept.whole(client.id, &id) {
        Some(text) => json_text(StatusCode::OK, text),
        None => failure(&no_response(&id)),
    }
}

/// Forgets a response that is kept.
async fn forget(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    axum::extract::Path(id): axum::extract::Path<String>,
) -> Response {
    match app.kept.forget(client.id, &id) {
        true => {
            let gone = json!({"id": id, "object": "response.deleted", "deleted": true});
            json_response(StatusCode::OK, &gone)
        }
        false => failure(&no_response(&id)),
    }
}

fn no_response(id: &str) -> ApiError {
    let what = format!("Response with id '{}' not found.", plain(id));
    ApiError::not_found(what, "response_not_found")
}

/// A request for embeddings.
async fn embed(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Extension(peer): Extension<Peer>,
    request: Request,
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
    answered(
        app,
        peer.silence,
        request,
        |m, f| embeddings::parse(m, f),
        made,
    )
    .await
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

/// The response for an error; [`worded`] writes its body.
fn failure(error: &ApiError) -> Response {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_text(status, String::new());
    response.extensions_mut().insert(error.clone());
    if let Some(after) = error.retry_after {
        let seconds = after.as_secs_f64().ceil().max(1.0) as u64;
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    if error.status == 401 {
        let challenge = HeaderValue::from_static("Bearer");
        response.headers_mut().insert("www-authenticate", challenge);
    }
    response
}

fn json_response(status: StatusCode, value: &Value) -> Response {
    json_text(status, value.to_string())
}

fn json_text(status: StatusCode, json: String) -> Response {
    json_body(status, Body::from(json))
}

fn json_body(status: StatusCode, json: Body) -> Response {
    let mut response = Response::new(json);
    *response.status_mut() = status;
    let headers: &mut HeaderMap = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert("cache-control", HeaderValue::from_static("no-store"));
    response
}
