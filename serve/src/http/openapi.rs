//! `/openapi.json`: the routes of `openapi.json`, with the requests of the table of fields.

use crate::protocol::table::expanded;
use serde_json::Value;
use std::sync::OnceLock;

/// The description of all routes (OpenAPI 3.1).
pub(super) fn description() -> &'static Value {
    static WHOLE: OnceLock<Value> = OnceLock::new();
    WHOLE.get_or_init(|| {
        let text = include_str!("openapi.json").replace("VERSION", env!("CARGO_PKG_VERSION"));
        // A test reads the file, which is part of the program.
        expanded(&serde_json::from_str(&text).unwrap_or_default())
    })
}
