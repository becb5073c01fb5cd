//! nq's errors as Python's exceptions.

use nq_llm::{nq_evals, nq_formats, nq_quantize, nq_runtime};
use pyo3::PyErr;
use pyo3::exceptions::{PyException, PyValueError};
use std::io;

pyo3::create_exception!(
    nq,
    Error,
    PyException,
    "What went wrong, with the file, tensor or setting, what was expected and what was found."
);

/// An error as the exception that fits: of the operating system's `OSError` and its kinds, of an argument
/// `ValueError`, otherwise `nq.Error`.
pub(crate) fn to_python(error: nq_llm::Error) -> PyErr {
    let text = error.to_string();
    match cause(&error) {
        Cause::System(kind) => io::Error::new(kind, text).into(),
        Cause::Argument => PyValueError::new_err(text),
        Cause::Other => Error::new_err(text),
    }
}

enum Cause {
    System(io::ErrorKind),
    Argument,
    Other,
}

fn cause(error: &nq_llm::Error) -> Cause {
    match error {
        nq_llm::Error::Format(e) => of_format(e),
        nq_llm::Error::Run(e) => of_run(e),
        nq_llm::Error::Quantize(e) => match &**e {
            nq_quantize::Error::Format(e) => of_format(e),
            nq_quantize::Error::Runtime(e) => of_run(e),
            nq_quantize::Error::Io { cause, .. } => Cause::System(cause.kind()),
            nq_quantize::Error::Request { .. } => Cause::Argument,
            _ => Cause::Other,
        },
        nq_llm::Error::Evaluate(e) => match e {
            nq_evals::Error::Runtime(e) => of_run(e),
            nq_evals::Error::Spec { .. } | nq_evals::Error::TextTooShort { .. } => Cause::Argument,
            _ => Cause::Other,
        },
        _ => Cause::Other,
    }
}

fn of_format(error: &nq_formats::Error) -> Cause {
    match error {
        nq_formats::Error::Io { cause, .. } => Cause::System(cause.kind()),
        nq_formats::Error::Missing { .. } => Cause::System(io::ErrorKind::NotFound),
        nq_formats::Error::Exists { .. } => Cause::System(io::ErrorKind::AlreadyExists),
        _ => Cause::Other,
    }
}

fn of_run(error: &nq_runtime::Error) -> Cause {
    match error {
        nq_runtime::Error::Format(e) => of_format(e),
        nq_runtime::Error::Request { .. } => Cause::Argument,
        _ => Cause::Other,
    }
}
