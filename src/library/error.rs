//! Errors of the interface for programs.

use nq_quantize::QuantizeReport;
use std::io;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of any part. Its text names the file, tensor or setting, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Error(Cause);

/// What a program may do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No model goes by the name; the text says what names there are.
    NoModel,
    /// The model is not made for what was asked of it.
    Unsuited,
    /// The operating system refused something, or a file is missing or in the way.
    System(io::ErrorKind),
    /// A setting or text that does not fit the model or the device.
    Argument,
    /// A quantized model misses a limit on its quality; [`Error::report`] has the figures.
    Quality,
    /// The work was ended by its `interrupt`.
    Interrupted,
    /// Files that are damaged or not supported; failures of a device.
    Other,
}

#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error("{0}")]
    NoModel(String),
    #[error("{0}")]
    Unsuited(String),
    #[error("{0}")]
    Differs(String),
    #[error(transparent)]
    Format(nq_formats::Error),
    #[error(transparent)]
    Run(nq_runtime::Error),
    #[error(transparent)]
    Quantize(Box<nq_quantize::Error>),
    #[error(transparent)]
    Evaluate(nq_evals::Error),
    #[error(transparent)]
    Answer(nq_answers::Error),
    #[error("{what}: {error}")]
    Within { what: String, error: Box<Error> },
}

impl Error {
    /// No model goes by a name, as `why` explains.
    pub(crate) fn no_model(why: impl Into<String>) -> Self {
        Error(Cause::NoModel(why.into()))
    }

    /// A model that is not made for what was asked of it, as `why` explains.
    pub(crate) fn unsuited(why: impl Into<String>) -> Self {
        Error(Cause::Unsuited(why.into()))
    }

    /// What was written is not read as its source is, as `how` says.
    pub(crate) fn differs(how: impl Into<String>) -> Self {
        Error(Cause::Differs(how.into()))
    }

    /// The error in a part of the work that `what` names.
    pub(crate) fn within(self, what: impl Into<String>) -> Self {
        let (what, error) = (what.into(), Box::new(self));
        Error(Cause::Within { what, error })
    }

    /// It for the program, which looks for errors of the runtime.
    #[cfg(feature = "cli")]
    pub(crate) fn untyped(self) -> anyhow::Error {
        match self.0 {
            Cause::Run(e) => e.into(),
            Cause::Within { what, error } => error.untyped().context(what),
            other => Error(other).into(),
        }
    }

    /// What a program may do about it.
    pub fn kind(&self) -> ErrorKind {
        match &self.0 {
            Cause::NoModel(_) => ErrorKind::NoModel,
            Cause::Unsuited(_) => ErrorKind::Unsuited,
            Cause::Format(e) => of_format(e),
            Cause::Run(e) => of_run(e),
            Cause::Quantize(e) => of_quantize(e),
            Cause::Evaluate(e) => of_evaluation(e),
            Cause::Answer(nq_answers::Error::Blind(_)) => ErrorKind::Unsuited,
            Cause::Answer(
                nq_answers::Error::Format(_)
                | nq_answers::Error::Image(_)
                | nq_answers::Error::NoImage(_),
            ) => ErrorKind::Argument,
            Cause::Answer(_) | Cause::Differs(_) => ErrorKind::Other,
            Cause::Within { error, .. } => error.kind(),
        }
    }

    /// All that was measured of a quantized model that misses a limit on its quality.
    pub fn report(&self) -> Option<&QuantizeReport> {
        match &self.0 {
            Cause::Quantize(e) => match &**e {
                nq_quantize::Error::Guard { report, .. } => Some(report),
                _ => None,
            },
            _ => None,
        }
    }

    /// The error of reading or writing files that it is, if any; otherwise itself.
    pub(crate) fn into_format(self) -> std::result::Result<nq_formats::Error, Self> {
        match self.0 {
            Cause::Format(e) => Ok(e),
            other => Err(Error(other)),
        }
    }
}

impl From<nq_formats::Error> for Error {
    fn from(error: nq_formats::Error) -> Self {
        Error(Cause::Format(error))
    }
}

impl From<nq_runtime::Error> for Error {
    fn from(error: nq_runtime::Error) -> Self {
        Error(Cause::Run(error))
    }
}

impl From<nq_quantize::Error> for Error {
    fn from(error: nq_quantize::Error) -> Self {
        Error(Cause::Quantize(Box::new(error)))
    }
}

impl From<nq_evals::Error> for Error {
    fn from(error: nq_evals::Error) -> Self {
        Error(Cause::Evaluate(error))
    }
}

impl From<nq_answers::Error> for Error {
    fn from(error: nq_answers::Error) -> Self {
        Error(match error {
            nq_answers::Error::Runtime(e) => Cause::Run(e),
            other => Cause::Answer(other),
        })
    }
}

fn of_format(error: &nq_formats::Error) -> ErrorKind {
    match error {
        nq_formats::Error::Io { cause, .. } => ErrorKind::System(cause.kind()),
        nq_formats::Error::Missing { .. } => ErrorKind::System(io::ErrorKind::NotFound),
        nq_formats::Error::Exists { .. } => ErrorKind::System(io::ErrorKind::AlreadyExists),
        _ => ErrorKind::Other,
    }
}

fn of_run(error: &nq_runtime::Error) -> ErrorKind {
    match error {
        nq_runtime::Error::Format(e) => of_format(e),
        nq_runtime::Error::Request { .. } => ErrorKind::Argument,
        nq_runtime::Error::Interrupted => ErrorKind::Interrupted,
        _ => ErrorKind::Other,
    }
}

fn of_quantize(error: &nq_quantize::Error) -> ErrorKind {
    match error {
        nq_quantize::Error::Format(e) => of_format(e),
        nq_quantize::Error::Runtime(e) => of_run(e),
        nq_quantize::Error::Evals(e) => of_evaluation(e),
        nq_quantize::Error::Request { .. } => ErrorKind::Argument,
        nq_quantize::Error::Guard { .. } => ErrorKind::Quality,
        _ => ErrorKind::Other,
    }
}

fn of_evaluation(error: &nq_evals::Error) -> ErrorKind {
    match error {
        nq_evals::Error::Runtime(e) => of_run(e),
        nq_evals::Error::Spec { .. } | nq_evals::Error::TextTooShort { .. } => ErrorKind::Argument,
        _ => ErrorKind::Other,
    }
}
