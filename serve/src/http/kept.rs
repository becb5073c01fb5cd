//! The routes of responses that are kept.

use super::App;
use super::paging::Paging;
use super::response::{failure, json_response, json_text};
use crate::engine::Client;
use crate::error::ApiError;
use crate::protocol::items;
use crate::protocol::reading::plain;
use axum::Extension;
use axum::extract::{Path, State};
use axum::response::Response;
use hyper::{StatusCode, Uri};
use serde_json::json;
use std::sync::Arc;

/// The response as it was sent.
pub(super) async fn whole(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    uri: Uri,
) -> Response {
    let query = uri.query().unwrap_or_default();
    if query.split('&').any(|pair| pair == "stream=true") {
        let why = "nq keeps whole responses, not their events";
        return failure(&ApiError::unsupported("stream", why));
    }
    match app.kept.whole(client.id, &id) {
        Some(text) => json_text(StatusCode::OK, text),
        None => failure(&no_response(&id)),
    }
}

/// Forgets a response.
pub(super) async fn forget(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
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

/// The items that led to a response, those of responses before it included.
pub(super) async fn input_items(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    uri: Uri,
) -> Response {
    let Some(items) = app.kept.input(client.id, &id) else {
        return failure(&no_response(&id));
    };
    let listed = |(i, item): (usize, &_)| items::listed(item, &id, i);
    let items = items.iter().enumerate().map(listed).collect();
    let page = Paging::read(uri.query(), 20, true).and_then(|paging| paging.cut(items));
    match page {
        Ok(mut page) => {
            page["object"] = "list".into();
            json_response(StatusCode::OK, &page)
        }
        Err(e) => failure(&e),
    }
}

/// Responses end before their ids are kept: there is none in the background that could be cancelled.
pub(super) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Response {
    match app.kept.whole(client.id, &id) {
        Some(_) => failure(&ApiError::invalid("Cannot cancel a synchronous response.")),
        None => failure(&no_response(&id)),
    }
}
