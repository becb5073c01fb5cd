//! Responses of JSON and of errors.

use crate::error::ApiError;
use axum::body::Body;
use axum::response::Response;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{HeaderMap, StatusCode};
use serde_json::Value;

/// The response for an error; `worded` writes its body.
pub(super) fn failure(error: &ApiError) -> Response {
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

pub(super) fn json_response(status: StatusCode, value: &Value) -> Response {
    json_text(status, value.to_string())
}

pub(super) fn json_text(status: StatusCode, json: String) -> Response {
    json_body(status, Body::from(json))
}

pub(super) fn json_body(status: StatusCode, json: Body) -> Response {
    let mut response = Response::new(json);
    *response.status_mut() = status;
    let headers: &mut HeaderMap = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert("cache-control", HeaderValue::from_static("no-store"));
    response
}
