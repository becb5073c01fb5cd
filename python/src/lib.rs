//! The native part of the Python package `nq`, whose functions `nq/__init__.py` documents and gives types: over
//! `nq-llm`'s interface for programs, without Python's lock while it computes.

#![forbid(unsafe_code)]

mod error;
mod model;
mod stream;
mod watch;

use std::ffi::OsString;
use std::io;
use std::process::Command;
use std::sync::OnceLock;

/// The command that starts a process which calls `serve_templates`.
static TEMPLATES: OnceLock<Vec<OsString>> = OnceLock::new();

fn template_process() -> io::Result<Command> {
    let words = TEMPLATES.get().map_or(&[][..], Vec::as_slice);
    let (program, arguments) = words
        .split_first()
        .ok_or_else(|| io::Error::other("no Python interpreter is known"))?;
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}

#[pyo3::pymodule(name = "_nq")]
mod module {
    use super::{TEMPLATES, template_process};
    use crate::watch::{Reporter, watched};
    use nq_llm::{
        Codes, DeviceChoice, Effort, QualityLimits, QuantizeOptions, TargetSize, TuneOptions,
    };
    use pyo3::exceptions::PyValueError;
    use pyo3::prelude::*;
    use std::ffi::OsString;
    use std::io::Write;
    use std::path::PathBuf;
    use std::sync::atomic::AtomicBool;

    #[pymodule_export]
    use crate::error::Error;
    #[pymodule_export]
    use crate::model::PyModel;
    #[pymodule_export]
    use crate::stream::Stream;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name that Python's packages use")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    /// How a model is quantized: the arguments of `nq.quantize`.
    #[derive(FromPyObject)]
    #[pyo3(from_item_all)]
    struct Quantization {
        bits: f32,
        trellis: Option<String>,
        method: String,
        simple: bool,
        force: bool,
        resume: bool,
        measure: bool,
        max_kld: Option<f64>,
        min_top1: Option<f64>,
        target_bytes: Option<u64>,
        target_bpw: Option<f64>,
        calib_tokens: Option<usize>,
        eval_tokens: Option<usize>,
        seed: u64,
        device: String,
        threads: Option<usize>,
    }

    impl Quantization {
        fn apply(&self, device: DeviceChoice, options: &mut QuantizeOptions) {
            // "auto" is gptq and tuning, as on the command line.
            let tuned = self.method == "auto";
            options.method = if tuned { "gptq" } else { &self.method }.into();
            options.tuning = tuned.then_some(TuneOptions {
                effort: Effort::Default,
            });
            let bytes = self.target_bytes.map(TargetSize::Bytes);
            options.target = bytes.or(self.target_bpw.map(TargetSize::BitsPerWeight));
            if self.simple || options.target.is_some() {
                options.simple();
            }
            options.force = self.force;
            options.resume = self.resume;
            options.measure = self.measure;
            options.limits = QualityLimits {
                max_kld: self.max_kld,
                min_top1: self.min_top1,
            };
            options.calib_tokens = self.calib_tokens;
            options.eval_tokens = self.eval_tokens;
            options.seed = self.seed;
            options.load.device = device;
            options.load.threads = self.threads;
        }
    }

    /// Quantizes `source` into the folder `out`; the report as JSON.
    #[pyfunction]
    fn quantize(
        py: Python<'_>,
        source: PathBuf,
        out: PathBuf,
        how: Quantization,
        report: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let codes = Codes::of_names(how.bits, how.trellis.as_deref());
        let codes = codes.map_err(|e| PyValueError::new_err(e.to_string()))?;
        let device = how.device.parse().map_err(PyValueError::new_err)?;
        let interrupt = AtomicBool::new(false);
        let work = |progress: &Reporter<'_>| {
            let change = |options: &mut QuantizeOptions| how.apply(device, options);
            nq_llm::quantize_with(source, out, codes, change, progress)
        };
        let made = watched(py, &interrupt, report, work)?;
        serde_json::to_string(&made).map_err(|e| PyValueError::new_err(e.to_string()))
    }

    /// Runs the program `nq` with a command line, and ends the process.
    #[pyfunction]
    fn main(py: Python<'_>, command_line: Vec<OsString>) {
        py.detach(|| {
            let code = nq_llm::program(command_line);
            // What cannot be written was reported where it was printed.
            let _ = std::io::stdout().flush();
            std::process::exit(code.into())
        })
    }

    /// Renders chat templates in processes that `command` starts and that call `serve_templates`.
    #[pyfunction]
    fn isolate_templates(command: Vec<OsString>) {
        if TEMPLATES.set(command).is_ok() {
            nq_llm::isolate_templates_by(template_process);
        }
    }

    /// Renders chat templates until standard input ends, and ends the process.
    #[pyfunction]
    fn serve_templates(py: Python<'_>) {
        py.detach(|| nq_llm::serve_templates())
    }
}
