//! The routes and their handlers.

use super::{App, body, page, stream};
use crate::engine::Client;
use crate::error::ApiError;
use crate::generation;
use crate::model::Model;
use crate::models::Listed;
use crate::protocol::fields::Fields;
use crate::protocol::{Parsed, chat, completions, embeddings, messages, rerank, responses, tokens};
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

/// The address that a connection comes from.
#[derive(Clone, Copy)]
pub(super) struct Peer(pub(super) IpAddr);

/// How a protocol reads a request, and how it reports errors.
#[derive(Clone, Copy)]
struct Protocol {
    parse: fn(&Arc<Model>, Fields) -> Result<Parsed, ApiError>,
    error: fn(&ApiError) -> Value,
}

impl Protocol {
    const fn openai(parse: fn(&Arc<Model>, Fields) -> Result<Parsed, ApiError>) -> Self {
        Protocol {
            parse,
            error: ApiError::body,
        }
    }
}

const MESSAGES: Protocol = Protocol {
    parse: messages::parse,
    error: messages::error,
};
/// A handler of requests that do not need the engine.
type Answer = fn(&Arc<Model>, Fields) -> Result<Value, ApiError>;

/// All routes, behind the guard.
pub(super) fn router(app: Arc<App>) -> Router {
    let generates =
        |p: Protocol| post(move |app, client, request| generate(app, client, request, p));
    let answers = |f: Answer| post(move |app, request| answer(app, request, f));
    let mut router = Router::new();
    for (path, kind, text) in page::FILES {
        router = router.route(path, get(move || async move { page::file(kind, text) }));
    }
    router
        .route(
            "/v1/chat/completions",
            generates(Protocol::openai(chat::parse)),
        )
        .route(
            "/v1/completions",
            generates(Protocol::openai(completions::parse)),
        )
        .route(
            "/v1/responses",
            generates(Protocol::openai(responses::parse)),
        )
        .route("/v1/messages", generates(MESSAGES))
        .route("/v1/messages/count_tokens", answers(messages::count))
        .route("/v1/models", get(models))
        .route("/v1/models/{name}", get(model))
        .route("/v1/embeddings", post(embed))
        .route("/v1/rerank", post(score))
        .route("/tokenize", answers(tokens::tokenize))
        .route("/detokenize", answers(tokens::detokenize))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(Arc::clone(&app), guard))
        .with_state(app)
}

