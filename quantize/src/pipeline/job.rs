//! A quantization to be run: the request, checked against the model.

use crate::calibration::{self, CALIBRATION_TOKENS, CalibrationSource, EVAL_TOKENS, SEQUENCE};
use crate::device_memory::DeviceEstimate;
use crate::error::{Error, Result};
use crate::groups;
use crate::memory;
use crate::methods::{self, Method, Needs};
use crate::quality::{self, QualityLimits};
use crate::recipe::{Recipe, TargetSize};
use crate::schemes::Schemes;
use crate::stages::Stages;
use crate::train::{TuneOptions, refused, untrainable};
use nq_formats::nq::SourceRecord;
use nq_formats::{Checkpoint, Progress, Scheme};
use nq_load::device::Device;
use nq_load::load;
use nq_model::ModelConfig;
use nq_runtime::{LayerWeights, LoadOptions};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// What a device is refused for that cannot quantize.
const QUANTIZING: &str = "quantizing";

/// Options of a quantization.
#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    /// Bits of a code requested, for the report.
    pub bits: f32,
    /// Schemes of all weights. If `target` or a missed limit requires others, these still apply to
    /// weights whose scheme cannot be chosen.
    pub schemes: Schemes,
    /// The schemes among which weights can choose: nq's own of `bits` and more, or those of the output format.
    /// If empty, a missed limit fails the run at once.
    pub candidates: Vec<Scheme>,
    /// A size for which the schemes of all weights are chosen by measured sensitivity.
    pub target: Option<TargetSize>,
    /// Keeps `schemes.head` for the embedding and head, whatever is chosen for the other weights.
    pub head_fixed: bool,
    /// 8-bit codes in the Linears of the tower that sees images; else it stays as it is.
    pub vision_8: bool,
    /// A name of [`methods::METHODS`].
    pub method: String,
    /// Calibration text.
    pub calibration: CalibrationSource,
    /// Number of calibration tokens; `None`: 32,768 on a GPU, `default_tokens` on the CPU.
    pub calib_tokens: Option<usize>,
    /// Tuning of the method's result against the source's logits.
    pub tuning: Option<TuneOptions>,
    /// Seed of everything random.
    pub seed: u64,
    /// Limits on the measured quality.
    pub limits: QualityLimits,
    /// Measures the quality of the result. If not, the file says so.
    pub measure: bool,
    /// Text for measuring quality; `None`: held-out text sampled from the model.
    pub eval_text: Option<PathBuf>,
    /// Most tokens for measuring quality; `None`: half as many as are calibrated on by default, at most 8,192.
    pub eval_tokens: Option<usize>,
    /// Folder to write.
    pub out: PathBuf,
    /// Replaces an existing output.
    pub force: bool,
    /// Continues an interrupted run.
    pub resume: bool,
    /// The unquantized model, for the record; its hash is filled in.
    pub source: SourceRecord,
    /// Device, threads and activations of every run of the model.
    pub load: LoadOptions,
    /// Bytes of GPU memory that may be used; `None`: all that is free.
    pub device_memory: Option<u64>,
}

impl QuantizeOptions {
    /// The options of `nq quantize` for a model of this shape, on the first GPU or else the CPU. Of bits or codes alone,
    /// those of `nq quantize --bits BITS --out OUT`: at fewer than 8 bits a mix of schemes.
    ///
    /// # Errors
    /// [`Error::Request`] and [`Error::Format`] for a recipe that contradicts itself or that its format cannot hold; none
    /// for bits alone.
    pub fn new(
        config: &ModelConfig,
        recipe: impl Into<Recipe>,
        out: impl Into<PathBuf>,
    ) -> Result<Self> {
        let recipe = recipe.into();
        recipe.check()?;
        let (schemes, candidates) = recipe.schemes(config)?;
        Ok(QuantizeOptions {
            bits: recipe.codes.bits(),
            schemes,
            candidates,
            target: recipe.target,
            head_fixed: recipe.head_bits.is_some(),
            vision_8: recipe.vision_8,
            method: "gptq".into(),
            calibration: CalibrationSource::SelfSampled,
            calib_tokens: None,
            tuning: recipe.tuning,
            seed: 0,
            limits: QualityLimits::default(),
            measure: true,
            eval_text: None,
            eval_tokens: None,
            out: out.into(),
            force: false,
            resume: false,
            source: SourceRecord::default(),
            load: LoadOptions::default(),
            device_memory: None,
        })
    }

    /// What the codes of a result in `schemes` are called, with its size beside it: `4-bit mix` where the parts of the
    /// model have the schemes that `bits` chooses, whose bits may all be more.
    pub fn called(&self, schemes: &Schemes) -> String {
        let as_asked = self.target.is_none() && schemes.overrides == self.schemes.overrides;
        schemes.called(as_asked.then_some(self.bits))
    }
}

/// A quantization to be run.
pub struct Job<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) options: &'a QuantizeOptions,
    pub(super) method: Box<dyn Method>,
    pub(super) progress: Stages<'a>,
    pub(super) device: OnceLock<Option<DeviceEstimate>>,
}

