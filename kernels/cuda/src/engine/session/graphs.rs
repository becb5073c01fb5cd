//! Kinds of steps, which are recorded once each.

use crate::{CascadeShape, Graph};
use std::collections::{HashMap, HashSet};

/// Recorded steps.
#[derive(Default)]
pub(super) struct Graphs {
    pub(super) recorded: HashMap<StepKind, Graph>,
    /// Those of steps that have run: they are loaded and their shared memory is reserved, which cannot be recorded.
    pub(super) warm: HashSet<StepKernels>,
}

/// What decides which kernels a step has.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct StepKernels {
    m: usize,
    at_once: bool,
    end: StepEnd,
    runs: bool,
    shares_pages: bool,
    scores_blocks: bool,
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
    /// The most blocks that an indexer scores for a row.
    pub(super) scored: usize,
    /// Set if pages that sequences share are read once.
    pub(super) shared: Option<CascadeShape>,
}

impl StepKind {
    pub(super) fn kernels(&self) -> StepKernels {
        StepKernels {
            m: self.m,
            at_once: self.at_once,
            end: self.end,
            runs: self.runs,
            shares_pages: self.shared.is_some(),
            scores_blocks: self.scored > 0,
        }
    }
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
