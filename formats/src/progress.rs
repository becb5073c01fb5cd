//! Progress of long work: libraries print nothing, the caller displays it.

/// Unit of a stage's count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes read, written or transferred.
    Bytes,
    /// Tokens processed.
    Tokens,
    /// Tensors, windows, steps.
    Items,
    /// Parts of layers, so many each: layers are shown.
    Layers(u64),
}

/// Receives the progress of long work. Stages do not overlap; `()` ignores everything.
pub trait Progress: Send + Sync {
    /// The stages to come, with estimates of their seconds; 0 where nothing is known.
    fn plan(&self, stages: &[(&str, f64)]) {
        let _ = stages;
    }

    /// A stage begins that will count to `total`.
    fn begin(&self, stage: &str, total: u64, unit: Unit) {
        let _ = (stage, total, unit);
    }

    /// `n` more units are done.
    fn advance(&self, n: u64) {
        let _ = n;
    }

    /// `n` units are there from an earlier run. The time until now says nothing of how long the others take.
    fn kept(&self, n: u64) {
        self.advance(n);
    }

    /// The stage is over.
    fn end(&self) {}

    /// A message that the user must see once: a fallback, a choice, a warning.
    fn note(&self, message: &str) {
        let _ = message;
    }
}

impl Progress for () {}
