//! The one error type of this crate.

use std::path::PathBuf;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong with a file, a tensor or a scheme. Every variant names what
/// was expected and what was found; those about a file or tensor name it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused an operation on a file.
    #[error("{}: {action}: {cause}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, e.g. "open".
        action: &'static str,
        /// The system's error.
        cause: std::io::Error,
    },
    /// A file that a checkpoint needs is not there.
    #[error("{}: no {what} here", path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
        /// What was looked for.
        what: String,
    },
    /// Something stands where new work would go.
    #[error("{}: {what}", path.display())]
    Exists {
        /// The file or folder.
        path: PathBuf,
        /// What it is, and what can be done.
        what: String,
    },
    /// A file system has not enough room.
    #[error("{}: not enough disk space: {needed} bytes needed, {available} available", path.display())]
    Space {
        /// The file or folder to be written.
        path: PathBuf,
        /// Bytes that it takes.
        needed: u64,
        /// Bytes that are free there.
        available: u64,
    },
    /// A file's structure is not what its format says.
    #[error("{}: {what}: expected {expected}, found {found}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        what: String,
        /// What the format asks for.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A tensor is absent, or its shape, type or contents are wrong.
    #[error("{}: tensor {tensor}: expected {expected}, found {found}", path.display())]
    Tensor {
        /// The file or folder that should hold it.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What was expected of it.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The checkpoint is well formed, but of a kind that nq does not run.
    #[error("{}: {what} is not supported: {why}", path.display())]
    Unsupported {
        /// The file or folder.
        path: PathBuf,
        /// The feature, by its own name.
        what: String,
        /// What is supported instead, or why this is not.
        why: String,
    },
    /// A model could not be had from the hub.
    #[error("{what}: {problem}: {detail}")]
    Hub {
        /// The model's id or the address asked.
        what: String,
        /// The kind of failure.
        problem: HubProblem,
        /// What happened, and what to do.
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
    /// Parts of a weight do not fit each other (raised where no file is known;
    /// readers wrap it into [`Error::Tensor`]).
    #[error("weight: {what}: expected {expected}, found {found}")]
    Weight {
        /// Which part.
        what: &'static str,
        /// What fits the shape and scheme.
        expected: String,
        /// What was given.
        found: String,
    },
}

/// Why the hub did not give a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubProblem {
    /// The hub must not be asked.
    Offline,
    /// No answer.
    Unreachable,
    /// A token is missing, or has no access.
    Denied,
    /// No such model, revision or file.
    NotFound,
    /// An answer that makes no sense, or a download that is not what the hub announced.
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
    /// True if the hub could not give a model and another may serve: offline and not
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

    /// Wraps an I/O error with the file and the action that failed.
    pub fn io(path: impl Into<PathBuf>, action: &'static str, cause: std::io::Error) -> Self {
        Error::Io {
            path: path.into(),
            action,
            cause,
        }
    }
}
