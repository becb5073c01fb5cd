//! From an unquantized checkpoint to a quantized folder, one layer at a time.
//!
//! The residual stream of all calibration sequences is kept between layers. Each layer is run
//! with its original weights over what the *quantized* layers before it made of the text, to
//! gather statistics of its inputs; then it is rounded, staged on disk, and run again as
//! rounded. Only one layer is ever held in f32.
//!
//! Every finished step is staged durably, so that a killed run goes on where it stopped and
//! ends in the same bytes.

mod ends;
mod layers;
mod state;
mod texts;

use crate::calibration::{CalibrationSource, Sequences};
use crate::error::{Error, Result};
use crate::memory;
use crate::methods::{self, Method, Needs};
use crate::quality::{self, Limits, Measured};
use crate::report::{LayerReport, QuantizeReport};
use crate::schemes::Schemes;
use nq_formats::nq::{Opened, QuantizationRecord, SourceRecord, Writer, WriterOptions};
use nq_formats::{Bits, Checkpoint, ModelConfig, Progress, hash, mapping};
use nq_runtime::{LayerWeights, LinearKind, LoadOptions, load};
use serde_json::{Map, Value, json};
use state::{State, Step};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// What to make.
#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    /// Bits asked for, for the report.
    pub bits: Bits,
    /// Schemes of all weights.
    pub schemes: Schemes,
    /// A name of [`methods::METHODS`].
    pub method: String,
    /// Calibration text.
    pub calibration: CalibrationSource,
    /// Tokens of it.
    pub calib_tokens: usize,
    /// Of everything random.
    pub seed: u64,
    /// Limits that the measured quality must keep.
    pub limits: Limits,
    /// Text to measure quality on; `None`: held-out text sampled from the model.
    pub eval_text: Option<PathBuf>,
    /// Tokens to measure quality on, at most.
    pub eval_tokens: usize,
    /// Folder to write.
    pub out: PathBuf,
    /// Replace an existing output.
    pub force: bool,
    /// Go on with an interrupted run.
    pub resume: bool,
    /// The unquantized model, for the record; its hash is filled in.
    pub source: SourceRecord,
    /// Device, threads and activations of every run of the model.
    pub load: LoadOptions,
}

/// Tokens of a calibration sequence, at most.
pub const SEQUENCE: usize = 512;

/// A quantization about to be run.
pub struct Job<'a> {
    checkpoint: &'a Checkpoint,
    options: &'a QuantizeOptions,
    method: Box<dyn Method>,
    progress: &'a dyn Progress,
}

impl<'a> Job<'a> {
    /// Checks the request against the model.
    ///
    /// # Errors
    /// [`Error::Request`] for an unknown method, a scheme that does not fit the model, or a
    /// model that is quantized already.
    pub fn new(
        checkpoint: &'a Checkpoint,
        options: &'a QuantizeOptions,
        progress: &'a dyn Progress,
    ) -> Result<Self> {
        let method = methods::by_name(&options.method).ok_or_else(|| Error::Request {
            what: "method",
            expected: methods::METHODS
                .iter()
                .map(|m| m.name)
                .collect::<Vec<_>>()
                .join(", "),
            found: options.method.clone(),
        })?;
        options.schemes.check(checkpoint.config())?;
        let first = LayerWeights::read(checkpoint.store(), checkpoint.config(), 0)?;
        if !crate::layers::is_dense(&first) {
            return Err(Error::Request {
                what: "source",
                expected: "an unquantized model".into(),
                found: format!("{} weights", first.linear(LinearKind::Q).scheme_name()),
            });
        }
        Ok(Job {
            checkpoint,
            options,
            method,
            progress,
        })
    }

    fn config(&self) -> &ModelConfig {
        self.checkpoint.config()
    }

    /// (number, length) of calibration sequences; (0, 0) if the method needs none.
    fn shape(&self) -> (usize, usize) {
        if self.method.needs() == Needs::Nothing {
            return (0, 0);
        }
        let length = SEQUENCE.min(self.config().max_position_embeddings);
        let n = self.options.calib_tokens.div_ceil(length).max(1);
        (n, length)
    }

    /// What the run will need, before anything is done.
    pub fn estimate(&self) -> memory::Estimate {
        let (n, length) = self.shape();
        let mut sampled = 0;
        if self.options.calibration == CalibrationSource::SelfSampled {
            sampled = n;
        }
        if self.options.eval_text.is_none() {
            let (n, _) = quality::held_out_shape(self.config(), self.options.eval_tokens);
            sampled = sampled.max(n);
        }
        let work = memory::Work {
            schemes: &self.options.schemes,
            needs: self.method.needs(),
            calibration: n * length,
            sampled,
        };
        memory::Estimate::new(self.checkpoint, work)
    }

