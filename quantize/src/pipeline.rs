//! From an unquantized checkpoint to a quantized folder, one layer at a time.
//!
//! The residual stream of all calibration sequences is kept between layers. Each layer is run
//! with its original weights over what the *quantized* layers before it made of the text, to
//! gather statistics of its inputs; then it is rounded, staged on disk, and run again as
//! rounded. Only one layer is ever held in f32.
//!
//! Every finished step is staged durably, so that a killed run goes on where it stopped and
//! ends in the same bytes.

use crate::calibration::{self, CalibrationSource, Prompter, Sequences};
use crate::error::{Error, Result};
use crate::fit::Fit;
use crate::grid::Grid;
use crate::layers::{self, Pass};
use crate::linalg::Moments;
use crate::memory;
use crate::methods::{self, Method, Needs, rtn};
use crate::quality::{self, Limits, Measured};
use crate::report::{LayerReport, QuantizeReport};
use crate::schemes::Schemes;
use nq_formats::nq::{Opened, Param, QuantizationRecord, SourceRecord, Writer, WriterOptions};
use nq_formats::{Bits, Checkpoint, ModelConfig, Progress, Unit, Weight, hash};
use nq_kernels::reference;
use nq_runtime::models::qwen3::{self, EMBEDDING, FINAL_NORM, HEAD};
use nq_runtime::{
    ActivationChoice, Hidden, KvType, LayerStepper, LayerWeights, LinearId, LinearKind,
    LoadOptions, load,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
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

/// Seeds of held-out text differ from those of calibration text by this.
const HELD_OUT: u64 = 0x9E37_79B9_7F4A_7C15;

/// A quantization about to be run.
pub struct Job<'a> {
    checkpoint: &'a Checkpoint,
    options: &'a QuantizeOptions,
    method: Box<dyn Method>,
    progress: &'a dyn Progress,
}

/// Where a run is: what it must know after being killed, beside the staged weights.
#[derive(Debug, Default, Serialize, Deserialize)]
struct State {
    /// Calibration text, one string of ids for each sequence.
    calibration: Option<Text>,
    /// Held-out text.
    held_out: Option<Text>,
    /// Reports of finished steps, by name.
    steps: BTreeMap<String, Step>,
}

/// Sequences as they are kept in the state.
#[derive(Debug, Serialize, Deserialize)]
struct Text {
    name: String,
    ids: Vec<String>,
}

/// What a step reports.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Step {
    rows: Vec<LayerReport>,
    fallbacks: Vec<String>,
}

impl Text {
    fn new(sequences: &Sequences) -> Self {
        let join = |s: &Vec<u32>| {
            let words: Vec<String> = s.iter().map(u32::to_string).collect();
            words.join(" ")
        };
        Text {
            name: sequences.name.clone(),
            ids: sequences.ids.iter().map(join).collect(),
        }
    }

