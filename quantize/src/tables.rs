//! Weights of a model with the tables of n-grams of another, to measure what rounding either costs.

use nq_formats::{Overlay, Scheme, StoredWeight, Weight, WeightStore};
use nq_model::{Dims, NgramTable};

/// A store whose tables of n-grams are those of another.
pub(crate) struct WithTables<'a> {
    weights: &'a dyn WeightStore,
    tables: &'a dyn WeightStore,
}

impl<'a> WithTables<'a> {
    pub(crate) fn new(weights: &'a dyn WeightStore, tables: &'a dyn WeightStore) -> Self {
        WithTables { weights, tables }
    }

    /// The store that has the matrix `name`.
    fn having(&self, name: &str) -> &dyn WeightStore {
        match NgramTable::part_of(name) {
            Some(_) => self.tables,
            None => self.weights,
        }
    }
}

impl Overlay for WithTables<'_> {
    fn inner(&self) -> &dyn WeightStore {
        self.weights
    }

    fn matrix(&self, name: &str, dims: Dims) -> nq_formats::Result<Weight> {
        self.having(name).matrix(name, dims)
    }

    fn matrix_in_codes(&self, name: &str, dims: Dims) -> nq_formats::Result<Weight> {
        self.having(name).matrix_in_codes(name, dims)
    }

    fn stored(&self, name: &str, dims: Dims) -> nq_formats::Result<StoredWeight> {
        self.having(name).stored(name, dims)
    }

    fn rows(&self, name: &str, dims: Dims) -> nq_formats::Result<StoredWeight> {
        self.having(name).rows(name, dims)
    }

    fn scheme(&self, name: &str) -> Option<Scheme> {
        self.having(name).scheme(name)
    }

    fn is_float(&self, name: &str) -> bool {
        self.having(name).is_float(name)
    }
}