impl<'a> Job<'a> {
    /// Checks the request against the model.
    ///
    /// # Errors
    /// [`Error::Request`] for an unknown method, a scheme that does not fit the model, a target
    /// that no choice of schemes reaches, or a
    /// model that is already quantized.
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
        Job::with_method(checkpoint, options, method, progress)
    }

    /// Like [`Job::new`], with a method of your own, for experiments. A run can be resumed only with a method of
    /// the same name and settings.
    pub fn with_method(
        checkpoint: &'a Checkpoint,
        options: &'a QuantizeOptions,
        method: Box<dyn Method>,
        progress: &'a dyn Progress,
    ) -> Result<Self> {
        options.schemes.check(checkpoint.config())?;
        if options.vision_8 && checkpoint.vision().is_none() {
            return Err(Error::Request {
                what: "vision-bits",
                expected: "a model that sees images".into(),
                found: "one that reads text alone".into(),
            });
        }
        check(options.target, options.bits)?;
        let untrainable = untrainable(checkpoint.config()).filter(|_| options.tuning.is_some());
        if let Some(found) = untrainable {
            return Err(refused(found));
        }
        let trellis = options.schemes.have_trellis();
        if trellis && method.scales_inputs() {
            return Err(Error::Request {
                what: "method",
                expected: "gptq, auto or rtn for trellis codes, which transform inputs themselves"
                    .into(),
                found: method.name().into(),
            });
        }
        let device = Device::choose(options.load.device);
        if let Ok(device) = device {
            device.single(QUANTIZING)?;
        }
        let on_gpu = !matches!(device, Ok(Device::Cpu));
        if trellis && on_gpu && method.needs() != Needs::Hessian {
            return Err(Error::Request {
                what: "method",
                expected: "gptq for trellis codes on a GPU, or --device cpu".into(),
                found: method.name().into(),
            });
        }
        if options.limits.any() && !options.measure {
            return Err(Error::Request {
                what: "limits on the quality",
                expected: "a run that measures it".into(),
                found: "one that does not".into(),
            });
        }
        let first = LayerWeights::read(checkpoint.store(), checkpoint.config(), 0)?;
        if let Some(quantized) = crate::layers::quantized(&first) {
            return Err(Error::Request {
                what: "source",
                expected: "an unquantized model".into(),
                found: format!("{} weights", quantized.scheme_name()),
            });
        }
        let job = Job {
            checkpoint,
            options,
            method,
            progress: Stages::new(progress),
            device: OnceLock::new(),
        };
        job.check_target()?;
        Ok(job)
    }

    /// The GPU that works, by its ordinal; `None` for the CPU.
    ///
    /// # Errors
    /// An absent device; several.
    pub(super) fn gpu(&self) -> Result<Option<usize>> {
        Ok(Device::choose(self.options.load.device)?.single(QUANTIZING)?)
    }

    pub(super) fn config(&self) -> &ModelConfig {
        self.checkpoint.config()
    }

    /// (number, length) of calibration sequences; (0, 0) if the method needs none.
    pub(super) fn shape(&self) -> (usize, usize) {
        if self.method.needs() == Needs::Nothing {
            return (0, 0);
        }
        let length = SEQUENCE.min(self.config().max_position_embeddings);
        let n = self.calib_tokens().div_ceil(length).max(1);
        (n, length)
    }

    /// Tokens to calibrate on.
    pub(super) fn calib_tokens(&self) -> usize {
        (self.options.calib_tokens).unwrap_or_else(|| self.default_tokens())
    }

    /// Most tokens to measure quality on.
    pub(super) fn eval_tokens(&self) -> usize {
        let usual = || (self.default_tokens() / 2).min(EVAL_TOKENS);
        self.options.eval_tokens.unwrap_or_else(usual)
    }

    fn default_tokens(&self) -> usize {
        match Device::choose(self.options.load.device) {
            Ok(Device::Cpu) => calibration::default_tokens(self.config()),
            _ => CALIBRATION_TOKENS,
        }
    }

    /// True if quality is measured on text that the source samples.
    pub(super) fn samples_held_out(&self) -> bool {
        self.options.measure && self.options.eval_text.is_none()
    }

    /// Most sequences sampled; 0 if none are.
    pub(super) fn sampled(&self) -> usize {
        let (n, _) = self.shape();
        let mut sampled = 0;
        if self.options.calibration == CalibrationSource::SelfSampled {
            sampled = n;
        }
        if self.samples_held_out() {
            let (n, _) = quality::held_out_shape(self.config(), self.eval_tokens());
            sampled = sampled.max(n);
        }
        sampled
    }

    /// Estimates the memory and disk space that the run will need.
    pub fn estimate(&self) -> memory::Estimate {
        let (n, length) = self.shape();
        let work = memory::Work {
            schemes: &self.options.schemes,
            vision_8: self.options.vision_8,
            needs: self.method.needs(),
            calibration: n * length,
            sampled: self.sampled(),
            groups: if self.options.target.is_some() || self.may_raise() {
                groups::groups(self.config()).len()
            } else {
                0
            },
            eval_tokens: self.eval_tokens(),
            on_gpu: matches!(
                Device::choose(self.options.load.device),
                Ok(Device::Cuda(_))
            ),
        };
        memory::Estimate::new(self.checkpoint, work)
    }

    /// True if a missed limit leads to measuring sensitivity. A target size is kept whatever the
    /// limits are.
    pub(super) fn may_raise(&self) -> bool {
        let options = self.options;
        options.limits.any() && options.target.is_none() && !options.candidates.is_empty()
    }

    pub(super) fn source_engine(&self) -> Result<Arc<dyn nq_runtime::Engine>> {
        let (config, store) = (self.config(), self.checkpoint.store());
        Ok(load(config, store, &self.options.load, &self.progress)?)
    }
}

/// Refuses a target that makes no sense.
fn check(target: Option<TargetSize>, bits: f32) -> Result<()> {
    match target {
        Some(TargetSize::BitsPerWeight(x)) if !(x > 0.0 && x <= 16.0) => Err(Error::Request {
            what: "target bits per weight",
            expected: format!("{bits} to 16"),
            found: x.to_string(),
        }),
        _ => Ok(()),
    }
}
