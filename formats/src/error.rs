//! The one error type of this crate.

use std::path::PathBuf;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors about a file, a tensor or a scheme. Every variant says what was expected and what was
/// found; those about a file or tensor name it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file.
    #[error("{}: {action}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The action that failed, e.g. "open".
        action: &'static str,
        /// The system's error.
        cause: std::io::Error,
    },
    /// A file that a checkpoint needs does not exist.
    #[error("{}: no {what} here", path.display())]
    Missing {
        /// The path where it was expected.
        path: PathBuf,
        /// The missing file or part.
        what: String,
    },
    /// Something already exists where new work would go.
    #[error("{}: {what}", path.display())]
    Exists {
        /// The file or folder.
        path: PathBuf,
        /// The problem, and what can be done about it.
        what: String,
    },
    /// A file system does not have enough space.
    #[error("{}: not enough disk space: {needed} bytes needed, {available} available", path.display())]
    Space {
        /// The file or folder to be written.
        path: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
    /// A file's structure does not follow its format.
    #[error("{}: {what}: expected {expected}, found {found}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The part of the file.
        what: String,
        /// What the format requires.
        expected: String,
        /// What the file contains.
        found: String,
    },
    /// A tensor is absent, or its shape, type or contents are wrong.
    #[error("{}: tensor {tensor}: expected {expected}, found {found}", path.display())]
    Tensor {
        /// The file or folder that should hold it.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// The expected property.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The checkpoint is well formed, but of a kind that nq does not support.
    #[error("{}: {what} is not supported: {why}", path.display())]
    Unsupported {
        /// The file or folder.
        path: PathBuf,
        /// The unsupported feature, by its usual name.
        what: String,
        /// What is supported instead, or why this is not.
        why: String,
    },
    /// A model could not be obtained from the hub.
    #[error("{what}: {problem}: {detail}")]
    Hub {
        /// The model's id, or the requested address.
        what: String,
        /// The kind of failure.
        problem: HubProblem,
        /// Details, and what to do about them.
        detail: String,
    },
    /// A scheme's parameters are out of range.
    #[error("scheme: expected {expected}, found {found}")]
    Scheme {
        /// The valid values.
        expected: String,
        /// The value given.
        found: String,
    },
    /// Parts of a weight do not match each other (raised where no file is known;
    /// readers wrap it into [`Error::Tensor`]).
    #[error("weight: {what}: expected {expected}, found {found}")]
    Weight {
        /// The part.
        what: &'static str,
        /// What matches the shape and scheme.
        expected: String,
        /// What was given.
        found: String,
    },
}

/// Kind of failure of the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubProblem {
    /// The hub must not be contacted.
    Offline,
    /// The hub does not answer.
    Unreachable,
    /// A token is missing or does not grant access.
    Denied,
    /// There is no such model, revision or file.
    NotFound,
    /// The answer is invalid, or a download is not what the hub announced.
    Broken,
}

impl std::fmt::Display for HubProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            HubProblem::Offline => "offline",
            HubProblem::Unreachable => "the hub does not answer",
            HubProblem::Denied => "access denied",
            HubProblem::NotFound => "not found on the hub",
            HubProblem::Broken => "download failed",
        })
    }
}

impl Error {
    /// True if the hub could not provide a model and another source may: offline and not
    /// cached, no answer, or no such model.
    pub fn is_unreachable(&self) -> bool {
        use HubProblem::{NotFound, Offline, Unreachable};
        matches!(
            self,
            Error::Hub {
                problem: Offline | Unreachable | NotFound,
                ..
            }
        )
    }

    /// The error, if it is about parts of a weight, as one about a tensor of the file or folder `path`.
    pub(crate) fn in_tensor(self, path: impl Into<PathBuf>, tensor: &str) -> Self {
        match self {
            Error::Weight {
                what,
                expected,
                found,
            } => Error::Tensor {
                path: path.into(),
                tensor: tensor.into(),
                expected: format!("{what}: {expected}"),
                found,
            },
            other => other,
        }
    }

    /// Wraps an I/O error with the file and the action that failed.
    pub fn io(path: impl Into<PathBuf>, action: &'static str, cause: std::io::Error) -> Self {
        Error::Io {
            path: path.into(),
            action,
            cause,
        }
    }
}
