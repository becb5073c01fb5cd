//! nq's errors as Python's exceptions.

use nq_llm::ErrorKind;
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
    match error.kind() {
        ErrorKind::System(kind) => io::Error::new(kind, text).into(),
        ErrorKind::Argument => PyValueError::new_err(text),
        _ => Error::new_err(text),
    }
}
