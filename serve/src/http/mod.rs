//! HTTP: connections, routes, who may do what, and answers as they come.

mod body;
pub mod guard;
mod page;
mod routes;
mod server;
mod stream;

pub use guard::Security;
pub use server::{Limits, Server, Stopper};

use crate::models::Models;
use std::sync::Arc;

/// State that all requests share.
pub struct App {
    /// Models by name.
    pub models: Arc<Models>,
    /// Decides who may ask.
    pub security: Security,
    /// Bounds on one request or connection.
    pub limits: Limits,
}
