//! From an unquantized checkpoint to a quantized folder, one layer at a time.
//!
//! The residual stream of all calibration sequences is kept between layers. To gather statistics of
//! its inputs, each layer is run with its original weights over the stream that the *quantized*
//! layers before it produced; then it is rounded, staged on disk, and run again with its
//! rounded weights. Only one layer is ever held in f32.
//!
//! Every finished step is staged durably, so that a killed run continues where it stopped and
//! produces the same bytes.

mod device;
mod ends;
mod first_layers;
mod guard;
mod job;
mod kept;
mod layers;
mod pace;
mod pass_pace;
mod plan;
mod rehearsal;
mod search;
mod state;
mod texts;
mod tower;
mod tune;

use crate::allocation;
use crate::calibration::{CalibrationSource, Sequences};
use crate::error::{Error, Result};
use crate::linalg::read_row;
use crate::memory;
use crate::quality::{self, Measured};
use crate::recipe::TargetSize;
use crate::report::{Choice, QuantizeReport, TableLoss};
use crate::schemes::Schemes;
use crate::tables::WithTables;
use crate::train::Tuning;
use guard::Next;
pub use job::{Job, QuantizeOptions};
use nq_evals::KldStats;
use nq_formats::nq::{self, Opened, QuantizationRecord, SourceRecord, Writer, WriterOptions};
use nq_formats::{Checkpoint, Progress, Tensor, Unit, Weight, hash, mapping};
use nq_kernels::Account;
use nq_load::load;
use nq_model::Dims;
use nq_model::names::{self, Shape};
use nq_runtime::LoadOptions;
pub use plan::PlannedStage;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use state::{Attempt, State};
use std::time::Instant;
pub use tune::TuningEstimate;

/// A setting in the record of a file whose quality was not measured: false.
pub(crate) const MEASURED: &str = "measured";

