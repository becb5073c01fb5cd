//! What the tests of several crates use. A crate that depends on this one for its tests has the demo model unpacked.
//!
//! What needs a crate of nq's stands behind a feature, so that the tests of the first crates need not wait for the last:
//! `models` for shapes of small models, `sees` for one that sees, `weights` for random weights, `sessions` for sessions.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "tests say what they skip")]

pub mod compare;
#[cfg(feature = "weights")]
pub mod delta;
pub mod fuzz;
#[cfg(feature = "models")]
pub mod models;
#[cfg(feature = "sees")]
pub mod sees;
#[cfg(feature = "sessions")]
pub mod sessions;
#[cfg(feature = "weights")]
pub mod weights;

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// The repository's folder.
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The folder with the demo model, in `demo`, and what was measured with it.
pub fn assets() -> PathBuf {
    repository().join("assets")
}

/// The demo model's folder.
pub fn demo() -> PathBuf {
    assets().join("demo")
}

/// A file or folder of the test data beside the repository, or in `NQ_SHARED`; `None`, said in print, where it is absent.
pub fn shared(path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("NQ_SHARED");
    let root = root.map_or_else(|| repository().join("../shared"), PathBuf::from);
    let path = root.join(path);
    if !path.exists() {
        println!("skipped: {} is absent", path.display());
        return None;
    }
    Some(path)
}

/// What was `found` on a GPU; `None`, said in print, where there is none.
///
/// # Panics
/// If there is none and `NQ_REQUIRE_CUDA` is 1.
#[track_caller]
pub fn on_gpu<T, E: Display>(found: Result<T, E>) -> Option<T> {
    let required = std::env::var_os("NQ_REQUIRE_CUDA").is_some_and(|v| v == "1");
    match found {
        Ok(found) => Some(found),
        Err(e) => {
            assert!(!required, "NQ_REQUIRE_CUDA=1, but: {e}");
            println!("skipped: {e}");
            None
        }
    }
}
