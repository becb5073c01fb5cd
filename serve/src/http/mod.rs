//! HTTP: connections, routes, access control, and streamed answers.

mod body;
mod census;
mod connections;
pub(crate) mod guard;
mod kept;
mod limits;
mod listed;
mod noted;
mod openapi;
mod page;
mod paging;
mod response;
mod room;
mod routes;
mod server;
mod stream;

pub use guard::Security;
pub use limits::HttpLimits;
pub use server::{Server, Stopper};

use crate::models::Models;
use crate::protocol::kept::KeptResponses;
use crate::protocol::reading::Rules;
use noted::Ledger;
use room::BodyRoom;
use std::sync::Arc;

/// State that all requests share.
pub(crate) struct App {
    /// Models by name.
    pub models: Arc<Models>,
    /// Access control.
    pub security: Security,
    /// Limits on a request or connection.
    pub limits: HttpLimits,
    /// How requests are read.
    pub rules: Rules,
    /// Responses that requests may refer to.
    pub kept: Arc<KeptResponses>,
    /// What requests had that nq does not know.
    ledger: Ledger,
    /// What requests may take before a model is asked.
    room: Arc<BodyRoom>,
}
