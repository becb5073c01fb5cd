//! HTTP: connections, routes, who may do what, and answers as they come.

mod body;
pub mod guard;
mod page;
mod routes;
mod server;
mod stream;

pub use guard::Security;
pub use server::{Limits, Server, Stopper};

use crate::error::ApiError;
use crate::model::Model;
use std::sync::Arc;

/// What all requests share.
pub struct App {
    /// Models by name; the first answers requests that name none.
    pub models: Vec<Arc<Model>>,
    /// Who may ask.
    pub security: Security,
    /// What one request or connection may take.
    pub limits: Limits,
}

impl App {
    /// The model of a name.
    ///
    /// # Errors
    /// If there is none of it.
    pub fn model(&self, name: Option<&str>) -> Result<Arc<Model>, ApiError> {
        let found = match name {
            None => self.models.first(),
            Some(name) => self.models.iter().find(|m| m.name() == name),
        };
        found.cloned().ok_or_else(|| {
            let names: Vec<&str> = self.models.iter().map(|m| m.name()).collect();
            ApiError {
                param: Some("model".into()),
                ..ApiError::not_found(
                    format!(
                        "there is no model {:?}: {} is served",
                        name.unwrap_or_default(),
                        names.join(", ")
                    ),
                    "model_not_found",
                )
            }
        })
    }
}
