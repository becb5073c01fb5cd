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

/// What all requests share.
pub struct App {
    /// Models by name.
    pub models: Arc<Models>,
    /// Who may ask.
    pub security: Security,
    /// What one request or connection may take.
    pub limits: Limits,
}
