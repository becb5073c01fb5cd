//! Adapters beside a model's weights.

use crate::error::{Error, Result};

/// How much of an adapter is added to the products of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AppliedAdapter {
    /// Its place in the list that [`Engine::with_adapters`](crate::Engine::with_adapters) was given.
    pub adapter: usize,
    /// What it is multiplied by.
    pub scale: f32,
}

impl AppliedAdapter {
    /// Checks `applied` for sequences of an engine that has `adapters` adapters.
    ///
    /// # Errors
    /// [`Error::Request`] for an adapter that it does not have, or a scale that is no number.
    pub fn check(applied: &[AppliedAdapter], adapters: usize) -> Result<()> {
        let known = |a: &&AppliedAdapter| a.adapter < adapters && a.scale.is_finite();
        match applied.iter().find(|a| !known(a)) {
            None => Ok(()),
            Some(other) => Err(Error::Request {
                what: "adapters of a sequence",
                expected: format!("adapters below {adapters}, times finite numbers"),
                found: format!("adapter {} times {}", other.adapter, other.scale),
            }),
        }
    }
}