    /// Everything that decides the result, for the record and for resuming.
    fn plan(&self, source: &SourceRecord) -> Value {
        let o = self.options;
        let (n, length) = self.shape();
        let overrides: Map<String, Value> = o
            .schemes
            .overrides
            .iter()
            .map(|(name, s)| (name.clone(), json!(s)))
            .collect();
        json!({
            "source": source,
            "method": o.method,
            "linears": o.schemes.linears,
            "head": o.schemes.head,
            "overrides": overrides,
            "calibration": match &o.calibration {
                CalibrationSource::SelfSampled => "self".into(),
                CalibrationSource::File(path) => path.display().to_string(),
            },
            "sequences": n,
            "sequence_length": length,
            "seed": o.seed,
        })
    }

    /// Quantizes, measures and writes.
    ///
    /// # Errors
    /// [`Error::Guard`] if the measured quality breaks a limit: nothing is written then, but
    /// the staged work is kept. Else what reading, calibration, the method, the device or the
    /// disk report.
    pub fn run(&self) -> Result<QuantizeReport> {
        let start = Instant::now();
        let (checkpoint, options) = (self.checkpoint, self.options);
        let mut source = options.source.clone();
        if source.sha256.is_empty() {
            source.sha256 = hash::weights_sha256(checkpoint.files(), self.progress)?;
        }
        let writer_options = WriterOptions {
            resume: options.resume,
            force: options.force,
            expected_bytes: self.estimate().file_bytes,
        };
        let plan = self.plan(&source);
        let writer = match Writer::open(&options.out, checkpoint.files(), &plan, writer_options)? {
            Opened::Writer(writer) => writer,
            Opened::Complete => {
                let mut report = quality::report_of(&Checkpoint::open(&options.out)?)?;
                report.source_bytes = checkpoint.store().file_bytes();
                return Ok(report);
            }
        };
        let mut state: State = match writer.state()? {
            Some(value) => serde_json::from_value(value).unwrap_or_default(),
            None => State::default(),
        };
        let (calibration, held_out) = self.texts(&writer, &mut state)?;
        mapping::trim_heap();
        let stream = self.quantize_layers(&writer, &mut state, calibration.as_ref())?;
        self.quantize_ends(&writer, &mut state, stream)?;
        mapping::trim_heap();

        let steps: Vec<Step> = state.steps.into_values().collect();
        let mut record = QuantizationRecord {
            method: self.method.name().into(),
            settings: Map::new(),
            source,
            calibration: calibration.as_ref().map(Sequences::record),
            seed: options.seed,
            fallbacks: steps.iter().flat_map(|s| s.fallbacks.clone()).collect(),
            ..QuantizationRecord::default()
        };
        let measured = self.measure(&writer, &record, held_out.as_ref())?;
        record.quality = serde_json::to_value(&measured.evaluation.report).ok();

        let rows: Vec<LayerReport> = steps.into_iter().flat_map(|s| s.rows).collect();
        let parameters = self.config().parameters() as f64;
        let mut report = QuantizeReport {
            out: options.out.clone(),
            format: "nq".into(),
            method: record.method.clone(),
            bits: options.bits.into(),
            group_size: options.schemes.linears.group,
            bits_per_weight: 0.0,
            tensor_bytes: 0,
            file_bytes: 0,
            source_bytes: checkpoint.store().file_bytes(),
            seconds: 0.0,
            peak_rss_bytes: 0,
            estimated_peak_bytes: self.estimate().peak,
            fallbacks: record.fallbacks.clone(),
            layers: rows,
            quality: Some(measured.evaluation.report.clone()),
            worst_tokens: measured.worst,
        };
        let broken = options.limits.broken(&measured.evaluation.report);
        if !broken.is_empty() {
            report.seconds = start.elapsed().as_secs_f64();
            report.peak_rss_bytes = memory::peak_rss();
            return Err(Error::Guard {
                broken: broken.join("; "),
                worst: report.worst_layers(5).join(", "),
                out: options.out.clone(),
                report: Box::new(report),
            });
        }
        let written = writer.finish(record, self.progress)?;
        report.tensor_bytes = written.tensor_bytes;
        report.file_bytes = written.file_bytes;
        report.bits_per_weight = 8.0 * written.tensor_bytes as f64 / parameters;
        report.seconds = start.elapsed().as_secs_f64();
        report.peak_rss_bytes = memory::peak_rss();
        Ok(report)
    }

    fn source_engine(&self) -> Result<Arc<dyn nq_runtime::Engine>> {
        let (config, store) = (self.config(), self.checkpoint.store());
        Ok(load::load(
            config,
            store,
            &self.options.load,
            self.progress,
        )?)
    }

    /// Measures what is staged against the source.
    fn measure(
        &self,
        writer: &Writer,
        record: &QuantizationRecord,
        held_out: Option<&Sequences>,
    ) -> Result<Measured> {
        let preview = writer.preview(record)?;
        let engine = load::load(
            preview.config(),
            preview.store(),
            &self.options.load,
            self.progress,
        )?;
        let source = self.source_engine()?;
        quality::measure(
            engine.as_ref(),
            source.as_ref(),
            self.checkpoint.files(),
            match (&self.options.eval_text, held_out) {
                (Some(path), _) => quality::Text::File(path),
                (None, Some(text)) => quality::Text::HeldOut(text),
                (None, None) => unreachable!("sampled where no text is given"),
            },
            self.options.eval_tokens,
            self.progress,
        )
    }
}