/// Lets requests with access through, and attaches the client.
async fn guard(
    State(app): State<Arc<App>>,
    Extension(Peer(peer)): Extension<Peer>,
    mut request: Request,
    next: Next,
) -> Response {
    let (headers, uri) = (request.headers(), request.uri());
    let lines = headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len());
    if lines.sum::<usize>() + uri.path().len() > app.limits.head {
        let what = format!("the headers: expected at most {} bytes", app.limits.head);
        return failure(&ApiError::bounds(431, what));
    }
    let checked = app.security.check_host(headers, uri);
    let checked = checked.and_then(|()| app.security.check_origin(headers, request.method()));
    let origin = match checked {
        Ok(origin) => origin,
        Err(e) => return failure(&e),
    };
    let mut response = if *request.method() == Method::OPTIONS && origin.is_some() {
        preflight()
    } else {
        // Monitoring has no key, and a browser has none yet when it fetches the page that asks for
        // one.
        let path = request.uri().path();
        let open = path == "/health" || page::FILES.iter().any(|f| f.0 == path);
        match app.security.client(request.headers(), peer) {
            Err(e) if !open => failure(&e),
            client => {
                request.extensions_mut().insert(client.unwrap_or_default());
                next.run(request).await
            }
        }
    };
    let headers = response.headers_mut();
    headers.insert(
        "x-content-type-options",
        HeaderValue::from_static("nosniff"),
    );
    if let Some(origin) = origin.and_then(|o| HeaderValue::from_str(&o).ok()) {
        headers.insert("access-control-allow-origin", origin);
        headers.insert(VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// Answers a preflight request of a page whose origin is in the list.
fn preflight() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    for (name, value) in [
        ("access-control-allow-methods", "GET, POST"),
        (
            "access-control-allow-headers",
            "authorization, content-type, x-api-key",
        ),
        ("access-control-max-age", "600"),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Handles a request that the engine answers.
async fn generate(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    request: Request,
    protocol: Protocol,
) -> Response {
    let failure = |e: &ApiError| failure_in(e, &(protocol.error)(e));
    let deadline = app.limits.request_time.map(|t| Instant::now() + t);
    let begun = begin(&app, client, request, protocol, deadline).await;
    let (stream, parsed) = match begun {
        Ok(begun) => begun,
        Err(e) => return failure(&e),
    };
    if parsed.stream {
        return stream::events(stream, parsed.shape, app.limits);
    }
    match stream::whole(stream, parsed.shape).await {
        Ok(whole) => json_response(StatusCode::OK, &whole),
        Err(e) => failure(&e),
    }
}

async fn begin(
    app: &Arc<App>,
    client: Client,
    request: Request,
    protocol: Protocol,
    deadline: Option<Instant>,
) -> Result<(generation::Stream, Parsed), ApiError> {
    let (model, fields) = asked(app, request).await?;
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
    blocking(move || {
        let parsed = (protocol.parse)(&model, fields)?;
        let stream = generation::start(&model, &parsed.generation, client, deadline)?;
        Ok((stream, parsed))
    })
    .await
}

/// Runs slow work on a thread of its own.
async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(f).await;
    done.unwrap_or_else(|_| Err(ApiError::internal("the request could not be read: a panic")))
}

/// Finds the model that a request names; also returns the body's other fields.
async fn asked(app: &App, request: Request) -> Result<(Arc<Model>, Fields), ApiError> {
    let (parts, body) = request.into_parts();
    let body = body::read(&parts.headers, body, &app.limits).await?;
    let mut fields = Fields::parse(&body)?;
    let name: Option<String> = fields.take("model")?;
    Ok((app.models.get(name.as_deref()).await?, fields))
}

/// Handles a request that does not need the engine.
async fn answer(State(app): State<Arc<App>>, request: Request, f: Answer) -> Response {
    let answered = async {
        let (model, fields) = asked(&app, request).await?;
        blocking(move || f(&model, fields)).await
    };
    match answered.await {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(e) => failure(&e),
    }
}

/// A model's entry in the list; properties that depend on memory are known once it is loaded.
fn card(listed: Listed<'_>) -> Value {
    let mut card = json!({
        "id": listed.name, "object": "model", "created": listed.created, "owned_by": "nq",
        "loaded": listed.model.is_some(),
    });
    if let Some(model) = listed.model {
        let p = model.sampling();
        card["task"] = if model.embedding().is_some() {
            "embed".into()
        } else if model.reranker().is_some() {
            "rerank".into()
        } else {
            "generate".into()
        };
        card["max_model_len"] = model.context().into();
        card["default_sampling"] = json!({
            "temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p, "min_p": p.min_p,
            "repetition_penalty": p.repetition_penalty,
            "frequency_penalty": p.frequency_penalty, "presence_penalty": p.presence_penalty,
        });
    }
    card
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let cards = app.models.each(card);
    json_response(StatusCode::OK, &json!({"object": "list", "data": cards}))
}

async fn model(
    State(app): State<Arc<App>>,
    axum::extract::Path(name): axum::extract::Path<String>,
) -> Response {
    match app.models.find(Some(&name)) {
        Ok(at) => json_response(StatusCode::OK, &app.models.each(card)[at]),
        Err(e) => failure(&e),
    }
}

/// A request for embeddings.
async fn embed(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Response {
    let deadline = app.limits.request_time.map(|t| Instant::now() + t);
    let answered = async {
        let (model, fields) = asked(&app, request).await?;
        let of = Arc::clone(&model);
        let mut asked = blocking(move || embeddings::parse(&of, fields)).await?;
        let texts = std::mem::take(&mut asked.texts);
        let tokens = texts.iter().map(Vec::len).sum();
        let rows = reading::read(&model, &Row::Hidden, texts, client, deadline).await?;
        blocking(move || embeddings::answer(&model, &asked, &rows, tokens)).await
    };
    whole(answered.await)
}

/// A request for the scores of documents.
async fn score(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    request: Request,
) -> Response {
    let deadline = app.limits.request_time.map(|t| Instant::now() + t);
    let answered = async {
        let (model, fields) = asked(&app, request).await?;
        let of = Arc::clone(&model);
        let mut asked = blocking(move || rerank::parse(&of, fields)).await?;
        let row = rerank::reranker(&model)?.row();
        let prompts = std::mem::take(&mut asked.prompts);
        let tokens = prompts.iter().map(Vec::len).sum();
        let rows = reading::read(&model, &row, prompts, client, deadline).await?;
        blocking(move || rerank::answer(&model, &asked, &rows, tokens)).await
    };
    whole(answered.await)
}

/// An answer in JSON, or an error.
fn whole(answer: Result<String, ApiError>) -> Response {
    match answer {
        Ok(json) => json_text(StatusCode::OK, json),
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
    let mut response = Response::new(Body::from(app.models.metrics()));
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8"),
    );
    response
}

/// The description of all routes (OpenAPI 3.1).
async fn openapi() -> Response {
    let text = include_str!("openapi.json").replace("VERSION", env!("CARGO_PKG_VERSION"));
    let mut response = Response::new(Body::from(text));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

async fn no_route(request: Request) -> Response {
    let what = format!("there is no {} {}", request.method(), request.uri().path());
    failure(&ApiError::not_found(what, "not_found"))
}

async fn no_method(request: Request) -> Response {
    let what = format!("{} is not for {}", request.uri().path(), request.method());
    failure(&ApiError::bounds(405, what))
}

/// The response for an error, in OpenAI's format.
fn failure(error: &ApiError) -> Response {
    failure_in(error, &error.body())
}

/// The response for an error, with `body`.
fn failure_in(error: &ApiError, body: &Value) -> Response {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(status, body);
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
    let mut response = Response::new(Body::from(json));
    *response.status_mut() = status;
    let headers: &mut HeaderMap = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert("cache-control", HeaderValue::from_static("no-store"));
    response
}
