//! The native part of the Python package `nq`, whose functions `nq/__init__.py` documents and gives types: over
//! `nq-llm`'s interface for programs, without Python's lock while it computes.

#![forbid(unsafe_code)]

mod error;
mod model;
mod question;
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
        AdapterFile, CalibrationSource, Codes, DeviceChoice, Effort, ExportFormat, QualityLimits,
        QuantizeOptions, QuantizeSource, Recipe, TargetSize, TuneOptions, Zeros, group_named,
    };
    use pyo3::exceptions::PyValueError;
    use pyo3::prelude::*;
    use std::ffi::OsString;
    use std::io::Write;
    use std::path::PathBuf;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    /// The method that is gptq and tuning, as on the command line.
    const AUTO: &str = "auto";

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
        clip: bool,
        simple: bool,
        group_size: Option<String>,
        zero_points: Option<bool>,
        head_bits: Option<u32>,
        format: String,
        adapters: Vec<(PathBuf, f64)>,
        force: bool,
        resume: bool,
        measure: bool,
        max_kld: Option<f64>,
        min_top1: Option<f64>,
        target_bytes: Option<u64>,
        target_bpw: Option<f64>,
        calib: Option<PathBuf>,
        calib_tokens: Option<usize>,
        eval_text: Option<PathBuf>,
        eval_tokens: Option<usize>,
        budget: Option<f64>,
        tune_steps: Option<usize>,
        tune_batch: usize,
        device_memory: Option<u64>,
        seed: u64,
        device: String,
        threads: Option<usize>,
    }

    impl Quantization {
        /// How long the result is tuned, if it is.
        fn tuning(&self) -> PyResult<Option<TuneOptions>> {
            let refused = |why: &str| Err(PyValueError::new_err(why.to_owned()));
            let effort = match (self.budget, self.tune_steps) {
                (None, None) => Effort::Default,
                (Some(_), Some(_)) => return refused("expected budget or tune_steps, found both"),
                (Some(minutes), None) => match Duration::try_from_secs_f64(60.0 * minutes) {
                    Ok(time) if !time.is_zero() => Effort::Budget(time),
                    _ => return refused("budget: expected minutes, more than 0"),
                },
                (None, Some(steps)) if steps > 0 && self.tune_batch > 0 => Effort::Steps {
                    steps,
                    batch: self.tune_batch,
                },
                (None, Some(_)) => return refused("tune_steps, tune_batch: expected more than 0"),
            };
            let asked = self.budget.is_some() || self.tune_steps.is_some();
            match self.method == AUTO {
                true => Ok(Some(TuneOptions { effort })),
                false if asked => refused("budget and tune_steps are for method=\"auto\""),
                false => Ok(None),
            }
        }

        fn recipe(&self) -> PyResult<Recipe> {
            let wrong = |e: String| PyValueError::new_err(e);
            let codes = Codes::of_names(self.bits, self.trellis.as_deref());
            let bytes = self.target_bytes.map(TargetSize::Bytes);
            let format = self.format.parse::<ExportFormat>();
            let group = self.group_size.as_deref().map(|word| {
                let group = group_named(word);
                group.ok_or_else(|| wrong("group_size: expected 32, 64, 128 or channel".into()))
            });
            let recipe = Recipe {
                format: format.map_err(|e| wrong(e.to_string()))?,
                tuning: self.tuning()?,
                simple: self.simple,
                group: group.transpose()?,
                zeros: self.zero_points.map(|some| match some {
                    true => Zeros::Integer,
                    false => Zeros::None,
                }),
                head_bits: self.head_bits,
                target: bytes.or(self.target_bpw.map(TargetSize::BitsPerWeight)),
                ..codes.map_err(|e| wrong(e.to_string()))?.into()
            };
            recipe.check().map_err(|e| wrong(e.to_string()))?;
            Ok(recipe)
        }

        fn apply(&self, device: DeviceChoice, options: &mut QuantizeOptions) {
            options.method = match (self.method.as_str(), self.clip) {
                (AUTO, _) => "gptq",
                ("rtn", true) => "rtn-clip",
                (method, _) => method,
            }
            .into();
            options.force = self.force;
            options.resume = self.resume;
            options.measure = self.measure;
            options.limits = QualityLimits {
                max_kld: self.max_kld,
                min_top1: self.min_top1,
            };
            if let Some(file) = &self.calib {
                options.calibration = CalibrationSource::File(file.clone());
            }
            options.calib_tokens = self.calib_tokens;
            options.eval_text.clone_from(&self.eval_text);
            options.device_memory = self.device_memory;
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
        let recipe = how.recipe()?;
        let adapters = how.adapters.iter().cloned();
        let adapters: Vec<_> = adapters
            .map(|(path, weight)| AdapterFile { path, weight })
            .collect();
        let device = how.device.parse().map_err(PyValueError::new_err)?;
        let interrupt = AtomicBool::new(false);
        let work = |progress: &Reporter<'_>| {
            let source = QuantizeSource {
                adapters: &adapters,
                ..source.as_path().into()
            };
            let change = |options: &mut QuantizeOptions| how.apply(device, options);
            nq_llm::quantize_with(source, out, recipe, change, progress)
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
