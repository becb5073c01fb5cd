//! What a checkpoint holds and nq does not use, each with its reason.

use serde::Serialize;
use std::collections::BTreeMap;

/// Something that a checkpoint holds and that changes nothing in what nq computes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOver {
    /// A tensor's name, or a file's and a key's.
    pub name: String,
    /// What nq does instead.
    pub why: String,
}

impl LeftOver {
    pub(crate) fn new(name: impl Into<String>, why: impl Into<String>) -> Self {
        LeftOver {
            name: name.into(),
            why: why.into(),
        }
    }
}

/// A line for each reason, with at most three of the names it holds for.
pub fn lines(left: &[LeftOver]) -> Vec<String> {
    const SHOWN: usize = 3;
    let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for one in left {
        by_reason.entry(&one.why).or_default().push(&one.name);
    }
    let line = |(why, names): (&str, Vec<&str>)| {
        let shown = names[..names.len().min(SHOWN)].join(", ");
        match names.len().saturating_sub(SHOWN) {
            0 => format!("{shown}: {why}"),
            more => format!("{shown} and {more} more: {why}"),
        }
    };
    by_reason.into_iter().map(line).collect()
}
