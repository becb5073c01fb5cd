//! What requests had that nq does not know or left out: counted for `/metrics`, reported once.

use crate::protocol::reading::Noted;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use std::collections::HashSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Most different names of either kind; further ones count as `other`.
const MOST: usize = 128;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Label {
    name: String,
}

/// Reports to the server's operator.
pub(crate) type Report = Box<dyn Fn(&str) + Send + Sync>;

/// Counts over all requests.
pub(super) struct Ledger {
    registry: Registry,
    unknown: Family<Label, Counter>,
    left_out: Family<Label, Counter>,
    /// Names that were reported, by kind.
    reported: Mutex<(HashSet<String>, HashSet<String>)>,
    report: Report,
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").finish_non_exhaustive()
    }
}

impl Ledger {
    pub(super) fn new(report: Report) -> Self {
        let mut registry = Registry::with_prefix("nq");
        let (unknown, left_out) = (Family::default(), Family::default());
        let help = "Fields that requests had and nq does not know";
        registry.register("unknown_fields", help, Family::clone(&unknown));
        let help = "Parts of requests that the model was not given";
        registry.register("left_out", help, Family::clone(&left_out));
        Ledger {
            registry,
            unknown,
            left_out,
            reported: Mutex::default(),
            report,
        }
    }

    /// Counts what reading a request found.
    pub(super) fn count(&self, noted: &Noted) {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let note = |known: &mut HashSet<String>,
                    family: &Family<Label, Counter>,
                    name: &str,
                    what: &str| {
            let fits = known.contains(name) || known.len() < MOST;
            let label = Label {
                name: if fits { name } else { "other" }.to_owned(),
            };
            family.get_or_create(&label).inc();
            if fits && known.insert(name.to_owned()) {
                (self.report)(&format!("{what}: {name}"));
            }
        };
        for name in &noted.unknown {
            let what = "a request has a field that nq does not know";
            note(&mut reported.0, &self.unknown, name, what);
        }
        for line in &noted.left_out {
            let (_, name) = line.rsplit_once(' ').unwrap_or(("", line));
            let what = "part of a request is left out, and its client told so";
            note(&mut reported.1, &self.left_out, name, what);
        }
    }

    /// The counts as text, without an end.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text.replace("# EOF\n", "")
    }
}
