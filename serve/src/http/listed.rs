//! The list of models, in OpenAI's form or, for clients of Anthropic's API, in that.

use super::App;
use super::paging::Paging;
use super::response::{failure, json_response};
use crate::about::About;
use crate::error::ApiError;
use crate::models::Listed;
use crate::protocol::{messages, ollama};
use axum::extract::{Path, State};
use axum::response::Response;
use hyper::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};
use std::sync::Arc;

/// A model's entries in the list, one for each of its names: what is known of it, and how it is being used.
fn cards(listed: Listed<'_>) -> Vec<Value> {
    let mut card = json!({
        "id": listed.name, "object": "model", "created": listed.created, "owned_by": "nq",
        "root": listed.name, "parent": null, "loaded": listed.model.is_some(), "pinned": listed.pinned,
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
        card["default_sampling"] = p.values().collect();
    }
    let other = |alias: &&str| {
        let mut card = card.clone();
        card["id"] = (*alias).into();
        card
    };
    let adapted = |adapter: &&str| {
        let mut card = other(adapter);
        (card["root"], card["parent"]) = ((*adapter).into(), listed.name.into());
        card
    };
    let others = listed.aliases.iter().map(other);
    let adapted = listed.adapters.iter().map(adapted);
    let others: Vec<Value> = others.chain(adapted).collect();
    [vec![card], others].concat()
}

/// Anthropic's clients say which version of its API they speak.
fn is_anthropics(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// All models.
pub(super) async fn models(State(app): State<Arc<App>>, headers: HeaderMap, uri: Uri) -> Response {
    let cards = app.models.each(cards).concat();
    if !is_anthropics(&headers) {
        return json_response(StatusCode::OK, &json!({"object": "list", "data": cards}));
    }
    let cards = cards.iter().map(messages::card).collect();
    let page = Paging::read(uri.query(), 1000, false).and_then(|paging| paging.cut(cards));
    match page {
        Ok(page) => json_response(StatusCode::OK, &page),
        Err(e) => failure(&e),
    }
}

/// One model.
pub(super) async fn model(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Response {
    match card(&app, Some(&name)) {
        Ok(card) if is_anthropics(&headers) => {
            json_response(StatusCode::OK, &messages::card(&card))
        }
        Ok(card) => json_response(StatusCode::OK, &card),
        Err(e) => failure(&e),
    }
}

/// The entry of the model of a name; without one, of the first.
///
/// # Errors
/// If no model has that name.
pub(super) fn card(app: &App, name: Option<&str>) -> Result<Value, ApiError> {
    let at = app.models.find(name)?;
    let mut all = app.models.each(cards);
    let cards = all.get_mut(at).map(std::mem::take).unwrap_or_default();
    let own = cards
        .iter()
        .find(|card| name.is_some_and(|name| card["id"] == name));
    let card = own.or(cards.first()).cloned();
    card.ok_or_else(|| ApiError::internal("a model without an entry"))
}

/// All models in Ollama's form.
pub(super) async fn tags(State(app): State<Arc<App>>) -> Response {
    let cards = app.models.each(cards).concat();
    let tags: Vec<Value> = cards.iter().map(ollama::tag).collect();
    json_response(StatusCode::OK, &json!({"models": tags}))
}

/// The models that are loaded, in Ollama's form.
pub(super) async fn running(State(app): State<Arc<App>>) -> Response {
    let cards = app.models.each(cards).concat();
    let loaded = cards.iter().filter(|card| card["loaded"] == true);
    let tags: Vec<Value> = loaded.map(ollama::tag).collect();
    json_response(StatusCode::OK, &json!({"models": tags}))
}
