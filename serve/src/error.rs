//! The errors that a client gets.

use crate::engine::{Failure, Refused};
use serde_json::{Value, json};
use std::time::Duration;

/// An error in the terms of HTTP and of OpenAI's API.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// OpenAI's `code`.
    pub code: Option<&'static str>,
    /// The field of the request that caused the error.
    pub param: Option<String>,
    /// A message for people.
    pub message: String,
    /// Suggested time until the next attempt.
    pub retry_after: Option<Duration>,
    /// Tokens of a prompt that does not fit, and the most that would.
    pub overflow: Option<(u32, u32)>,
}

/// Most bytes of a message, which may quote the request.
const MOST_MESSAGE: usize = 2000;

/// Most bytes of the name of a field.
const MOST_PARAM: usize = 200;

/// The beginning of a text that is too long.
fn short(mut text: String, most: usize) -> String {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text += "...";
    }
    text
}

impl ApiError {
    fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError {
            status,
            kind,
            code: None,
            param: None,
            message: short(message.into(), MOST_MESSAGE),
            retry_after: None,
            overflow: None,
        }
    }

    /// A malformed request (400).
    pub fn invalid(message: impl Into<String>) -> Self {
        ApiError::new(400, "invalid_request_error", message)
    }

    /// An invalid field (400); the message says what was expected and found.
    pub fn field(param: &str, message: impl Into<String>) -> Self {
        let param = short(param.to_owned(), MOST_PARAM);
        let message = format!("{param}: {}", message.into());
        ApiError {
            param: Some(param),
            ..ApiError::invalid(message)
        }
    }

    /// A field that nq does not support (400).
    pub(crate) fn unsupported(param: &str, why: &str) -> Self {
        ApiError {
            code: Some("unsupported_parameter"),
            ..ApiError::field(param, why)
        }
    }

    /// A failure of the server (500).
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        ApiError::new(500, "server_error", message)
    }

    /// There is no such route, or no such model (404).
    pub(crate) fn not_found(message: impl Into<String>, code: &'static str) -> Self {
        ApiError {
            code: Some(code),
            ..ApiError::new(404, "invalid_request_error", message)
        }
    }

    /// The client lacks access (401 or 403).
    pub(crate) fn denied(status: u16, message: impl Into<String>, code: &'static str) -> Self {
        let kind = match status {
            401 => "authentication_error",
            _ => "permission_error",
        };
        ApiError {
            code: Some(code),
            ..ApiError::new(status, kind, message)
        }
    }

    /// A request that is too large, too slow or of the wrong kind: `status` says which.
    pub(crate) fn bounds(status: u16, message: impl Into<String>) -> Self {
        ApiError::new(status, "invalid_request_error", message)
    }

    /// A model that does not fit the memory (503): only at present, if `passes`.
    pub(crate) fn no_memory(message: impl Into<String>, passes: bool) -> Self {
        ApiError {
            code: Some("insufficient_memory"),
            retry_after: passes.then_some(Duration::from_secs(10)),
            ..ApiError::new(503, "server_error", message)
        }
    }

    /// The server has too much to do at present (503).
    pub(crate) fn busy(message: impl Into<String>) -> Self {
        ApiError {
            code: Some("busy"),
            retry_after: Some(Duration::from_secs(5)),
            ..ApiError::new(503, "server_error", message)
        }
    }

    /// The error in OpenAI's format.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused {
            Refused::QueueFull { retry_after, .. } => ApiError {
                code: Some("queue_full"),
                retry_after: Some(retry_after),
                ..ApiError::new(429, "rate_limit_error", message)
            },
            Refused::Closing => ApiError {
                code: Some("closing"),
                retry_after: Some(Duration::from_secs(5)),
                ..ApiError::new(503, "server_error", message)
            },
            Refused::ContextFull { .. } => ApiError {
                code: Some("context_length_exceeded"),
                ..ApiError::invalid(message)
            },
            Refused::Invalid(_) => ApiError::invalid(message),
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        let message = failure.to_string();
        match failure {
            Failure::Timeout => ApiError {
                code: Some("timeout"),
                ..ApiError::new(504, "server_error", message)
            },
            Failure::QueueTimeout => ApiError {
                code: Some("queue_timeout"),
                retry_after: Some(Duration::from_secs(5)),
                ..ApiError::new(503, "server_error", message)
            },
            Failure::Closing => Refused::Closing.into(),
            Failure::Constraint(_) => ApiError::invalid(message),
            Failure::Model(_) => ApiError::internal(message),
        }
    }
}

impl From<nq_runtime::Error> for ApiError {
    /// Converts errors of templates, tokenizers and samplers, which concern the client's input.
    fn from(e: nq_runtime::Error) -> Self {
        match e {
            nq_runtime::Error::Request { what, .. } => ApiError {
                param: Some(what.to_owned()),
                ..ApiError::invalid(e.to_string())
            },
            nq_runtime::Error::TooLong { at_least, most } => ApiError {
                code: Some("context_length_exceeded"),
                overflow: Some((at_least as u32, most as u32)),
                ..ApiError::invalid(e.to_string())
            },
            // Does not reveal where the server keeps its files.
            nq_runtime::Error::Text { what, why, .. } => {
                ApiError::invalid(format!("{what}: {why}"))
            }
            e => ApiError::invalid(e.to_string()),
        }
    }
}
