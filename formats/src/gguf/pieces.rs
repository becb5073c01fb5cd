//! Matrices that GGUF files keep otherwise than as a tensor each: rows of one tensor, or of several, one behind another.

use super::hyper::TABLE;
use super::names::index_names;
use nq_model::names::layer_matrix;
use nq_model::{Dims, LinearKind, ModelConfig, NgramTable};
use std::ops::Range;

/// Rows of a tensor that are rows of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredRows {
    /// The tensor.
    pub(super) stored: String,
    /// Its shape, outermost dimension first.
    pub(super) shape: Vec<usize>,
    /// Its rows, of all but the last dimension together.
    pub(super) rows: Range<usize>,
}

/// How a matrix lies in a file that does not keep it as a tensor of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Elsewhere {
    /// Queries and key of an indexer, in two tensors.
    Index([String; 2]),
    /// The gate or up projections of experts, each expert's gate before its up projection.
    GateUp { stored: String, up: bool },
    /// This part of a table of n-grams.
    Table(usize),
}

impl Elsewhere {
    /// How the parameter `name`, which files call `own` if they keep it alone, lies in a file that `has` some tensors.
    pub(super) fn find(name: &str, own: &str, has: impl Fn(&str) -> bool) -> Option<Self> {
        if let Some(part) = NgramTable::part_of(name) {
            return Some(Elsewhere::Table(part));
        }
        let gate_up = |part: &str, up| {
            let stored = own.replace(part, "ffn_gate_up_exps");
            let found = stored != own && has(&stored) && !has(own);
            found.then_some(Elsewhere::GateUp { stored, up })
        };
        match layer_matrix(name)?.kind {
            LinearKind::IndexQk => Some(Elsewhere::Index(index_names(own))),
            LinearKind::Gate => gate_up("ffn_gate_exps", false),
            LinearKind::Up => gate_up("ffn_up_exps", true),
            _ => None,
        }
    }

    /// The tensors that hold it.
    pub(super) fn stored(&self) -> Vec<String> {
        match self {
            Elsewhere::Index(names) => names.to_vec(),
            Elsewhere::GateUp { stored, .. } => vec![stored.clone()],
            Elsewhere::Table(_) => vec![TABLE.into()],
        }
    }

    /// Where its rows are, those of a matrix of `dims` in a model of shape `c`.
    pub(super) fn pieces(&self, c: &ModelConfig, dims: Dims) -> Vec<StoredRows> {
        let Dims { rows, cols } = dims;
        match self {
            Elsewhere::Index([q, k]) => {
                let key = c.indexer.map_or(0, |i| i.head_dim).min(rows);
                let whole = |stored: &String, rows| StoredRows {
                    stored: stored.clone(),
                    shape: vec![rows, cols],
                    rows: 0..rows,
                };
                vec![whole(q, rows - key), whole(k, key)]
            }
            Elsewhere::GateUp { stored, up } => {
                let experts = c.experts.map_or(1, |e| e.count);
                let each = rows / experts;
                let of_expert = |expert: usize| {
                    let first = (2 * expert + usize::from(*up)) * each;
                    StoredRows {
                        stored: stored.clone(),
                        shape: vec![experts, 2 * each, cols],
                        rows: first..first + each,
                    }
                };
                (0..experts).map(of_expert).collect()
            }
            Elsewhere::Table(part) => {
                let parts = c.ngrams.as_ref().map_or(1, |n| n.parts);
                vec![StoredRows {
                    stored: TABLE.into(),
                    shape: vec![rows * parts, cols],
                    rows: part * rows..(part + 1) * rows,
                }]
            }
        }
    }
}