    fn sequences(&self) -> Option<Sequences> {
        let parse = |s: &String| s.split(' ').map(|w| w.parse().ok()).collect();
        Some(Sequences {
            name: self.name.clone(),
            ids: self.ids.iter().map(parse).collect::<Option<_>>()?,
        })
    }
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
        if !layers::is_dense(&first) {
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
        memory::Estimate::new(
            self.checkpoint,
            &self.options.schemes,
            self.method.needs(),
            n * length,
            self.options.calibration == CalibrationSource::SelfSampled,
        )
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
        let stream = self.quantize_layers(&writer, &mut state, calibration.as_ref())?;
        self.quantize_ends(&writer, &mut state, stream)?;

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

    /// Calibration text and held-out text, from the state or made anew. Either is `None` if
    /// it is not needed.
    fn texts(
        &self,
        writer: &Writer,
        state: &mut State,
    ) -> Result<(Option<Sequences>, Option<Sequences>)> {
        let o = self.options;
        let (n, length) = self.shape();
        let mut calibration = state.calibration.as_ref().and_then(Text::sequences);
        let mut held_out = state.held_out.as_ref().and_then(Text::sequences);
        let sample_calibration =
            n > 0 && calibration.is_none() && o.calibration == CalibrationSource::SelfSampled;
        let sample_held_out = o.eval_text.is_none() && held_out.is_none();
        let mut prompter = None;
        if n > 0 || sample_held_out {
            let eos = self.checkpoint.eos_token_ids();
            let vocab = self.config().vocab_size;
            let files = self.checkpoint.files();
            prompter = Some(Prompter::new(files, vocab, eos, self.progress)?);
        }
        let Some(prompter) = prompter else {
            return Ok((None, held_out));
        };
        if let (CalibrationSource::File(path), None) = (&o.calibration, &calibration)
            && n > 0
        {
            calibration = Some(calibration::read(path, &prompter, (n, length))?);
        }
        if sample_calibration || sample_held_out {
            let engine = self.source_engine()?;
            let sample = |stage, shape, seed| {
                calibration::sample(
                    engine.as_ref(),
                    &prompter,
                    stage,
                    shape,
                    seed,
                    self.progress,
                )
            };
            if sample_calibration {
                calibration = Some(sample("sampling calibration text", (n, length), o.seed)?);
            }
            if sample_held_out {
                let shape = quality::held_out_shape(self.config(), o.eval_tokens);
                held_out = Some(sample("sampling held-out text", shape, o.seed ^ HELD_OUT)?);
            }
        }
        if state.calibration.is_none() || state.held_out.is_none() {
            state.calibration = calibration.as_ref().map(Text::new);
            state.held_out = held_out.as_ref().map(Text::new);
            save(writer, state)?;
        }
        Ok((calibration, held_out))
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

    /// Quantizes and stages every layer that is not staged yet. Returns the residual stream
    /// after the last, if the method needs to see inputs.
    fn quantize_layers(
        &self,
        writer: &Writer,
        state: &mut State,
        calibration: Option<&Sequences>,
    ) -> Result<Option<Hidden>> {
        let (config, store) = (self.config(), self.checkpoint.store());
        let layers = config.num_hidden_layers;
        // Statistics and products do not depend on rounding of activations; what the layers
        // pass on is what the weights alone make of the text.
        let options = LoadOptions {
            activations: ActivationChoice::F32,
            ..self.options.load
        };
        let mut stepper = load::stepper(config, &options, KvType::F16)?;
        let mut stream = match calibration {
            Some(text) => {
                let embedding = qwen3::embedding(store, config)?;
                let (embedding, _) = self.end(EMBEDDING, &embedding, &[])?;
                Some(stepper.embed(&embedding, &text.ids)?)
            }
            None => None,
        };
        let tokens = calibration.map_or(0, Sequences::tokens) as u64;
        let share = tokens.max(LinearKind::ALL.len() as u64); // of a layer's rounding
        let total = layers as u64 * (2 * tokens + share);
        self.progress
            .begin("quantizing layers", total, Unit::Tokens);
        for index in 0..layers {
            let step = format!("layer-{index:03}");
            let weights = match writer.staged(&step)? {
                Some(staged) => {
                    self.progress.advance(tokens + share);
                    staged_layer(&staged, config, index)?
                }
                None => {
                    let done =
                        self.quantize_layer(index, stream.as_ref(), stepper.as_mut(), share)?;
                    for f in &done.fallbacks {
                        self.progress.note(f);
                    }
                    let report = Step {
                        rows: done.rows,
                        fallbacks: done.fallbacks,
                    };
                    // The report before the weights: a step that is staged has one.
                    state.steps.insert(step.clone(), report);
                    save(writer, state)?;
                    writer.put(&step, &params(index, &done.weights))?;
                    done.weights
                }
            };
            if let Some(stream) = &mut stream {
                let mut pass = Pass {
                    width: config.hidden_size,
                    progress: self.progress,
                };
                stepper.layer(index, &weights, stream, &mut pass)?;
            }
        }
        self.progress.end();
        Ok(stream)
    }

    fn quantize_layer(
        &self,
        index: usize,
        stream: Option<&Hidden>,
        stepper: &mut dyn LayerStepper,
        share: u64,
    ) -> Result<layers::Quantized> {
        let (config, store) = (self.config(), self.checkpoint.store());
        let source = LayerWeights::read(store, config, index)?;
        let stats = match stream {
            Some(hidden) => Some(layers::gather(
                stepper,
                index,
                &source,
                hidden,
                self.method.needs(),
                self.progress,
            )?),
            None => None,
        };
        let elements = |k: LinearKind| (k.dims(config).0 * k.dims(config).1) as u64;
        let all: u64 = LinearKind::ALL.into_iter().map(elements).sum();
        let (mut seen, mut reported) = (0, 0);
        layers::quantize(
            self.method.as_ref(),
            index,
            &source,
            stats,
            &self.options.schemes.grids(index)?,
            config,
            |kind| {
                seen += elements(kind);
                let at = (u128::from(share) * u128::from(seen) / u128::from(all)) as u64;
                self.progress.advance(at - reported);
                reported = at;
            },
        )
    }

    /// Quantizes and stages the final norm, the embedding and the head.
    fn quantize_ends(
        &self,
        writer: &Writer,
        state: &mut State,
        stream: Option<Hidden>,
    ) -> Result<()> {
        const STEP: &str = "ends";
        if writer.staged(STEP)?.is_some() {
            return Ok(());
        }
        let (config, store) = (self.config(), self.checkpoint.store());
        let norm = store.vector(FINAL_NORM, config.hidden_size)?;
        let importance = match stream {
            Some(stream) => head_squares(&stream, &norm.to_f32()?, config.rms_norm_eps),
            None => Vec::new(),
        };
        let embedding = qwen3::embedding(store, config)?;
        let mut names = vec![(EMBEDDING, embedding)];
        if !config.tie_word_embeddings {
            names.push((HEAD, qwen3::head(store, config)?));
        }
        let mut report = Step::default();
        let mut weights = Vec::new();
        for (name, source) in names {
            // An embedding that is no head is only looked up: all its columns are alike.
            let looked_up = name == EMBEDDING && !config.tie_word_embeddings;
            let importance = if looked_up { &[][..] } else { &importance };
            let (weight, row) = self.end(name, &source, importance)?;
            report.rows.push(row);
            weights.push((name, weight));
        }
        state.steps.insert(STEP.into(), report);
        save(writer, state)?;
        let mut params = vec![(FINAL_NORM.to_owned(), Param::Vector(&norm))];
        for (name, weight) in &weights {
            params.push(((*name).to_owned(), Param::Matrix(weight)));
        }
        Ok(writer.put(STEP, &params)?)
    }

    /// The embedding or head as it will be written.
    fn end(
        &self,
        name: &str,
        source: &Weight,
        importance: &[f32],
    ) -> Result<(Weight, LayerReport)> {
        let mut row = LayerReport {
            name: name.into(),
            bits: 16,
            method: "kept".into(),
            rel_error: 0.0,
            output_error: None,
        };
        let Some(scheme) = self.options.schemes.of(name) else {
            return Ok((source.clone(), row));
        };
        let fit = Fit::clip();
        let (weight, rel_error) =
            rtn::round_rows(name, source, Grid::new(scheme)?, fit, importance)?;
        (row.bits, row.method, row.rel_error) = (scheme.bits.into(), "rtn-clip".into(), rel_error);
        Ok((weight, row))
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

fn save(writer: &Writer, state: &State) -> Result<()> {
    let value = serde_json::to_value(state).expect("string keys and finite numbers");
    Ok(writer.set_state(&value)?)
}

/// A layer's parameters by name.
fn params(index: usize, w: &LayerWeights) -> Vec<(String, Param<'_>)> {
    let norm = |name: &str, t| (format!("model.layers.{index}.{name}"), Param::Vector(t));
    let mut all = vec![
        norm("input_layernorm", &w.input_norm),
        norm("post_attention_layernorm", &w.post_attention_norm),
        norm("self_attn.q_norm", &w.q_norm),
        norm("self_attn.k_norm", &w.k_norm),
    ];
    for kind in LinearKind::ALL {
        let name = LinearId { layer: index, kind }.to_string();
        all.push((name, Param::Matrix(w.linear(kind))));
    }
    all
}

/// A layer as it was staged.
fn staged_layer(
    staged: &nq_formats::nq::Staged,
    config: &ModelConfig,
    index: usize,
) -> Result<LayerWeights> {
    let linear = |kind: LinearKind| {
        let name = LinearId { layer: index, kind }.to_string();
        staged.matrix(&name, kind.dims(config))
    };
    let norm = |name: &str, len| staged.vector(&format!("model.layers.{index}.{name}"), len);
    let [q, k, v, o, gate, up, down] = LinearKind::ALL.map(linear);
    Ok(LayerWeights {
        linears: [q?, k?, v?, o?, gate?, up?, down?],
        input_norm: norm("input_layernorm", config.hidden_size)?,
        post_attention_norm: norm("post_attention_layernorm", config.hidden_size)?,
        q_norm: norm("self_attn.q_norm", config.head_dim)?,
        k_norm: norm("self_attn.k_norm", config.head_dim)?,
    })
}

/// `E[x^2]` of the head's inputs.
fn head_squares(stream: &Hidden, norm: &[f32], eps: f32) -> Vec<f32> {
    const ROWS: usize = 256;
    let n = norm.len();
    let mut moments = Moments::new(n, false);
    let mut normed = vec![0.0; ROWS * n];
    for x in stream.data.chunks(ROWS * n) {
        let y = &mut normed[..x.len()];
        reference::rms_norm(x, norm, eps, y);
        moments.add(y);
    }
    moments.finish().mean_square
}
