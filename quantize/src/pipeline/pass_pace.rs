//! How long passes over text take.

/// Seconds of a pass over text: of each weight, however long the text is, and of a multiplication.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassPace {
    pub(super) weight: f64,
    pub(super) multiplication: f64,
}

impl PassPace {
    /// The pace of a `pass` that took `long` seconds, and over a `share` of the text `short`.
    pub(super) fn between(short: f64, long: f64, share: f64, pass: TextPass) -> Self {
        // Times vary: one that hardly grows with the text is no reason to say that it does not.
        let grows = (long - short).max(0.1 * long) / (1.0 - share).max(0.1);
        PassPace {
            weight: (long - grows).max(0.0) / pass.weights,
            multiplication: grows.min(long) / pass.multiplications,
        }
    }

    pub(super) fn seconds(&self, pass: TextPass) -> f64 {
        self.weight * pass.weights + self.multiplication * pass.multiplications
    }
}

/// A pass over text through layers of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextPass {
    pub(super) weights: f64,
    pub(super) multiplications: f64,
}

/// The time in which a CPU searches the range of a weight, in times that it takes to correct a column for a weight's
/// error (`2026-11-26-cpu-quantize.csv`).
pub(super) const FITTED: f64 = 745.0;