impl Job<'_> {
    /// All settings that determine the result, for the record and for resuming.
    fn plan(&self, source: &SourceRecord) -> Value {
        let o = self.options;
        let (n, length) = self.shape();
        let overrides: Map<String, Value> = o
            .schemes
            .overrides
            .iter()
            .map(|(name, s)| (name.clone(), json!(s)))
            .collect();
        let mut plan = json!({
            "source": source,
            "method": self.method.name(),
            "settings": self.method.settings(),
            "linears": o.schemes.linears,
            "head": o.schemes.head,
            "overrides": overrides,
            "target": match o.target {
                None => Value::Null,
                Some(TargetSize::Bytes(n)) => json!({ "tensor_bytes": n }),
                Some(TargetSize::BitsPerWeight(x)) => json!({ "bits_per_weight": x }),
            },
            "least_bits": o.bits,
            "head_fixed": o.head_fixed,
            "calibration": match &o.calibration {
                CalibrationSource::SelfSampled => "self".into(),
                CalibrationSource::File(path) => path.display().to_string(),
                CalibrationSource::Prompts { name, prompts } => {
                    let seen = prompts.iter().flat_map(|prompt| prompt.images());
                    let digests: Vec<u8> = seen.flat_map(|placed| placed.image.digest).collect();
                    format!("{name} {}", hash::sha256_hex(&digests))
                }
            },
            "sequences": n,
            "sequence_length": length,
            "seed": o.seed,
            "tuning": o.tuning,
            "vision_8": o.vision_8,
        });
        // Plans of models without tables are those of versions that knew none, whose unfinished work can be resumed.
        if let Some(tables) = o.schemes.tables {
            plan["tables"] = json!(tables);
        }
        plan
    }

    /// Quantizes, measures and writes.
    ///
    /// # Errors
    /// [`Error::Guard`] if the measured quality misses a limit: nothing is written then, but
    /// the staged work is kept. Otherwise errors of reading, calibration, the method, the device or the
    /// disk; [`Error::NotFinite`] names the weight that made an output NaN or infinite.
    pub fn run(&self) -> Result<QuantizeReport> {
        self.made().or_else(|error| {
            if error.is_not_finite() {
                self.check_finite()?;
            }
            Err(error)
        })
    }

    /// Looks for the first weight that is not finite.
    fn check_finite(&self) -> Result<()> {
        let store = self.checkpoint.store();
        for (name, shape) in names::parameters(self.config()) {
            let (rows, weight) = match shape {
                Shape::Vector(n) => {
                    let values = store.vector(&name, n)?.to_f32()?;
                    (1, Weight::Dense(Tensor::from_f32(vec![1, n], values)?))
                }
                Shape::Matrix(rows, cols) => (rows, store.matrix(&name, Dims::new(rows, cols))?),
            };
            let cols = weight.dims().cols;
            (0..rows).into_par_iter().try_for_each_init(
                || vec![0.0; cols],
                |values, row| read_row(&name, &weight, row, values),
            )?;
            weight.release();
        }
        Ok(())
    }

    fn made(&self) -> Result<QuantizeReport> {
        let start = Instant::now();
        Account::of_all_gpus().begin();
        self.device_estimate()?;
        let (checkpoint, options) = (self.checkpoint, self.options);
        if !options.resume {
            self.announce(&self.stages()?);
        }
        self.check_reach()?;
        let mut source = options.source.clone();
        if source.sha256.is_empty() {
            source.sha256 = hash::weights_sha256(checkpoint, &self.progress)?;
        }
        let writer_options = WriterOptions {
            resume: options.resume,
            force: options.force,
            expected_bytes: self.estimate().file_bytes,
        };
        let plan = self.plan(&source);
        let mut writer =
            match Writer::open(&options.out, checkpoint.files(), &plan, writer_options)? {
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
        state.forget_missing(&writer.sets()?);
        self.say_what_is_resumed(&writer, &state);
        if options.resume {
            self.progress.resume(state.took.clone());
            let schemes = self.resumed_schemes(&state);
            let finished = self.finished(&writer, &state, &schemes)?;
            self.announce(&self.stages_after(&state, finished)?);
        }
        let (calibration, held_out) = self.texts(&writer, &mut state)?;
        mapping::trim_heap();
        let mut schemes = self.first_schemes(&writer, &mut state, calibration.as_ref())?;
        let (measured, record) = loop {
            self.enter(&mut writer, &mut state, &schemes)?;
            let (calibration, held_out) = (calibration.as_ref(), held_out.as_ref());
            let (measured, record) = self.attempt(
                &writer,
                &mut state,
                &schemes,
                &source,
                calibration,
                held_out,
            )?;
            let broken = match &measured {
                Some(measured) => options.limits.broken(&measured.evaluation.report),
                None => Vec::new(),
            };
            match self.decide(&writer, &mut state, &schemes, &broken, calibration)? {
                Next::Done => break (measured, record),
                Next::Schemes(next) => schemes = next,
                Next::Hopeless(more) => {
                    let mut report = self.report(&state, &schemes, measured.as_ref(), &record);
                    report.seconds = start.elapsed().as_secs_f64();
                    report.peak_rss_bytes = memory::peak_rss();
                    report.peak_device_bytes = Account::of_all_gpus().peak() as u64;
                    report.stages = self.progress.done();
                    return Err(Error::Guard {
                        broken: broken
                            .into_iter()
                            .chain(more)
                            .collect::<Vec<_>>()
                            .join("; "),
                        worst: report.worst_layers(5).join(", "),
                        out: options.out.clone(),
                        report: Box::new(report),
                    });
                }
            }
        };
        let mut report = self.report(&state, &schemes, measured.as_ref(), &record);
        // The disk need not hold models that were not chosen besides the result.
        writer.retain_sets(&[state.set])?;
        let written = writer.finish(record, &self.progress)?;
        report.tensor_bytes = written.tensor_bytes;
        report.file_bytes = written.file_bytes;
        let parameters = self.config().parameters() as f64;
        report.bits_per_weight = 8.0 * written.tensor_bytes as f64 / parameters;
        report.seconds = start.elapsed().as_secs_f64();
        report.peak_rss_bytes = memory::peak_rss();
        report.peak_device_bytes = Account::of_all_gpus().peak() as u64;
        report.stages = self.progress.done();
        Ok(report)
    }

    /// Makes the whole model under `schemes`, tunes it unless it could not keep the limits even then,
    /// and saves the measurement, so that no run repeats it.
    fn attempt(
        &self,
        writer: &Writer,
        state: &mut State,
        schemes: &Schemes,
        source: &SourceRecord,
        calibration: Option<&Sequences>,
        held_out: Option<&Sequences>,
    ) -> Result<(Option<Measured>, QuantizationRecord)> {
        self.prepare_tuning(writer, state, schemes)?;
        if !self.is_staged(writer, state, schemes)? {
            let stream = self.quantize_layers(writer, state, schemes, calibration)?;
            let config = self.config();
            let tables = if config.tie_word_embeddings { 1 } else { 2 };
            let rows = (tables * config.vocab_size + config.mtp_layers) as u64;
            (self.progress).begin(plan::ENDS, rows, Unit::Items);
            let ended = self.stage_tables(writer, state, schemes);
            let ended = ended.and_then(|()| self.quantize_ends(writer, state, schemes, stream));
            let ended = ended.and_then(|()| self.quantize_mtp(writer, state, schemes));
            self.progress.end();
            ended?;
        }
        self.stage_tower(writer)?;
        mapping::trim_heap();
        let measure = |state: &mut State| -> Result<(Option<Measured>, QuantizationRecord)> {
            let mut record = self.record(state, source, calibration, schemes);
            if !self.options.measure {
                record.settings.insert(MEASURED.into(), false.into());
                return Ok((None, record));
            }
            let measured = self.measure(writer, state, &record, held_out)?;
            mapping::trim_heap();
            record.quality = serde_json::to_value(&measured.evaluation.report).ok();
            Ok((Some(measured), record))
        };
        let mut untuned = None;
        if self.checks_before_tuning(state, schemes)? {
            let (measured, record) = measure(state)?;
            let found = self.found(schemes, measured.as_ref());
            if let Some(found) = found.filter(|found| !self.is_within_reach(state, found)) {
                let out_of_reach = true;
                note_attempt(
                    writer,
                    state,
                    Attempt {
                        out_of_reach,
                        ..found
                    },
                )?;
                return Ok((measured, record));
            }
            untuned = self
                .found(schemes, measured.as_ref())
                .map(|found| found.kld);
        }
        self.tune(writer, state, schemes)?;
        mapping::trim_heap();
        let (measured, record) = measure(state)?;
        if let Some(found) = self.found(schemes, measured.as_ref()) {
            note_attempt(writer, state, Attempt { untuned, ..found })?;
        }
        Ok((measured, record))
    }

    /// The attempt that records the measurement of `schemes` against the source.
    fn found(&self, schemes: &Schemes, measured: Option<&Measured>) -> Option<Attempt> {
        let found = measured?.evaluation.report.against.as_ref()?;
        Some(Attempt {
            overrides: schemes.overrides.clone(),
            bytes: self.bytes(schemes),
            kld: found.kld.mean,
            same_top1: found.same_top1,
            untuned: None,
            out_of_reach: false,
        })
    }

    /// The record that the file will contain, without its quality.
    fn record(
        &self,
        state: &State,
        source: &SourceRecord,
        calibration: Option<&Sequences>,
        schemes: &Schemes,
    ) -> QuantizationRecord {
        let mut settings = self.method.settings();
        settings.insert(nq::CODES.into(), self.options.called(schemes).into());
        if calibration.is_some() {
            let (n, length) = self.shape();
            settings.insert("sequences".into(), n.into());
            settings.insert("sequence_length".into(), length.into());
        }
        if let Some(choices) = self.choices(state, schemes) {
            settings.insert("allocation".into(), json!(choices));
        }
        if self.options.vision_8 {
            settings.insert("tower".into(), "8-bit, rtn-clip".into());
        }
        if self.config().mtp_layers > 0 {
            // No text runs through it before it is rounded.
            settings.insert("mtp".into(), "rtn-clip".into());
        }
        let tuning = state.tuning.as_ref();
        if let Some(tuning) = tuning {
            settings.insert("tuning".into(), json!(tuning));
        }
        let steps = state.steps.values();
        QuantizationRecord {
            method: tune::method_name(self.method.name(), tuning),
            settings,
            source: source.clone(),
            calibration: calibration.map(Sequences::record),
            seed: self.options.seed,
            fallbacks: (steps.flat_map(|s| s.fallbacks.clone()))
                .chain(tuning.and_then(|t| t.fallback.clone()))
                .chain(device::sampling_fallback(state.sampled_from))
                .collect(),
            ..QuantizationRecord::default()
        }
    }

    /// The table of choices, if `schemes` were chosen.
    fn choices(&self, state: &State, schemes: &Schemes) -> Option<Vec<Choice>> {
        let menus = state.menus.as_ref()?;
        if schemes.overrides == self.options.schemes.overrides {
            return None;
        }
        let chosen = allocation::chosen_by(schemes, menus);
        Some(allocation::choices(menus, &chosen))
    }

    /// The report of the staged model, without the file's size and the cost of the run.
    fn report(
        &self,
        state: &State,
        schemes: &Schemes,
        measured: Option<&Measured>,
        record: &QuantizationRecord,
    ) -> QuantizeReport {
        let rows = state.steps.values().flat_map(|s| s.rows.clone()).collect();
        QuantizeReport {
            out: self.options.out.clone(),
            format: "nq".into(),
            method: record.method.clone(),
            codes: record.codes(),
            bits: self.options.bits.ceil() as u32,
            group_size: self.options.schemes.linears.group(),
            bits_per_weight: 0.0,
            tensor_bytes: 0,
            file_bytes: 0,
            source_bytes: self.checkpoint.store().file_bytes(),
            seconds: 0.0,
            peak_rss_bytes: 0,
            peak_device_bytes: 0,
            estimated_device_bytes: self.announced_device_bytes(state),
            stages: Vec::new(),
            estimated_peak_bytes: self.estimate().peak,
            fallbacks: record.fallbacks.clone(),
            layers: rows,
            quality: measured.map(|m| m.evaluation.report.clone()),
            worst_tokens: measured.map(|m| m.worst.clone()).unwrap_or_default(),
            allocation: self.choices(state, schemes).unwrap_or_default(),
            tuning: state.tuning.as_ref().and_then(Tuning::report),
            self_noise: state.noise,
            table_loss: state.table_loss,
        }
    }

    /// Tells which stages are to come.
    fn announce(&self, stages: &[PlannedStage]) {
        let stages: Vec<_> = stages.iter().map(|s| (s.name, s.seconds)).collect();
        self.progress.plan(&stages);
    }

    /// The schemes that a resumed run was at.
    fn resumed_schemes(&self, state: &State) -> Schemes {
        Schemes {
            overrides: (state.overrides.clone())
                .unwrap_or_else(|| self.options.schemes.overrides.clone()),
            ..self.options.schemes.clone()
        }
    }

    /// Reports how much is resumed, or that there is nothing to resume.
    fn say_what_is_resumed(&self, writer: &Writer, state: &State) {
        let folder = writer.staging().display();
        if writer.resumed() {
            let valid = state.steps.values().filter(|s| !s.key.is_empty());
            let config = self.config();
            let (steps, all) = (valid.count(), kept::steps(config));
            let measured = match state.attempts.len() {
                0 => String::new(),
                1 => ", 1 model measured".into(),
                n => format!(", {n} models measured"),
            };
            self.progress.note(&format!(
                "resuming from {folder}: {steps} of {all} steps done{measured}"
            ));
        } else if self.options.resume {
            self.progress.note(&format!(
                "--resume: no unfinished work in {folder}, so this run starts from the beginning"
            ));
        }
    }

    /// Measures the staged model against the source, and, once, the source against itself.
    fn measure(
        &self,
        writer: &Writer,
        state: &mut State,
        record: &QuantizationRecord,
        held_out: Option<&Sequences>,
    ) -> Result<Measured> {
        let text = match (&self.options.eval_text, held_out) {
            (Some(path), _) => quality::Text::File(path),
            (None, Some(text)) => quality::Text::HeldOut(text),
            (None, None) => unreachable!("sampled where no text is given"),
        };
        let files = self.checkpoint.files();
        let judge = quality::Judge::new(self.config(), files, text, self.eval_tokens())?;
        let source = match self.streamed_source(&judge)? {
            Some(source) => source,
            None => self.source_engine()?,
        };
        if state.noise.is_none() && !self.is_streamed()? {
            state.noise = Some(judge.noise(source.as_ref(), &self.progress)?);
            state::save(writer, state)?;
        }
        let preview = writer.preview(record)?;
        let options = self.measuring_options(state)?;
        let (config, store) = (preview.config(), preview.store());
        let engine = load(config, store, &options, &self.progress)?;
        let measured = judge.measure(engine.as_ref(), source.as_ref(), &self.progress)?;
        drop(engine);
        if self.options.schemes.tables.is_some() {
            // A source that is run layer by layer cannot be run with other tables.
            let body = WithTables::new(store, self.checkpoint.store());
            let tables = WithTables::new(self.checkpoint.store(), store);
            let kld =
                |weights: &WithTables<'_>, options: &LoadOptions| -> Result<Option<KldStats>> {
                    mapping::trim_heap();
                    let engine = load(config, weights, options, &self.progress)?;
                    let found = judge.measure(engine.as_ref(), source.as_ref(), &self.progress)?;
                    Ok(found.evaluation.report.against.map(|against| against.kld))
                };
            state.table_loss = Some(TableLoss {
                body: kld(&body, &options)?,
                tables: match self.is_streamed()? {
                    true => None,
                    false => kld(&tables, &self.options.load)?,
                },
            });
            state::save(writer, state)?;
        }
        Ok(measured)
    }
}

/// Saves an attempt, replacing an earlier one with the same schemes.
fn note_attempt(writer: &Writer, state: &mut State, attempt: Attempt) -> Result<()> {
    let same = |a: &Attempt| a.overrides == attempt.overrides;
    match state.attempts.iter().position(same) {
        // Measured again: nothing new, unless it was tuned this time.
        Some(i) if !state.attempts[i].out_of_reach => return Ok(()),
        Some(i) => state.attempts[i] = attempt,
        None => state.attempts.push(attempt),
    }
    state::save(writer, state)
}
