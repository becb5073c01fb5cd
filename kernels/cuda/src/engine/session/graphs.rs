//! Kinds of steps, which are recorded once each.

use crate::{CascadeShape, Graph};
use std::collections::{HashMap, HashSet};

/// Recorded steps.
#[derive(Default)]
pub(super) struct Graphs {
    pub(super) recorded: HashMap<StepKind, Graph>,
    /// Kinds of steps that have run (rows, all layers at once, end, runs, sharing of pages): their kernels are
    /// loaded and their shared memory is reserved, which cannot be recorded.
    pub(super) warm: HashSet<(usize, bool, StepEnd, bool, bool)>,
}

/// The parameters by which recorded steps differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct StepKind {
    /// Number of rows.
    pub(super) m: usize,
    /// Most parts that attention cuts contexts into: a short context starts few blocks.
    pub(super) splits: usize,
    /// True if one kernel may run all layers.
    pub(super) at_once: bool,
    pub(super) end: StepEnd,
    /// True if the host has written its tokens: the step begins by looking them up, and several of its
    /// rows may belong to one sequence.
    pub(super) runs: bool,
    /// Set if pages that sequences share are read once.
    pub(super) shared: Option<CascadeShape>,
}

/// The last operation of a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum StepEnd {
    /// Logits, for the host.
    Logits,
    /// The best token, looked up for the next step.
    Greedy,
    /// A token drawn from candidates, which are listed first, and looked up for the next step.
    Sampled,
}
