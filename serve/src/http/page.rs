//! The page at `/`: a fixed table of files, built into the program.

use axum::body::Body;
use axum::response::Response;
use hyper::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue};

/// Path, content type and text of each file.
#[rustfmt::skip]
pub(super) const FILES: [(&str, &str, &str); 8] = [
    ("/", "text/html; charset=utf-8", include_str!("../page/index.html")),
    ("/page/style.css", "text/css; charset=utf-8", include_str!("../page/style.css")),
    ("/page/app.js", "text/javascript; charset=utf-8", include_str!("../page/app.js")),
    ("/page/store.js", "text/javascript; charset=utf-8", include_str!("../page/store.js")),
    ("/page/markdown.js", "text/javascript; charset=utf-8", include_str!("../page/markdown.js")),
    ("/page/marked.js", "text/javascript; charset=utf-8", include_str!("../page/marked.js")),
    ("/page/math.js", "text/javascript; charset=utf-8", include_str!("../page/math.js")),
    ("/page/highlight.js", "text/javascript; charset=utf-8", include_str!("../page/highlight.js")),
];

/// Content security policy of the page: it may run its own files and contact its own server, nothing
/// else. Model output that were mistaken for a script would not run.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Responds with one of the files.
pub(super) fn file(kind: &'static str, text: &'static str) -> Response {
    let mut response = Response::new(Body::from(text));
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        // A newer program has a newer page, so browsers must check.
        (CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert("referrer-policy", HeaderValue::from_static("no-referrer"));
    headers.insert("x-frame-options", HeaderValue::from_static("DENY"));
    response
}
