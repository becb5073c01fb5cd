//! The one error type of this crate.

use std::path::PathBuf;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of a quantization.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Reading or writing a checkpoint failed.
    #[error(transparent)]
    Format(#[from] nq_formats::Error),
    /// Running the model failed.
    #[error(transparent)]
    Runtime(#[from] nq_runtime::Error),
    /// An operation on a device failed.
    #[error(transparent)]
    Kernels(#[from] nq_kernels::Error),
    /// A weight contains NaN or infinity.
    #[error("{tensor}: expected finite weights, found {found} in row {row}, column {column}")]
    NotFinite {
        /// The weight's name.
        tensor: String,
        /// The value.
        found: f32,
        /// Its row.
        row: usize,
        /// Its column.
        column: usize,
    },
    /// A request does not fit the model or this build.
    #[error("{what}: expected {expected}, found {found}")]
    Request {
        /// Part of the request.
        what: &'static str,
        /// Values that fit.
        expected: String,
        /// Value given.
        found: String,
    },
    /// Measuring quality failed.
    #[error(transparent)]
    Evals(#[from] nq_evals::Error),
    /// The measured quality misses a limit. Finished steps are kept, so that a run with other
    /// limits can resume from them.
    #[error("{}: not written: {broken}; the worst layers: {worst}", out.display())]
    Guard {
        /// The limits missed, and by how much.
        broken: String,
        /// The layers with the greatest errors.
        worst: String,
        /// The folder that was not written.
        out: PathBuf,
        /// Everything that was measured.
        report: Box<crate::QuantizeReport>,
    },
    /// A calibration or evaluation text cannot be used.
    #[error("{}: {why}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

impl Error {
    /// True if NaN or infinity came out of a model, whose cause may be a weight.
    pub(crate) fn is_not_finite(&self) -> bool {
        match self {
            Error::Runtime(e) | Error::Evals(nq_evals::Error::Runtime(e)) => e.is_not_finite(),
            _ => false,
        }
    }
}
