//! HTTP: connections, routes, access control, and streamed answers.

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
    /// Access control.
    pub security: Security,
    /// Limits on a request or connection.
    pub limits: Limits,
}
