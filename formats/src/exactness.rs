//! How exactly a store returns what a file holds.

use nq_model::DType;

/// How the numbers that a store returns for a weight relate to those stored in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// The same numbers.
    Exact,
    /// The same codes; scales and offsets rounded to this type.
    ScalesRounded(DType),
    /// Values rounded to this type.
    ValuesRounded(DType),
}
